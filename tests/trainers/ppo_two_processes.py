"""Two steps of PPO per case, to be launched with one process or two; leaves gradients, adapters and metrics behind.

Usage: torchrun --nproc_per_node N ppo_two_processes.py MODEL OUTPUT '{"case": {"option": "value"}}'
"""

import json
import os
import sys
from pathlib import Path

import torch
from games import Gradients, end_process
from ppo_games import make_ppo, wake


def play(model: str, output: Path, changes: dict) -> None:
    """One case. ``per_device_train_batch_size`` is divided by the number of processes."""
    rows = changes.pop("per_device_train_batch_size") // int(os.environ.get("WORLD_SIZE", "1"))
    gradients = Gradients()
    trainer = make_ppo(
        model,
        output,
        callbacks=[gradients],
        max_steps=2,
        learning_rate=0.01,
        per_device_train_batch_size=rows,
        **changes,
    )
    untouched = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if ".critic" in n}
    wake(trainer)
    trainer.train()
    torch.save(untouched, output / f"critic-{trainer.accelerator.process_index}.pt")
    if trainer.accelerator.is_main_process:
        torch.save(
            {
                "processes": trainer.accelerator.num_processes,
                "distributed_type": str(trainer.accelerator.distributed_type),
                "gradients": [{k.removeprefix("module."): v for k, v in step.items()} for step in gradients.steps],
                "adapter": {n: p.detach() for n, p in trainer.model.named_parameters() if p.requires_grad},
                "logged": trainer.state.log_history[:2],
            },
            output / "result.pt",
        )


if __name__ == "__main__":
    for name, case in json.loads(sys.argv[3]).items():
        play(sys.argv[1], Path(sys.argv[2]) / name, case)
    end_process()
