"""Runs in which the sampler of the last rank alone says something else, or plays without the adapter (``"planted"``);
leaves what each rank raised.

Usage: torchrun --nproc_per_node 2 mismatch_two_processes.py MODEL OUTPUT '{"case": {"option": "value"}}'
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from games import end_process, make_trainer
from planted_deliveries import plant

from agile_trainers.sampling.mismatch import SamplerMismatchError


def play(model: str, output: Path, changes: dict[str, Any]) -> None:
    """One case."""
    planted = changes.pop("planted", None)
    lora = {"init_lora_weights": planted is None and "gaussian"}
    trainer = make_trainer(model, output, lora=lora, **{"per_device_train_batch_size": 4, **changes})
    measure, rank = trainer._open_mismatch, trainer.accelerator.process_index

    def shifted(batch: Any, scores: Any, trained: torch.Tensor) -> None:
        if rank == trainer.accelerator.num_processes - 1:
            batch.sampling_logprobs[batch.action_mask] -= 0.5
        measure(batch, scores, trained)

    if planted is None:
        trainer._open_mismatch = shifted  # type: ignore[method-assign]
    elif rank == trainer.accelerator.num_processes - 1:
        plant(trainer, planted)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    result: dict[str, Any] = {"error": None}
    try:
        trainer.train()
    except SamplerMismatchError as error:
        mismatch = re.search(r"differ by (\S+) nats", str(error))
        result = {
            "text": str(error),
            "error": type(error).__name__,
            "mismatch": float(mismatch[1]) if mismatch else None,
        }
    named = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
    result["unchanged"] = all(torch.equal(p, before[name]) for name, p in named)
    result["steps"] = trainer.state.global_step
    (output / f"rank-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    for name, case in json.loads(sys.argv[3]).items():
        play(sys.argv[1], Path(sys.argv[2]) / name, case)
    end_process()
