"""Short runs of every algorithm, to be started by ``accelerate launch``; each is saved, and gone on with from a checkpoint.

Usage: accelerate launch --config_file CONFIG launched.py MODEL OUTPUT
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from games import end_process, make_trainer
from ppo_games import make_ppo, wake

from agile_trainers.trainers.trainer import MultiTurnTrainer

STEPS, EPISODES = 3, 8
COPIES = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0}
"""The policy becomes the reference after each step."""
CASES: dict[str, dict[str, Any]] = {
    # A checkpoint in the middle of a generation batch that serves two updates.
    "grpo": {"num_iterations": 2, "beta": 0.1, "max_tokens_per_micro_batch": 150},
    "grpo-full": {"lora": False, "beta": 0.1, **COPIES},
    # A reference that has moved when the run is gone on with.
    "reinforce": {
        "algorithm": "reinforce", "num_generations": 1, "gradient_checkpointing": True,
        "beta": 0.1, "reference_adapter": True, **COPIES,
    },
    "reinforce-full": {"algorithm": "reinforce", "num_generations": 1, "lora": False},
    # The reference pass freezes the critic in the middle of a training step.
    "ppo": {
        "beta": 0.1, "critic_learning_rate": 0.05, "gradient_checkpointing": True, "num_eval_episodes": 4,
        "max_tokens_per_micro_batch": 150,
        "load_best_model_at_end": True, "metric_for_best_model": "eval_return", "eval_strategy": "steps", "eval_steps": 1,
    },
}  # fmt: skip
VLLM: dict[str, dict[str, Any]] = {
    "vllm": {"use_vllm": True, "num_iterations": 2},
    "vllm-full": {"use_vllm": True, "lora": False},
}
"""For tests/on_vllm."""


def make(case: str, model: Path, output: Path, **more: Any) -> MultiTurnTrainer:
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    changes = {
        "per_device_train_batch_size": EPISODES // processes,
        # What several processes compute in packed rows, one computes in padded ones.
        "sequence_packing": "prefix" if processes > 1 else "none",
        "max_steps": STEPS,
        "save_strategy": "steps",
        "save_steps": 1,
        **(CASES | VLLM)[case],
        **more,
    }
    if case != "ppo":
        return make_trainer(model, output, **changes)
    trainer = make_ppo(model, output, **changes)
    wake(trainer)
    return trainer


def shares(trainer: MultiTurnTrainer) -> dict[str, Any]:
    """How much of the model and of the optimizer's state this process keeps, in numbers."""
    parameters = list(trainer.model.parameters())
    engine = trainer.model_wrapped
    optimizer = getattr(engine, "optimizer", None)
    return {
        "engine": trainer.accelerator.distributed_type.value,
        "processes": trainer.accelerator.num_processes,
        "stage": engine.zero_optimization_stage() if hasattr(engine, "zero_optimization_stage") else None,
        "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in parameters),
        "held": sum(p.ds_tensor.numel() if hasattr(p, "ds_tensor") else p.numel() for p in parameters),
        "trained": sum(getattr(p, "ds_numel", p.numel()) for p in parameters if p.requires_grad),
        "optimized": sum(p.numel() for group in optimizer.param_groups for p in group["params"]) if optimizer else None,
    }


def play(case: str, model: Path, output: Path) -> None:
    whole = make(case, model, output / "whole")
    if whole.accelerator.num_processes == 1:
        whole.save_model(str(output / "start"))
    whole.train()
    held = shares(whole)
    whole.save_model(str(output / "end"))
    evaluated = whole.evaluate()
    resumed = make(case, model, output / "resumed")
    resumed.train(resume_from_checkpoint=str(output / "whole" / "checkpoint-1"))
    resumed.save_model(str(output / "resumed-end"))
    if whole.accelerator.is_main_process:
        result = {"shares": held, "logged": whole.state.log_history[:STEPS], "evaluation": evaluated}
        (output / "result.json").write_text(json.dumps(result))


def poison(model: Path, output: Path) -> None:
    """Train four steps; the loss of one process is NaN in the second, and all moments are saved after each."""
    trainer = make("grpo", model, output)
    trainer.args.max_steps, trainer.args.optim, trainer.args.lr_scheduler_type = 4, "adamw_torch", "linear"
    whole_loss = trainer._compute_loss

    def loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        value = whole_loss(*args, **kwargs)
        last = trainer.accelerator.process_index == trainer.accelerator.num_processes - 1
        return value * float("nan") if trainer.state.global_step == 1 and last else value

    trainer._compute_loss = loss  # type: ignore[method-assign]
    trainer.train()
    if trainer.accelerator.is_main_process:
        (output / "result.json").write_text(json.dumps({"logged": trainer.state.log_history[:4]}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[3:] or CASES:
        play(name, Path(sys.argv[1]), Path(sys.argv[2]) / name)
    if not sys.argv[3:]:
        poison(Path(sys.argv[1]), Path(sys.argv[2]) / "poisoned")
    end_process()
