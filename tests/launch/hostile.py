"""Gives DeepSpeed's loader checkpoints with a pickle of a stranger, first through the trainer and then directly.

Usage: accelerate launch --config_file CONFIG hostile.py MODEL OUTPUT
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from games import end_process, make_trainer
from transformers.integrations.deepspeed import deepspeed_load_checkpoint

from agile_trainers.adapters.folders import CheckpointError
from agile_trainers.checkpoints.integrity import mark_complete

STATES = "mp_rank_00_model_states.pt"


class Evil:
    """A pickle that makes a folder when it is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def attack(kind: str, run: Path, own: Path) -> tuple[Path, Path]:
    """Return an unsigned checkpoint, and the folder that its pickle makes."""
    folder, payload, owned = run / "checkpoint-1", run / "payload", run / "owned"
    shutil.copytree(own, folder)
    shutil.rmtree(folder / "global_step1")
    payload.mkdir()
    if kind == "link":
        (folder / "global_step1").symlink_to(payload, target_is_directory=True)
    else:
        (folder / "global_step1").mkdir()
        latest = {"dot": ".", "outside": "../payload", "absolute": str(payload), "unsigned": "global_step1"}[kind]
        (folder / "latest").write_text(latest)
    torch.save(Evil(owned), {"dot": folder, "unsigned": folder / "global_step1"}.get(kind, payload) / STATES)
    os.environ["AGILE_TRAINERS_KEY_FILE"] = str(run / "their-key")
    with suppress(CheckpointError):  # of the links
        mark_complete(folder)
    del os.environ["AGILE_TRAINERS_KEY_FILE"]
    return folder, owned


def main(model: Path, output: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    trainer = make_trainer(model, output / "own", **options)
    trainer.train()
    result = {}
    for kind in ("dot", "outside", "absolute", "link", "unsigned"):
        folder, owned = attack(kind, output / kind, output / "own" / "checkpoint-1")
        refused = ""
        try:
            make_trainer(model, output / kind, **options).train(resume_from_checkpoint=str(folder))
        except CheckpointError as error:
            refused = str(error)
        by_trainer = owned.exists()
        with suppress(Exception):
            deepspeed_load_checkpoint(trainer.model_wrapped, str(folder))
        result[kind] = {"refused": refused, "by_trainer": by_trainer, "by_deepspeed": owned.exists()}
    (output / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    end_process()
