"""Pushes every checkpoint to a Hub that fails; the disk is full for one of them.

Usage: HF_ENDPOINT=... python hub_faults.py MODEL OUTPUT
"""

import errno
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from checkpointed_runs import SAVING
from games import make_trainer
from hub_push import TOKEN

from agile_trainers.checkpoints import hub

hub.WAITS = (0.01, 0.01, 0.01)
hub.SILENCE_SECONDS = 2.0


def refuse_when_full(function: Any) -> Any:
    def full(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        if "checkpoint-6" in str(source) and hub.STAGE in str(target):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        return function(source, target, *args, **kwargs)

    return full


if __name__ == "__main__":
    model, output = map(Path, sys.argv[1:])
    os.link, shutil.copy2 = refuse_when_full(os.link), refuse_when_full(shutil.copy2)
    trainer = make_trainer(
        model, output / "run", max_steps=7, push_to_hub=True, hub_strategy="every_save", hub_always_push=True,
        hub_token=TOKEN, **SAVING,
    )  # fmt: skip
    trainer.train()
    trainer.push_to_hub()
