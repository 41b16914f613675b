"""A tiny model learns the task of colours from nothing, and cannot without a look at the images."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from agile_environments.colours import COLOURS, DIGITS, Colours
from agile_trainers.embedded import make_embedded_image_model
from agile_trainers.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer

WORDS = [*DIGITS, *COLOURS, "which", "colour", "say", "the", "digit", "end", "[UNK]"]


class Shuffled(Colours):
    """Shows a colour of another code word."""

    def _question(self) -> Any:
        code = self.code
        other = random.Random(f"{self.turns} {code}")
        self.code = [other.choice(self.colours) if item in self.colours else item for item in code]
        question = super()._question()
        self.code = code
        return question


def trained(folder: Path, seed: int, environment: Any = Colours, **options: Any) -> MultiTurnGRPOTrainer:
    """Three minutes of one core. An answer is one word."""
    model = make_embedded_image_model(folder / "model", words=WORDS, seed=seed)
    args = MultiTurnGRPOConfig(
        output_dir=str(folder / "run"), max_turns=3, max_new_tokens=1, num_generations=8, per_device_train_batch_size=64,
        gradient_accumulation_steps=1, max_steps=140, bf16=False, use_cpu=True, gradient_checkpointing=False,
        report_to="none", seed=seed, learning_rate=2e-3, lr_scheduler_type="constant", entropy_coef=0.1,
        entropy_coef_schedule="linear", advantage_granularity="turn", save_strategy="no", disable_tqdm=True,
        log_rollouts=0, diagnosis_interval=0, num_eval_episodes=200, **options,
    )  # fmt: skip
    trainer = MultiTurnGRPOTrainer(model=str(model), args=args, environment=environment)
    trainer.train()
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_code_word_is_learned_from_images_alone(tmp_path: Path, seed: int) -> None:
    """Chance is 1 in 16, and what is left with the images of other code words."""
    trainer = trained(tmp_path, seed)
    assert trainer.evaluate(greedy=True)["eval_success"] > 0.9
    blind = MultiTurnGRPOTrainer(model=trainer.model, args=trainer.args, environment=Shuffled,
                                 processing_class=trainer.processing_class)  # fmt: skip
    assert blind.evaluate(greedy=True)["eval_success"] < 0.15


@pytest.mark.slow
def test_the_last_image_is_enough(tmp_path: Path) -> None:
    assert trained(tmp_path, 0, history="images:1").evaluate(greedy=True)["eval_success"] > 0.9
