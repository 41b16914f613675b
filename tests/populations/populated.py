"""Tiny populations: an environment, the settings that all members share, and how their weights are compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import PrinterCallback

from agile_trainers.populations import HyperparameterConfig, Population, Range
from agile_trainers.trainers.registry import find_algorithm


class Talk:
    """One or two turns (by the seed) with an arbitrary reward of what was said."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.left = 1 + (seed or 0) % 2
        return f"start {(seed or 0) % 7}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        reward = sum(map(ord, action)) % 5 / 4
        return "again", reward, self.left == 0, False, {"success": reward > 0.5}


def arguments(algorithm: str, output_dir: Path | str, **changes: Any) -> Any:
    """Quick, exact settings: fp32 on CPU, two optimizer steps of eight episodes each."""
    settings: dict[str, Any] = {
        "output_dir": str(output_dir), "bf16": False, "use_cpu": True, "gradient_checkpointing": False, "max_turns": 2,
        "max_new_tokens": 4, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_iterations": 1,
        "max_steps": 2,
        "learning_rate": 1e-2, "num_eval_episodes": 6, "logging_steps": 1, "report_to": "none", "save_strategy": "no",
        "disable_tqdm": True, "seed": 3, "log_rollouts": False,
    }  # fmt: skip
    if algorithm == "grpo":
        settings["num_generations"] = 4
    return find_algorithm(algorithm).config_class(**{**settings, **changes})


def lora() -> LoraConfig:
    return LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", task_type="CAUSAL_LM")


def quiet(trainer: Any, member: int) -> None:
    trainer.remove_callback(PrinterCallback)


def population(model: Path | str, output_dir: Path, algorithm: str = "grpo", **changes: Any) -> Population:
    """A population of two members in two rounds; options of the configuration are told apart by their names."""
    fields = find_algorithm(algorithm).config_class.__dataclass_fields__
    options = {name: changes.pop(name) for name in list(changes) if name in fields}
    ranges = HyperparameterConfig(learning_rate=Range(1e-3, 1e-1, log=True))
    ours = {"hyperparameters": ranges, "members": 2, "rounds": 2}
    args = arguments(algorithm, output_dir, **options)
    changes["seed"] = changes.pop("search_seed", 0)
    given = {**ours, "on_trainer": quiet, "peft_config": lora(), **changes}
    return Population(
        algorithm, str(model), args, given.pop("environment", Talk), given.pop("hyperparameters"), **given
    )


def states(checkpoint: Path) -> dict[str, Any]:
    """All weights and optimizer moments of a checkpoint, by name."""
    found: dict[str, Any] = {}
    for file in sorted(checkpoint.rglob("*.safetensors")):
        found |= {f"{file.relative_to(checkpoint)}/{name}": value for name, value in load_file(file).items()}
    optimizer = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]
    return found | {f"{index}/{name}": value for index, state in optimizer.items() for name, value in state.items()}


def different(left: Path, right: Path) -> list[str]:
    """Names of what two checkpoints do not have equal to the last bit."""
    ours, theirs = states(left), states(right)
    assert ours.keys() == theirs.keys() and ours
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]
