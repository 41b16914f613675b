"""Copies a checkpoint into the folder of another run, which goes on from it as a branch of its own."""

from __future__ import annotations

import shutil
from fractions import Fraction
from pathlib import Path

import torch

from agile_trainers.adapters.folders import RECORD, read_json, write_json
from agile_trainers.checkpoints.integrity import check_complete, mark_complete

_STATE, _SCHEDULER = "trainer_state.json", "scheduler.pt"


def continue_checkpoint(checkpoint: Path, output_dir: Path, num_iterations: int) -> Path:
    """Copy a checkpoint, its optimizer and random states included, into the folder of another run.

    With another ``num_iterations`` a generation batch takes another number of optimizer steps. The step of the copy, and of
    its learning rate schedule, is then the one at which a run with that number has played as many generation batches.

    Args:
        checkpoint: A complete checkpoint, saved at the end of a generation batch if ``num_iterations`` differs.
        output_dir: Folder of the other run.
        num_iterations: Of the other run.

    Returns:
        The copy, a complete checkpoint in ``output_dir``.

    Raises:
        CheckpointError: If the checkpoint is incomplete.
        ValueError: If the other run has no such step.
    """
    check_complete(checkpoint)
    record = read_json(checkpoint / RECORD)
    ratio = Fraction(num_iterations, int(record["options"]["num_iterations"]))
    step = ratio * int(record["global_step"])
    if step.denominator != 1:
        raise ValueError(
            f"{checkpoint} cannot be continued with num_iterations={num_iterations}: step {record['global_step']} is inside "
            "a generation batch of that run."
        )
    building, folder = output_dir / f"continued-{step}", output_dir / f"checkpoint-{step}"
    shutil.rmtree(building, ignore_errors=True)  # left by a killed process
    shutil.copytree(checkpoint, building)
    # Without an id, the run that resumes here begins a branch.
    write_json(building / RECORD, {**record, "global_step": int(step), "run_id": ""})
    if ratio != 1:
        state = read_json(building / _STATE)
        write_json(building / _STATE, {**state, "global_step": int(step), "max_steps": int(ratio * state["max_steps"])})
        schedule = torch.load(building / _SCHEDULER, weights_only=True)
        schedule["last_epoch"] = int(step)
        schedule["_step_count"] = int(step) + 1
        torch.save(schedule, building / _SCHEDULER)
    mark_complete(building)
    building.rename(folder)
    return folder
