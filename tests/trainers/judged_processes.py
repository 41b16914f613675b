"""A judged run, in one process or two, which may end itself with SIGKILL; leaves its weights behind.

Usage: torchrun --nproc_per_node N judged_processes.py MODEL OUTPUT '{"case": {"url": "http://...", "option": "value"}}'
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from checkpointed_runs import SAVING, weights
from games import end_process, make_trainer
from tenacity import wait_none
from transformers import TrainerCallback

from agile_trainers import Judge
from agile_trainers.judges import asking

asking.WAITS = wait_none()


class KillInside(TrainerCallback):
    """Kills the process in the second step of its run, when the batch was judged."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def play(model: str, output: Path, case: dict[str, Any]) -> None:
    """One case: ``url`` and ``per`` of the judge, ``kill``, ``resume``, and options of the run."""
    judge = Judge(case.pop("url"), "r", model="m", per=case.pop("per"), attempts=2)
    callbacks: list[TrainerCallback] = [KillInside()] if case.pop("kill", False) else []
    resume, processes = case.pop("resume", None), int(os.environ.get("WORLD_SIZE", "1"))
    trainer = make_trainer(
        model, output, reward_funcs=judge, callbacks=callbacks, log_rollouts=1, **SAVING,
        **{"per_device_train_batch_size": 8 // processes, "optim": "adamw_torch", "learning_rate": 1e-2, **case},
    )  # fmt: skip
    with trainer:
        trainer.train(resume_from_checkpoint=resume)
        if trainer.accelerator.is_main_process:
            torch.save(weights(trainer), output / "weights.pt")


if __name__ == "__main__":
    for name, case in json.loads(sys.argv[3]).items():
        (Path(sys.argv[2]) / name).mkdir(parents=True, exist_ok=True)
        play(sys.argv[1], Path(sys.argv[2]) / name, case)
    end_process()
