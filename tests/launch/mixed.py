"""Runs of two environments, to be launched with two processes; leaves what each learned and how a killed one went on.

Usage: accelerate launch --num_processes 2 mixed.py MODEL OUTPUT
"""

import json
import sys
from pathlib import Path

from checkpointed_runs import SAVING, KillBefore, Killed, weights
from games import end_process
from mixtures import make

# An answer to `low` is right by chance in 1 of 118 episodes, and GRPO learns nothing from a group without one: of six seeds,
# two had learned it after 18 steps, all after 24, and after 30 the worst had a return of 0.84.
STEPS = {"grpo": 30, "reinforce": 24, "ppo": 24}


def learn(model: Path, output: Path, algorithm: str) -> None:
    trainer = make(model, output, algorithm, per_device_train_batch_size=32, max_steps=STEPS[algorithm])
    trainer.train()
    if trainer.accelerator.is_main_process:
        (output / "log.json").write_text(json.dumps(trainer.state.log_history))


def kill_and_resume(model: Path, output: Path) -> None:
    changes = {
        "per_device_train_batch_size": 4, "steps_per_generation": 2, "num_generations": 2, "max_steps": 4,
        "entropy_coef": 0.0, **SAVING,
    }  # fmt: skip
    whole = make(model, output / "whole", "grpo", **changes)
    whole.train()
    for step in (1, 2, 4):
        trainer = make(model, output / "killed", "grpo", callbacks=[KillBefore(step)], **changes)
        try:
            trainer.train(resume_from_checkpoint=step > 1 or None)
        except Killed:
            trainer.engine.pool.close()
    ours, theirs = weights(trainer), weights(whole)
    equal = all((ours[name] == theirs[name]).all() for name in theirs) and ours.keys() == theirs.keys()
    (output / f"equal-{trainer.accelerator.process_index}").write_text(str(bool(equal)))


if __name__ == "__main__":
    model, output = map(Path, sys.argv[1:])
    for algorithm in STEPS:
        learn(model, output / algorithm, algorithm)
    kill_and_resume(model, output / "resumed")
    end_process()
