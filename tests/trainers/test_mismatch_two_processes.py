"""Real gloo DDP: one rank alone has a mismatch, and all of them stop with the same error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from planted_deliveries import CAUSES
from several_processes import launch

SCRIPT = Path(__file__).with_name("mismatch_two_processes.py")
CASES = {
    "loss": {},
    "accumulated": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "scored": {"per_device_train_batch_size": 2, "steps_per_generation": 2},
}
PLANTED = {"planted": {"planted": "not arrived", "max_new_tokens": 12}}


@pytest.fixture(scope="module")
def runs(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A rank that went on alone would hang at the next collective; ``launch`` has a time limit."""
    return launch(SCRIPT, 2, embedded_model, tmp_path_factory.mktemp("mismatch"), CASES | PLANTED)


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_stop_for_the_mismatch_of_one(runs: Path, case: str) -> None:
    first, second = (json.loads((runs / case / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first["error"] == "SamplerMismatchError" and first["steps"] == 0 and first["unchanged"]
    # A shift of .5 in the tokens of one rank, about half of all; the text names the mean of both.
    assert 0.1 < first["mismatch"] < 0.4


def test_what_the_sampler_of_one_rank_plays_is_named(runs: Path) -> None:
    first, second = (json.loads((runs / f"planted/rank-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second and first["steps"] == 0 and first["unchanged"]
    assert f"is trained: {CAUSES['not arrived']}" in first["text"]
