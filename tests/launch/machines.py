"""Runs on several machines, each of which stands in a folder of its own, as on a disk of its own.

Usage: accelerate launch --num_machines 2 ... machines.py MODEL train | resume CASE...
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from games import end_process
from launched import make

from agile_trainers.adapters.folders import CheckpointError

RUN = Path("run")


def refusal(case: str, model: Path, output: Path, **options: Any) -> str:
    try:
        make(case, model, output, **options)
    except ValueError as error:
        return str(error)
    return ""


def train(case: str, model: Path, own: bool) -> None:
    trainer = make(case, model, RUN / case, save_on_each_node=own)
    trainer.train()
    trainer.save_model(str(RUN / case / "end"))
    result = {"log": trainer.state.log_history, "evaluation": trainer.evaluate()}
    (RUN / case / f"result-{trainer.accelerator.process_index}.json").write_text(json.dumps(result))


def resume(case: str, model: Path, own: bool) -> None:
    trainer = make(case, model, RUN / case, save_on_each_node=own)
    try:
        trainer.train(resume_from_checkpoint=True)
    except CheckpointError as error:
        Path("error.txt").write_text(str(error))
        return
    trainer.save_model(str(RUN / case / "resumed-end"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    model, mode, *cases = sys.argv[1:]
    several = os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]
    for case in cases:
        (train if mode == "train" else resume)(case, Path(model), several)
    if mode == "train" and several:
        shared = Path(model).parent / "shared"
        refused = [
            refusal(cases[0], Path(model), RUN / "none"),
            refusal(cases[0], Path(model), shared, save_on_each_node=True),
        ]
        make(cases[0], Path(model), shared)  # one disk for all is fine without the option
        Path("refused.json").write_text(json.dumps(refused))
    end_process()
