"""Two updates on episodes of several paths per case, to be launched with one process or two; leaves gradients behind.

Usage: torchrun --nproc_per_node N paths_two_processes.py MODEL OUTPUT '{"case": {"option": "value"}}'
"""

import json
import os
import sys
from pathlib import Path

import torch
from games import Gradients, end_process, make_trainer
from path_episodes import ordinary, programs
from ppo_games import make_ppo, wake


def play(model: str, output: Path, changes: dict) -> None:
    """One case. Only the second half of the episodes has several paths if ``half`` is set."""
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    gradients, size = Gradients(), 8 // world
    ppo, half = changes.pop("ppo", False), changes.pop("half", False)
    make = make_ppo if ppo else make_trainer
    trainer = make(
        model, output, callbacks=[gradients], max_steps=2, learning_rate=0.01, per_device_train_batch_size=size,
        max_logprob_gap=100.0, vllm_importance_sampling_correction=False, **changes,
    )  # fmt: skip
    if ppo:
        wake(trainer)
    for seed in range(2):
        episodes = programs(seed=seed)
        if half:
            episodes[:4] = [ordinary(episode) for episode in episodes[:4]]
        trainer.update(episodes[rank * size : (rank + 1) * size])
    if trainer.accelerator.is_main_process:
        steps = [{k.removeprefix("module."): v for k, v in step.items()} for step in gradients.steps]
        logged = {"gradients": steps, "logged": trainer.state.log_history[:2]}
        torch.save({"processes": trainer.accelerator.num_processes, **logged}, output / "result.pt")


if __name__ == "__main__":
    for name, case in json.loads(sys.argv[3]).items():
        play(sys.argv[1], Path(sys.argv[2]) / name, case)
    end_process()
