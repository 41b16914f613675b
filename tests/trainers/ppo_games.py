"""PPO trainers and references for the PPO tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from games import Chatter, settings
from peft import LoraConfig

from agile_trainers.trainers import MultiTurnPPOConfig, MultiTurnPPOTrainer


class Cut(Chatter):
    """Chatter whose odd seeds never come to an end by themselves: they run into ``max_turns``."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, reward, done, truncated, info = super().step(action)
        return observation, reward, done and self.length % 2 == 0, truncated, info


def make_ppo(
    model: Path | str,
    output_dir: Path | str,
    *,
    environment: Callable[[], Any] | str = Cut,
    callbacks: list[Any] | None = None,
    lora: dict[str, Any] | None = None,
    quantization_config: Any = None,
    train_dataset: Any = None,
    **changes: Any,
) -> MultiTurnPPOTrainer:
    """A trainer on the embedded model, whose episodes go on after a limit, so that both of their ends are there."""
    config = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": "gaussian", **(lora or {})}
    options = {key: value for key, value in settings(output_dir).items() if key != "num_generations"}
    return MultiTurnPPOTrainer(
        model=str(model),
        # Without the passes of the diagnosis, as in ``games.make_trainer``.
        args=MultiTurnPPOConfig(**{**options, "bootstrap_at_limits": True, "diagnosis_interval": 0, **changes}),
        environment=environment,
        peft_config=LoraConfig(**config),
        quantization_config=quantization_config,
        train_dataset=train_dataset,
        callbacks=callbacks,
    )


def wake(trainer: MultiTurnPPOTrainer, seed: int = 0) -> None:
    """Give every adapter and the value head weights of their own: at the start LoRA's B and the head are zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(trainer.model.named_parameters()):
        if ".default" in name or ".critic" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
