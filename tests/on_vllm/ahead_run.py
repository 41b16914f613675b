"""Training ahead on a server that kills itself: ``ahead_run.py MODEL OUTPUT URL STEP SECONDS``, so long after this step."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "trainers"))

import torch
from chatter import Late
from checkpointed_runs import SAVING
from games import make_trainer
from transformers import TrainerCallback

RUN: dict[str, Any] = {
    "max_steps": 6, "per_device_train_batch_size": 8, "learning_rate": 0.3, "use_vllm": True, "vllm_mode": "server",
    "stop_strings": None, "max_model_length": 256, "environment_workers": 4, "batches_ahead": 2, **SAVING,
}  # fmt: skip


class Dies(TrainerCallback):
    """Kills the process some time after a step, before which nothing of the step is saved."""

    def __init__(self, step: int, seconds: float):
        self.step, self.seconds = step, seconds

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            threading.Timer(self.seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


def trainer(model: Path | str, output: Path | str, url: str, **changes: Any) -> Any:
    return make_trainer(model, output, environment=Late, vllm_server_base_url=url, **{**RUN, **changes})


if __name__ == "__main__":
    torch.set_num_threads(1)
    model, output, url, step, seconds = sys.argv[1:]
    trainer(model, output, url, callbacks=[Dies(int(step), float(seconds))]).train(resume_from_checkpoint="auto")
