"""Estimates the device memory of a run, with formulas."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from peft import PeftConfig
from transformers import PretrainedConfig
from trl import ModelConfig, get_peft_config
from trl.kernels.chunked_logprob import TOKEN_CHUNK_SIZE
from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

from agile_trainers.adapters.scope import within_scope
from agile_trainers.cli.check.tracing import Shape, trace_step
from agile_trainers.rollout.generators.transformers.kv_cache import capacity
from agile_trainers.trainers.config import MultiTurnConfig

QUANTIZED = {"4 bit": 0.5 + 4 / 64, "4 bit, double": 0.5 + 1 / 64, "8 bit": 1.0}
"""Quantization to bytes of a linear layer's weight, with bitsandbytes' constants for each block of 64."""
_STATES = {"adamw": 2, "adam": 2, "sgd": 1, "adagrad": 1, "rmsprop": 1, "lion": 1}
"""Beginning of an optimizer's name to its values per trained weight; 2 for others."""


@dataclass(frozen=True)
class MemoryItem:
    """One part of the memory."""

    name: str
    size: int
    """Bytes."""
    formula: str


@dataclass(frozen=True)
class MemoryPlan:
    """Settings of a run that determine its memory."""

    dtype: torch.dtype
    """Data type of the base's weights that are not quantized."""
    rows: int
    """Episodes of a micro-batch."""
    episodes: int
    """Episodes that are decoded at the same time."""
    tokens: int
    """Tokens of the longest episode that the limits allow, prompt included."""
    decoded: int
    """``tokens`` without the observation that a critic reads after the last answer."""
    new_tokens: int
    """Tokens of one answer."""
    gradient_checkpointing: bool
    autocast: torch.dtype | None = None
    """Data type of mixed precision."""
    quantization: str | None = None
    """A key of ``QUANTIZED``."""
    dropout: bool = False
    optimizer: str = "adamw_torch_fused"
    peft_config: PeftConfig | None = None
    """Adapters that are trained instead of the model."""
    adapters: int = 1
    """2 for policy and critic."""
    copies: int = 1
    """2 with a frozen reference model beside the policy."""
    trust_remote_code: bool = False


def plan_memory(
    config: PretrainedConfig, args: MultiTurnConfig, model: ModelConfig, *, critic: bool, prompt: int, observation: int
) -> MemoryPlan:
    """Make the plan of a run with episodes as long as its limits allow.

    Args:
        config: The model's configuration.
        args: The run's configuration.
        model: The options of the model.
        critic: True if a second adapter is trained.
        prompt: Tokens of the longest first prompt.
        observation: Tokens of the longest observation between two answers.
    """
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    room = args.max_model_length or longest
    room = room or 1 << 30
    decoded = prompt + args.max_turns * args.max_new_tokens + (args.max_turns - 1) * observation
    tokens = decoded + (observation if critic else 0)  # the critic reads the last one too
    peft_config = get_peft_config(model)
    if peft_config is not None and args.lora_target_scope is not None:
        peft_config = within_scope(peft_config, args.lora_target_scope)
    four = "4 bit, double" if model.use_bnb_nested_quant else "4 bit"
    return MemoryPlan(
        dtype=weight_dtype(config, model),
        rows=args.per_device_train_batch_size,
        episodes=args.generation_chunk_size or args.per_device_train_batch_size * args.steps_per_generation,
        tokens=min(tokens, room),
        decoded=min(decoded, room),
        new_tokens=args.max_new_tokens,
        gradient_checkpointing=args.gradient_checkpointing,
        autocast=torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None,
        quantization=four if model.load_in_4bit else "8 bit" if model.load_in_8bit else None,
        dropout=args.disable_dropout is False,
        optimizer=str(getattr(args.optim, "value", args.optim)),
        peft_config=peft_config,
        adapters=2 if critic else 1,
        copies=2 if args.beta != 0.0 and peft_config is None else 1,
        trust_remote_code=args.trust_remote_code,
    )


def weight_dtype(config: PretrainedConfig, model: ModelConfig) -> torch.dtype:
    """The dtype that a model's weights are loaded in."""
    name = model.dtype if model.dtype not in (None, "auto") else config.dtype or "float32"
    return name if isinstance(name, torch.dtype) else getattr(torch, str(name).removeprefix("torch."))


