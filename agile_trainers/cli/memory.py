"""What a run will need of the device's memory: an estimate, with its formulas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftConfig, get_peft_model
from transformers import AutoModelForCausalLM, PretrainedConfig

LAYER_VALUES = {"hidden": 6, "query": 5, "key": 4, "intermediate": 4}
"""Values that the backward pass of a decoder layer needs per token, in units of the widths of the residual stream, of the
queries, of the keys, and of the feed-forward layer. Measured on Qwen3 with SDPA attention."""


@dataclass(frozen=True)
class MemoryItem:
    """One thing that takes memory."""

    name: str
    size: int
    """Bytes."""
    formula: str


@dataclass(frozen=True)
class MemoryPlan:
    """What the size of a run depends on."""

    bytes_per_weight: float
    """Of the base model: 4 in float32, 2 in bfloat16, 1 in 8 bit, 0.5 in 4 bit."""
    bytes_per_activation: int
    """4 in float32, 2 under bfloat16 autocast."""
    rows: int
    """Episodes of a micro-batch."""
    episodes: int
    """Episodes that are decoded at once."""
    tokens: int
    """Of the longest episode."""
    gradient_checkpointing: bool
    peft_config: PeftConfig | None = None
    """Adapters that are trained instead of the model."""
    adapters: int = 1
    """2 for policy and critic."""
    copies: int = 1
    """2 with a frozen reference model beside the policy."""


def estimate_memory(config: PretrainedConfig, plan: MemoryPlan) -> list[MemoryItem]:
    """Estimate the memory of one process, without its libraries' own and without fragmentation.

    Logits are left out: TRL's language-model head computes them a chunk at a time.

    Args:
        config: The model's. No weights are loaded.
        plan: What else it depends on.

    Returns:
        Weights, gradients, optimizer, activations, KV cache, and the peak. Activations and KV cache are not there at the
        same time.
    """
    base, trained = count_parameters(config, plan.peft_config)
    trained *= plan.adapters
    own = trained if plan.peft_config else 0
    weights = int(plan.copies * base * plan.bytes_per_weight) + 4 * own
    text = config.get_text_config()
    layers, heads = text.num_hidden_layers, text.num_attention_heads
    width: int = getattr(text, "head_dim", None) or text.hidden_size // heads
    keys = (getattr(text, "num_key_value_heads", None) or heads) * width
    layer = sum(
        LAYER_VALUES[name] * size
        for name, size in (
            ("hidden", text.hidden_size),
            ("query", heads * width),
            ("key", keys),
            ("intermediate", text.intermediate_size),
        )
    )
    saved = (layers + 2) * text.hidden_size + layer if plan.gradient_checkpointing else layers * layer
    activations = plan.rows * plan.tokens * saved * plan.bytes_per_activation
    cache = 2 * layers * keys * plan.tokens * plan.episodes * plan.bytes_per_activation
    gradients, optimizer = 4 * trained, 8 * trained
    inner = f"(6 x {text.hidden_size} + 5 x {heads * width} + 4 x {keys} + 4 x {text.intermediate_size})"
    per_token = (
        f"({layers} + 2) x {text.hidden_size} + {inner}" if plan.gradient_checkpointing else f"{layers} x {inner}"
    )
    adapters = f" + {own:,} of adapters x 4 bytes" if own else ""
    copies = f"{plan.copies} x " if plan.copies > 1 else ""
    return [
        MemoryItem("weights", weights, f"{copies}{base:,} x {plan.bytes_per_weight:g} bytes{adapters}"),
        MemoryItem("gradients", gradients, f"{trained:,} trained x 4 bytes"),
        MemoryItem("optimizer", optimizer, f"{trained:,} trained x 8 bytes (AdamW)"),
        MemoryItem(
            "activations",
            activations,
            f"{plan.rows} rows x {plan.tokens:,} tokens x ({per_token}) x {plan.bytes_per_activation} bytes",
        ),
        MemoryItem(
            "KV cache",
            cache,
            f"2 x {layers} layers x {keys} x {plan.tokens:,} tokens x {plan.episodes} episodes x "
            f"{plan.bytes_per_activation} bytes",
        ),
        MemoryItem(
            "peak",
            weights + gradients + optimizer + max(activations, cache),
            "weights + gradients + optimizer + the larger of activations and KV cache",
        ),
    ]


def count_parameters(config: PretrainedConfig, peft_config: PeftConfig | None) -> tuple[int, int]:
    """How many parameters a model has, and how many are trained, from its configuration alone.

    Raises:
        ValueError: If ``peft_config`` fits no module of the model.
    """
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
        base = sum(parameter.numel() for parameter in model.parameters())
        if peft_config is None:
            return base, base
        adapted = get_peft_model(model, peft_config)
    return base, sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)


def readable(size: int) -> str:
    """Bytes in the unit that suits them."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"
