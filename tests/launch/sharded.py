"""Rollout, scoring, loss, reference and saving on models that PyTorch's ``fully_shard`` (FSDP2) has divided, by hand.

On CPU accelerate runs DDP where its configuration names FSDP, so the model is divided here as accelerate does it on GPUs.

Usage: torchrun --nproc_per_node N sharded.py MODEL OUTPUT; with one process nothing is divided.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from games import end_process, make_trainer
from ppo_games import make_ppo, wake
from torch.distributed import init_device_mesh
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from agile_trainers.adapters.loading import restore_adapter
from agile_trainers.trainers.trainer import MultiTurnTrainer

EPISODES, PROCESSES = 8, int(os.environ["WORLD_SIZE"])
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"beta": 0.1, "reference_adapter": True, "importance_sampling_level": "turn"},
    "grpo-full": {"lora": False},
    "ppo": {"beta": 0.1, "gradient_checkpointing": True},
    "taught": {
        "environment": "games:Hinting", "teacher": "policy", "teacher_hint": "hint", "num_generations": 2,
        "teacher_gradient": "distribution_reverse", "gradient_checkpointing": True,
    },
}  # fmt: skip


def make(case: str, model: Path, output: Path) -> MultiTurnTrainer:
    changes = {
        "per_device_train_batch_size": EPISODES // PROCESSES,
        # What several processes compute in packed rows, one computes in padded ones.
        "sequence_packing": "prefix" if PROCESSES > 1 else "none",
        **CASES[case],
    }
    if case != "ppo":
        return make_trainer(model, output, **changes)
    trainer = make_ppo(model, output, **changes)
    wake(trainer)
    return trainer


def divide(trainer: MultiTurnTrainer) -> None:
    """Each decoder layer a unit, the rest another."""
    mesh = init_device_mesh("cpu", (PROCESSES,))
    for module in list(trainer.model.modules()):
        if type(module).__name__ == "Qwen3DecoderLayer":
            fully_shard(module, mesh=mesh)
    fully_shard(trainer.model, mesh=mesh)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def step(trainer: MultiTurnTrainer) -> dict[str, torch.Tensor]:
    """One update as ``Trainer`` makes it; the gradient."""
    trainer.model.train()
    rows = [dict(trainer.train_dataset[0])] * (EPISODES // PROCESSES)
    trainer.current_gradient_accumulation_steps = 1
    batch = trainer._generate_and_score_completions(rows)
    if trainer.critic is not None:
        trainer.critic.count_turns([batch])
    trainer.model.zero_grad()
    trainer._compute_loss(trainer.model, batch).backward()
    gradient = {name: full(p.grad) for name, p in trainer.model.named_parameters() if p.grad is not None}
    trainer.optimizer.step()
    trainer.state.global_step += 1
    trainer._step += 1
    return gradient


def play(case: str, model: Path, output: Path) -> None:
    trainer = make(case, model, output)
    if PROCESSES > 1:
        divide(trainer)
    trainer.create_optimizer_and_scheduler(2)
    gradients = [step(trainer)]
    if "reference_adapter" in CASES[case]:
        trainer.update_reference()
    gradients.append(step(trainer))
    assert trainer.packer.packs == (PROCESSES > 1)
    state = get_model_state_dict(trainer.model, options=StateDictOptions(full_state_dict=True))
    if trainer.accelerator.is_main_process:
        trainer._save(str(output / "end"), state_dict=state)
        kept = [p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in trainer.model.parameters()]
        whole = sum(p.numel() for p in trainer.model.parameters())
        torch.save({"gradients": gradients, "share": sum(kept) / whole}, output / "result.pt")
    trainer.accelerator.wait_for_everyone()
    if CASES[case].get("lora", True):
        check_restoring(trainer, output / "end")


def check_restoring(trainer: MultiTurnTrainer, folder: Path) -> None:
    """Every adapter, disturbed, is as it was after being restored."""
    own = {name: p for name, p in trainer.model.named_parameters() if "lora_" in name or "modules_to_save" in name}
    before = {name: full(p) for name, p in own.items()}
    for parameter in own.values():
        parameter.data.add_(1.0)
    for adapter in trainer.model.peft_config:
        restore_adapter(trainer.model, adapter, folder if adapter == "default" else folder / adapter)
    assert before and all(torch.equal(full(p), before[name]) for name, p in own.items())


if __name__ == "__main__":
    for name in sys.argv[3:] or CASES:
        play(name, Path(sys.argv[1]), Path(sys.argv[2]) / name)
    end_process()
