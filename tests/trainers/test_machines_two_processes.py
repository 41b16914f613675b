"""Two machines of one process each, over gloo: which disks fit the options, and the step that both resume from."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from launching import run

SCRIPT = Path(__file__).with_name("machines_two_processes.py")


@pytest.mark.slow  # two processes
def test_machines_agree_on_disks_and_steps(tmp_path: Path) -> None:
    """A process that went on alone would hang at the next collective; ``run`` has a time limit."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = run([*command, str(SCRIPT), str(tmp_path)], timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    found, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    assert found == second

    assert found["one step behind"] == 2 and found["no common step but the first"] == 1
    assert found["nothing yet"] is None
    assert "CheckpointError" in found["one lost all"] and "none, checkpoint-2" in found["one lost all"]
    assert "checkpoint-3, checkpoint-2, in the order" in found["an older one is not asked for"]
    assert found["by disk"] == [10, 11] and found["by one disk"] == [10] and found["None is a result"] == [None, None]
    assert found["damaged"] == "CheckpointError: damaged here"

    refused, fine = found["apart"]
    assert "The 2 machines do not share output_dir" in refused and "Set save_on_each_node=True" in refused
    assert fine is None and found["shared"][0] is None
    assert "share output_dir" in found["shared"][1] and "Set save_on_each_node=False" in found["shared"][1]
    assert found["left"] == []
