"""vLLM in every process of a run whose parameters are divided among them: ZeRO-3, through ``accelerate launch``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

from launched import VLLM
from launched_runs import SCRIPT, distance, episodes, launch, of, weights


@pytest.fixture(scope="module")
def runs(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One process, and two."""
    folders = [tmp_path_factory.mktemp(name) for name in ("single", "zero3")]
    for folder in folders:
        done = launch(f"cpu/{folder.name[:-1]}", SCRIPT, embedded_model, folder, *VLLM)
        assert done.returncode == 0, done.stderr[-4000:]
    return folders


@pytest.mark.parametrize("case", VLLM)
def test_two_processes_are_one(runs: list[Path], case: str) -> None:
    """Episodes are those of the newest policy, which the engines can only know if it was gathered."""
    ours, theirs = (episodes(folder / case / "whole") for folder in runs)
    assert len(ours) == (16 if case == "vllm" else 24)
    assert [record["completion_ids"] for record in ours] == [record["completion_ids"] for record in theirs]
    start, one, two = (
        of(".", weights(folder / case / name))
        for folder, name in ((runs[0], "start"), (runs[0], "end"), (runs[1], "end"))
    )
    shares = json.loads((runs[1] / case / "result.json").read_text())["shares"]
    assert shares["stage"] == 3 and shares["held"] <= 0.51 * shares["parameters"]
    moved = distance(one, start)
    assert moved > 0.01 and distance(two, one) < 1e-5 * moved
    assert distance(two, of(".", weights(runs[1] / case / "resumed-end"))) == 0.0
