"""Runs that are killed and resumed, to be launched with two processes; leaves the weights of both behind.

Usage: accelerate launch --num_processes 2 checkpoint_two_processes.py MODEL OUTPUT
"""

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from checkpointed_runs import CASES, SAVING, KillBefore, Told, make, press_ctrl_c, run_until, weights
from transformers import TrainerCallback

from agile_trainers.checkpoints import stopping

CASES["grpo"] |= {"max_steps": 3}
CASES["reinforce"] |= {"per_device_train_batch_size": 2, "max_steps": 5, "environment": Told}
"""Generation batches of as many episodes as with one process."""

KILLS = {"grpo": [1], "reinforce": [1, 4], "ppo": [1]}
"""In the middle of a generation batch, and where an epoch ends; with one process, test_checkpoint.py kills at every step."""


class InterruptOne(TrainerCallback):
    """Ctrl-C that reaches one of the processes only."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1 and args.process_index == 1:
            press_ctrl_c()


def kill_and_resume(case: str, model: Path, output: Path) -> None:
    whole = make(case, model, output / "whole")
    whole.train()
    for step in (*KILLS[case], whole.args.max_steps):
        trainer = run_until(step, case, model, output / "killed", resume=step > 1 or None)
    rank = trainer.accelerator.process_index
    torch.save((weights(trainer), weights(whole)), output / f"weights-{rank}.pt")


def interrupt(model: Path, output: Path) -> None:
    trainer = make("grpo", model, output, callbacks=[InterruptOne()])
    try:
        trainer.train()
    except KeyboardInterrupt as stop:
        (output / f"stopped-{trainer.accelerator.process_index}").write_text(str(stop))


def run_out_of_time(model: Path, output: Path) -> None:
    """The clock of the second process alone says that the time is over, in the second step."""

    class LateClock(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            if state.global_step == 1 and args.process_index == 1:
                stopping.time = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600)

    trainer = make("grpo", model, output, callbacks=[LateClock()], max_wall_seconds=3600)
    trainer.train()
    stopping.time = time
    (output / f"ended-{trainer.accelerator.process_index}").write_text(f"step {trainer.state.global_step}")


def die_while_saving(model: Path, output: Path) -> None:
    """The second process dies as it is about to write its part of the second checkpoint."""

    def die(event: str, arguments: tuple) -> None:
        if event == "os.mkdir" and str(arguments[0]).endswith("checkpoint-2/rollout"):
            os._exit(9)

    if os.environ["RANK"] == "1":
        sys.addaudithook(die)
    make("grpo", model, output, callbacks=[KillBefore(2)], **SAVING).train()


if __name__ == "__main__":
    model, output = map(Path, sys.argv[1:])
    for case in KILLS:
        kill_and_resume(case, model, output / case)
    interrupt(model, output / "interrupted")
    run_out_of_time(model, output / "late")
    die_while_saving(model, output / "died")
