"""Two environments of one run, with answers, lengths and limits of their own, and trainers on both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from games import make_trainer
from ppo_games import make_ppo


class Low:
    """One turn: pays 1 for the answer 2."""

    word, answer = "left", "2"

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.options = options
        return self.word, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        right = action.strip() == self.answer
        return self.word, float(right), True, False, {"success": right}


class High(Low):
    """Pays 1 for every answer 5, and goes on as long as it may."""

    word, answer = "right", "5"

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, reward, _, _, info = super().step(action)
        return observation, reward, False, False, info


BOTH: dict[str, Any] = {"low": Low, "high": High}
LIMITS: dict[str, Any] = {"low": {"max_turns": 1, "max_new_tokens": 2}, "high": {"max_turns": 3, "max_new_tokens": 1}}
LEARNS: dict[str, Any] = {
    "per_device_train_batch_size": 64, "num_generations": 8, "learning_rate": 5e-3, "optim": "adamw_torch",
    "entropy_coef": 0.1, "stop_strings": None, "max_turns": 8, "max_new_tokens": 256, "environment_limits": LIMITS,
    "advantage_granularity": "turn",
}  # fmt: skip


def make(model: Path | str, folder: Path | str, algorithm: str, **changes: Any) -> Any:
    """A trainer that learns both."""
    settings: dict[str, Any] = {
        **LEARNS, "environment": BOTH, "algorithm": algorithm, "lora": {"r": 8, "lora_alpha": 16}, **changes
    }  # fmt: skip
    if algorithm == "grpo":
        return make_trainer(model, folder, **settings)
    del settings["num_generations"], settings["advantage_granularity"]
    if algorithm == "ppo":
        del settings["algorithm"]
        return make_ppo(model, folder, **settings)
    return make_trainer(model, folder, num_generations=1, **settings)
