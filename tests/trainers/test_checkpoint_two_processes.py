"""Checkpoints of two processes: killed, resumed, interrupted, killed while saving."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpointed_runs import assert_same
from forks import run_ranks
from safetensors.torch import load_file

from agile_trainers.checkpoints.integrity import newest_complete

SCRIPT = Path(__file__).with_name("checkpoint_two_processes.py")


@pytest.fixture(scope="module")
def output(embedded_model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    ranks = run_ranks(2, [SCRIPT, embedded_model, folder])
    assert ranks[1].returncode != 0 and (folder / "died").is_dir(), ranks[0].stderr[-4000:] + ranks[1].stderr[-4000:]
    return folder


@pytest.mark.parametrize("case", ["grpo", "reinforce", "ppo"])
def test_a_killed_run_goes_on(output, case):
    for rank in (0, 1):
        resumed, whole = torch.load(output / case / f"weights-{rank}.pt")
        assert_same(resumed, whole)
    parts = [
        load_file(output / case / "killed" / "checkpoint-1" / "rollout" / f"rank-{rank}.safetensors") for rank in (0, 1)
    ]
    ids = [part["0.completion_ids"] for part in parts]
    assert ids[0].shape != ids[1].shape or not torch.equal(*ids), "each process keeps its own episodes"


def test_an_interrupt_that_reaches_one_process_stops_both_after_the_same_step(output):
    for rank in (0, 1):
        assert (output / "interrupted" / f"stopped-{rank}").read_text().startswith("stopped at step 2")
    assert newest_complete(output / "interrupted")[0].name == "checkpoint-2"


def test_a_clock_that_is_ahead_on_one_process_ends_both_after_the_same_step_without_an_error(output):
    assert [(output / "late" / f"ended-{rank}").read_text() for rank in (0, 1)] == ["step 2", "step 2"]
    assert [path.name for path in (output / "late").glob("checkpoint-*")] == ["checkpoint-2"]


def test_a_process_that_dies_while_saving_leaves_no_whole_checkpoint(output):
    folder, skipped = newest_complete(output / "died")
    assert folder.name == "checkpoint-1" and skipped == [] and not (output / "died" / "checkpoint-2").exists()