def estimate_memory(config: PretrainedConfig, plan: MemoryPlan) -> list[MemoryItem]:
    """Estimate the memory of one process, without fragmentation and the libraries' own memory.

    The activations for the backward pass are counted on a forward pass without data, so they are right for any
    architecture. A critic's are assumed to be as large as the policy's, and to be kept beside them; a run whose critic is
    trained while its values are read keeps one of the two.

    Args:
        config: The model's configuration. No weights are loaded.
        plan: The settings of the run.

    Returns:
        Weights, gradients, optimizer, activations, logits, KV cache, and the peak. Activations and KV cache are not
        allocated at the same time.

    Raises:
        ValueError: If ``peft_config`` matches no module of the model.
    """
    quantized = plan.quantization is not None
    computes = torch.bfloat16 if quantized and plan.autocast else plan.dtype
    shape = Shape(plan.rows, plan.tokens, computes, plan.autocast, plan.dropout, plan.peft_config)
    step = trace_step(config, shape, trust_remote_code=plan.trust_remote_code)
    per_weight, base = plan.dtype.itemsize, step.linear + step.others
    trained = step.trained * plan.adapters
    # TRL keeps adapters on a quantized base in bfloat16; PEFT keeps all others in float32.
    per_trained = (2 if quantized else 4) if plan.peft_config else per_weight
    own = trained if plan.peft_config else 0
    per_linear = QUANTIZED[plan.quantization] if plan.quantization else per_weight
    weights = plan.copies * int(step.linear * per_linear + step.others * per_weight) + per_trained * own
    states = next((count for name, count in _STATES.items() if plan.optimizer.startswith(name)), 2)
    per_state = 1 if "8bit" in plan.optimizer else per_trained
    activations = step.kept(plan.gradient_checkpointing) * plan.adapters
    positions, vocabulary = plan.rows * plan.tokens, config.get_text_config().vocab_size
    tile = min(positions, TOKEN_CHUNK_SIZE) * min(vocabulary, _CHUNKED_LOGPROB_CHUNK_SIZE) * 4
    columns = capacity(plan.decoded, plan.new_tokens)
    caches = [f"{columns:,} tokens x {step.keys:,} bytes"] if step.keys or not step.windowed else []
    windows = sum(size * min(columns, window) for size, window in step.windowed)
    caches += [f"{windows:,} bytes in windows"] if windows else []
    cache = plan.episodes * (columns * step.keys + windows)
    sizes = f"{step.linear:,} x {per_linear:g} bytes + {step.others:,}" if quantized else f"{base:,}"
    copies = f"{plan.copies} x " if plan.copies > 1 else ""
    adapters = f" + {own:,} of adapters x {per_trained} bytes" if own else ""
    layers = "each layer's input, and one layer computed again" if plan.gradient_checkpointing else "of all layers"
    items = [
        MemoryItem("weights", weights, f"{copies}{sizes} x {per_weight} bytes ({_name(plan)}){adapters}"),
        MemoryItem("gradients", per_trained * trained, f"{trained:,} trained x {per_trained} bytes"),
        MemoryItem(
            "optimizer",
            states * per_state * trained,
            f"{trained:,} trained x {states} x {per_state} bytes ({plan.optimizer})",
        ),
        MemoryItem("activations", activations, f"{plan.rows} rows x {plan.tokens:,} tokens: {layers}"),
        MemoryItem("logits", tile, f"one tile, {min(positions, TOKEN_CHUNK_SIZE):,} tokens wide"),
        MemoryItem("KV cache", cache, f"{plan.episodes} episodes x {' + '.join(caches)}"),
    ]
    fixed, (activations, tile, cache) = sum(item.size for item in items[:3]), [item.size for item in items[3:]]
    peak = fixed + max(activations + tile, 2 * cache)
    rule = "weights + gradients + optimizer + the larger of activations + logits and twice the KV cache (it is copied)"
    return [*items, MemoryItem("peak", peak, rule)]


def _name(plan: MemoryPlan) -> str:
    return ", ".join(filter(None, (plan.quantization, str(plan.dtype).removeprefix("torch."))))


def readable(size: int) -> str:
    """Format a number of bytes in a suitable unit."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"
