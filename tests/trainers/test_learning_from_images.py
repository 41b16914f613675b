"""A tiny model learns the task of colours from nothing, and cannot without a look at the images."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from agile_environments.colours import COLOURS, DIGITS, Colours
from agile_trainers.embedded import make_word_tokenizer
from agile_trainers.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from image_models import image_template

WORDS = [*DIGITS, *COLOURS, "which", "colour", "say", "the", "digit", "end", "[UNK]"]


def make_embedded_image_model(path: Path, *, words: list[str], hidden_size: int = 32, seed: int = 0) -> Path:
    """Make an untrained LLaVA of about 50 thousand parameters that reads images of 16 x 16 pixels; its encoder is random."""
    tokenizer = make_word_tokenizer(words)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = image_template("<image>")
    size = {
        "hidden_size": hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 2 * hidden_size,
    }
    config = LlavaConfig(
        text_config={
            "model_type": "llama", **size, "vocab_size": len(tokenizer), "initializer_range": 0.1, "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "tie_word_embeddings": False,
        },
        vision_config={
            "model_type": "clip_vision_model", **size, "image_size": 16, "patch_size": 16, "initializer_factor": 4.0,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlavaForConditionalGeneration(config)
        projector = model.model.multi_modal_projector
        for layer, gain in ((projector.linear_1, 1.0), (projector.linear_2, 0.03)):  # features as large as embeddings
            torch.nn.init.normal_(layer.weight, std=gain * layer.in_features**-0.5)
            torch.nn.init.zeros_(layer.bias)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, top_k=0
    )
    images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    processor = LlavaProcessor(
        images, tokenizer, patch_size=16, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    )  # fmt: skip
    model.save_pretrained(path)
    processor.save_pretrained(path)
    return path


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
    """70 batches of four updates, half a minute of one core. An answer is one word."""
    model = make_embedded_image_model(folder / "model", words=WORDS, seed=seed)
    args = MultiTurnGRPOConfig(
        output_dir=str(folder / "run"), max_turns=3, max_new_tokens=1, num_generations=8, per_device_train_batch_size=64,
        gradient_accumulation_steps=1, max_steps=280, bf16=False, use_cpu=True, gradient_checkpointing=False,
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
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_last_image_is_enough(tmp_path: Path, seed: int) -> None:
    assert trained(tmp_path, seed, history="images:1").evaluate(greedy=True)["eval_success"] > 0.9
