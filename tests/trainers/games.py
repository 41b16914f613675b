"""Environments and trainers for the trainer tests: small, deterministic, with turns and observations of many lengths."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from chatter import Chatter
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

from agile_trainers.envs.context import Context, Question
from agile_trainers.train_batch import TrainBatch
from agile_trainers.trainers import (
    MultiTurnDistillationConfig,
    MultiTurnDistillationTrainer,
    MultiTurnGRPOConfig,
    MultiTurnGRPOTrainer,
    MultiTurnREINFORCEConfig,
    MultiTurnREINFORCETrainer,
    find_algorithm,
)
from agile_trainers.trainers.trainer import MultiTurnTrainer
from agile_trainers.types import Message

LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": "gaussian"}
ALGORITHMS: dict[str, tuple[type[MultiTurnTrainer], Any]] = {
    "distillation": (MultiTurnDistillationTrainer, MultiTurnDistillationConfig),
    "grpo": (MultiTurnGRPOTrainer, MultiTurnGRPOConfig),
    "reinforce": (MultiTurnREINFORCETrainer, MultiTurnREINFORCEConfig),
}


class OneTurn(Chatter):
    """The same for exactly one turn."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        observation = super().reset(seed, options)
        self.length = 1
        return observation


class Lucky(OneTurn):
    """Pays for one answer of five, by chance, in one turn."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, _, *others, _ = super().step(action)
        won = sum(map(ord, action)) % 5 == 4
        return observation, float(won), *others, {"success": won}


class Rarely(Lucky):
    """Pays for one answer of ten."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, reward, *others, _ = super().step(action)
        won = reward * (sum(map(ord, action)) % 2 == 0)
        return observation, float(won), *others, {"success": won > 0}


class Long(Chatter):
    """The same for four turns."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        observation = super().reset(seed, options)
        self.length = 4
        return observation


class Hinting(Long):
    """The same, which names a hint with its second step; an episode of an odd seed has none."""

    hint = "say something"

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.hints = (seed or 0) % 2 == 0
        return super().reset(seed, options)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        *others, info = super().step(action)
        return *others, info | ({"hint": self.hint} if self.hints and self.turn == 2 else {})


class Uneven(Chatter):
    """Pays nothing where the row's number, or the seed, is even: such a group is a zero-advantage group."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.pays = (options["number"] if options else seed or 0) % 2
        return super().reset(seed, options)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, reward, *rest = super().step(action)
        return observation, reward * self.pays, *rest


def takes_notes(messages: Context) -> list[Message]:
    """Asks for a note after every second observation, and goes on with the prompt, the note and the observation."""
    if messages[-1]["role"] == "assistant":
        *_, observation, _, note = messages
        return [*messages.prompt, {"role": "assistant", "content": note["content"]}, observation]
    if sum(message["role"] == "assistant" for message in messages) == 2:
        return Question([*messages, {"role": "user", "content": "note"}])
    return messages


def settings(output_dir: Path | str, **changes: Any) -> dict[str, Any]:
    """Arguments of a quick, exact run: fp32 on CPU, plain SGD without decay, one step."""
    return {
        "output_dir": str(output_dir),
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "max_turns": 4,
        "max_new_tokens": 5,
        # Common bytes, so that an untrained model's turns have many lengths.
        "stop_strings": list("aeiou01234 !"),
        "num_generations": 4,
        "num_iterations": 1,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "max_steps": 1,
        "optim": "sgd",
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 3,
        **changes,
    }


def make_trainer(
    model: Any,
    output_dir: Path | str,
    *,
    environment: Callable[[], Any] | str | None = Chatter,
    lora: bool | dict[str, Any] = True,
    algorithm: str = "grpo",
    callbacks: list[TrainerCallback] | None = None,
    reward_funcs: Any = None,
    train_dataset: Dataset | None = None,
    eval_dataset: Any = None,
    quantization_config: Any = None,
    optimizers: Any = (None, None),
    **changes: Any,
) -> MultiTurnTrainer:
    """A trainer on the embedded model, or a loaded one; ``algorithm`` is a name below, or ``module:Class``."""
    peft_config = LoraConfig(**{**LORA, **(lora if isinstance(lora, dict) else {})})
    if ":" in algorithm:
        found = find_algorithm(algorithm)
        ALGORITHMS[algorithm] = (found, found.config_class)
    trainer, config = ALGORITHMS[algorithm]
    if environment is not None:
        # Its passes cost a tenth of the tests; those of checkpoints and of ranks set it.
        changes = {"diagnosis_interval": 0, **changes}
    return trainer(
        model=model if isinstance(model, torch.nn.Module) else str(model),
        reward_funcs=reward_funcs,
        args=config(**settings(output_dir, **changes)),
        environment=environment,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=peft_config if lora else None,
        quantization_config=quantization_config,
        optimizers=optimizers,
        callbacks=callbacks,
    )


class Gradients(TrainerCallback):
    """Keeps the gradient of every optimizer step, by parameter name."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        named = kwargs["model"].named_parameters()
        self.steps.append({name: p.grad.clone() for name, p in named if p.grad is not None})


def draw_batch(trainer: MultiTurnTrainer) -> dict[str, torch.Tensor]:
    """One generation batch as TRL's loss gets it, without training."""
    trainer.model.train()
    trainer.create_optimizer_and_scheduler(1)
    rows = [dict(trainer.train_dataset[0])] * trainer.args.generation_batch_size
    trainer.current_gradient_accumulation_steps = 1
    batch = trainer._generate_and_score_completions(rows)
    trainer.rollout_log.finish()  # as after the last pass
    typed = TrainBatch.from_trl(batch)
    # The credit rule's own columns, without the prefixes that tell TRL's dict their shape.
    return {n: v for n, v in batch.items() if ":" not in n} | typed.turn_columns | typed.token_columns


def loss_and_gradients(
    trainer: MultiTurnTrainer, batch: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of a batch and its gradient."""
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, dict(batch))
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


def relative_error(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """|left - right| / |right| over all parameters together."""
    assert left.keys() == right.keys()
    distance = sum(((left[name] - right[name]) ** 2).sum() for name in left)
    return float((distance / sum((value**2).sum() for value in right.values())).sqrt())


def end_process() -> None:
    """End a script's process when all have come this far, without a teardown: PyTorch's sometimes aborts the process."""
    PartialState().wait_for_everyone()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
