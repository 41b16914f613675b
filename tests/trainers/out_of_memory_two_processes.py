"""Memory runs out on the last rank alone: in a rollout, after which all have its rows, and in an update, which ends all.

Usage: torchrun --nproc_per_node 2 out_of_memory_two_processes.py MODEL OUTPUT
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from games import make_trainer

from agile_trainers.rollout.generators.transformers.generator import TransformersGenerator
from agile_trainers.sampling import sampler


def play(model: str, output: Path) -> None:
    """Train a step whose rollout does not fit, then one whose update does not."""
    trainer: Any = make_trainer(model, output / "run", per_device_train_batch_size=4, max_steps=2)
    rank = trainer.accelerator.process_index
    forward = TransformersGenerator._forward

    def watched(self: Any, batch: Any) -> torch.Tensor:
        if rank == 1 and len(batch.rows) > 2:
            raise torch.OutOfMemoryError
        return forward(self, batch)

    gathered, gather = [], sampler.gathered_once
    sampler.gathered_once = lambda model: gathered.append(model) or gather(model)  # type: ignore[func-returns-value]
    TransformersGenerator._forward = watched  # type: ignore[method-assign]
    trainer.update(trainer.rollout())
    named = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
    total = sum(p.double().sum().item() for _, p in named)
    result = {
        "rows": trainer.sampler.rows,
        "steps": trainer.state.global_step,
        "weights": total,
        "gathered": len(gathered),
    }
    (output / f"rank-{rank}.json").write_text(json.dumps(result))

    def run_out(_module: Any, _args: Any, kept: torch.Tensor) -> None:
        if rank == 1 and kept.requires_grad:
            raise torch.OutOfMemoryError

    layer = next(m for name, m in trainer.model.named_modules() if name.endswith("layers.0.mlp.down_proj"))
    layer.register_forward_hook(run_out)
    trainer.update(trainer.rollout())
    (output / f"survivor-{rank}").touch()


if __name__ == "__main__":
    play(sys.argv[1], Path(sys.argv[2]))
