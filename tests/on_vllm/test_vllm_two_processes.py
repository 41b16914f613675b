"""Two processes, with an engine each or one between them: they play the episodes of one and compute its gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

import torch
from games import relative_error
from several_processes import SCRIPT, episodes, launch

CASES: dict[str, dict[str, Any]] = {
    "lora": {"num_generations": 8, "vllm_importance_sampling_mode": "turn_mask"},
    "whole": {"lora": False},
}


@pytest.fixture(scope="module")
def cases() -> dict[str, dict[str, Any]]:
    return {
        name: {"use_vllm": True, "per_device_train_batch_size": 8, "max_steps": 2, "evaluated": True, **case}
        for name, case in CASES.items()
    }


@pytest.fixture(scope="module")
def one(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory, cases: dict[str, dict[str, Any]]) -> Path:
    return launch(SCRIPT, 1, embedded_model, tmp_path_factory.mktemp("one"), cases)


@pytest.mark.parametrize("engines", [2, 1], ids=["an engine each", "one engine between them"])
def test_two_processes_are_one(
    engines: int, embedded_model: Path, tmp_path: Path, one: Path, cases: dict[str, dict[str, Any]]
) -> None:
    """Answers end at different times, so that the processes have different numbers of requests under way."""
    spread = {name: {**case, "vllm_tensor_parallel_size": 2 // engines} for name, case in cases.items()}
    two = launch(SCRIPT, 2, embedded_model, tmp_path, spread)
    for case in CASES:
        ours, theirs = (torch.load(run / case / "result.pt", weights_only=False) for run in (one, two))
        assert (ours["processes"], theirs["processes"]) == (1, 2)
        for kind, count in (("train", 16), ("eval", 5)):
            played = [[record["completion_ids"] for record in episodes(run / case, kind)] for run in (one, two)]
            assert len(played[0]) == count and played[0] == played[1]
        for single, double in zip(ours["gradients"], theirs["gradients"], strict=True):
            assert relative_error(double, single) < 1e-5
        for name in ("mean", "max"):
            name = f"sampling/sampling_logp_difference/{name}"
            assert ours["logged"][name] < 1e-3
            assert theirs["logged"][name] == pytest.approx(ours["logged"][name], abs=1e-5)
