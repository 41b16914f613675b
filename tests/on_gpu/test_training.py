"""A training of each algorithm end to end on a GPU, and the options that exist there alone."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch
from chatter import Chatter
from image_models import Gallery, make_image_model
from peft import LoraConfig
from transformers import BitsAndBytesConfig

from agile_trainers.embedded import make_embedded_model
from agile_trainers.trainers.registry import ALGORITHMS, find_algorithm

pytestmark = pytest.mark.gpu
NEEDS = {"4bit": "bitsandbytes", "liger": "liger_kernel", "compile": "triton"}


def _train(machine: Any, model: Any, folder: Any, algorithm: str, quantized: bool = False, **changes: Any) -> Any:
    """Three steps in bf16, from weights in bf16, with LoRA; the log of each."""
    trainer_class, environment = find_algorithm(algorithm), changes.pop("environment", Chatter)
    options: dict[str, Any] = {
        "output_dir": str(folder), "use_cpu": machine.tiny, "bf16": True, "model_init_kwargs": {"dtype": "bfloat16"},
        "max_turns": 3, "max_new_tokens": 6, "stop_strings": list("aeiou01234 !"), "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1, "max_steps": 3, "learning_rate": 1e-3, "logging_steps": 1,
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "seed": 3,
    }  # fmt: skip
    if algorithm == "distillation":
        options["teacher"] = str(make_embedded_model(folder / "teacher", seed=1))
    elif algorithm not in ("reinforce", "ppo"):
        options["num_generations"] = 4
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    trainer = trainer_class(
        model=str(model),
        args=trainer_class.config_class(**(options | changes)),
        environment=environment,
        peft_config=LoraConfig(r=4, target_modules="all-linear", init_lora_weights="gaussian"),
        quantization_config=quantization if quantized else None,
    )
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    assert {p.device.type for p in trainer.model.parameters()} == {machine.device.type}
    after = dict(trainer.model.named_parameters())
    assert all(after[name].isfinite().all() for name in start)
    assert any(not torch.equal(after[name], value) for name, value in start.items() if ".default." in name)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == options["max_steps"] and all(math.isfinite(entry["loss"]) for entry in logs)
    return logs


def _note(figures: dict[str, Any], logs: list[dict[str, float]]) -> None:
    """Write down the training-inference mismatch, which is none on the same weights but rounding."""
    for name, value in logs[0].items():
        if "mismatch" in name or "sampling" in name:
            figures[name] = value


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_algorithm(machine, figures, embedded_model, tmp_path, algorithm):
    _note(figures, _train(machine, embedded_model, tmp_path, algorithm))


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_packed_rows(machine, figures, embedded_model, tmp_path, algorithm):
    _note(figures, _train(machine, embedded_model, tmp_path, algorithm, sequence_packing="prefix"))


@pytest.mark.parametrize("kind", ["idefics3", "qwen3_vl"])
def test_images(machine, figures, tmp_path, kind):
    if kind == "qwen3_vl":
        pytest.importorskip("torchvision")
    for part in make_image_model(kind):
        part.save_pretrained(tmp_path / "model")
    _note(figures, _train(machine, tmp_path / "model", tmp_path, "grpo", environment=Gallery))


OPTIONS = (
    "4bit",
    "liger",
    "compile",
    "offload",
    "checkpoints",
    "reference",
    "whole",
    "truncated",
    "ahead",
    "history",
    "teacher",
)


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option(machine, figures, embedded_model, tmp_path, option):
    if option in NEEDS and importlib.util.find_spec(NEEDS[option]) is None:
        pytest.skip(f"{NEEDS[option]} is not installed")
    if machine.tiny and option in ("liger", "compile", "offload"):
        pytest.skip(f"{option} needs a GPU")
    changes: dict[str, Any] = {
        "4bit": {"quantized": True, "model_init_kwargs": None},
        "liger": {"use_liger_kernel": True},
        "compile": {"torch_compile": True},
        "offload": {"activation_offload": True},
        "checkpoints": {"gradient_checkpointing": True},
        "reference": {"beta": 0.1},
        "whole": {"offload_policy_during_rollout": False, "max_grad_norm": 1.0},
        "truncated": {"top_k": 8, "top_p": 0.9, "num_iterations": 2},
        "ahead": {"batches_ahead": 1},
        "history": {"history": "last:1"},
        "teacher": {"teacher": str(embedded_model), "teacher_gradient": "distribution_reverse"},
    }[option]
    _note(figures, _train(machine, embedded_model, tmp_path, "grpo", **changes))
