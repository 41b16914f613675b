"""Properties of a model's architecture that make sampler and trainer compute the same log-probabilities."""

from __future__ import annotations

import inspect
from enum import Enum
from typing import Any

import torch
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

_DECODES_OTHERWISE = ("falcon_mamba", "mamba", "mamba2", "minimax", "nemotron_h", "zamba2")
"""Model types whose cached decoding differs from a pass over the whole conversation; Mamba's takes no mask of earlier
tokens."""
_READS_PADDING = ("recurrent_gemma", "rwkv", "xlstm")
"""Model types whose recurrence includes padding."""


class Reading(Enum):
    """Part of a conversation that a model reads when it samples."""

    NEW = "what was appended since the last turn"
    TURN = "the whole conversation, once a turn"
    TOKEN = "the whole conversation, for every token"


def reading(base: PreTrainedModel) -> Reading:
    """Return the least that a model must read to sample from the distribution that it is trained on.

    Keys and values are kept between turns, and moved to other columns of another batch, if every layer keeps those of the
    whole conversation independent of their column. Layers with a window, a state or positions counted in columns read the
    conversation again each turn. Models without a cache, or whose decoding differs from their full forward pass,
    read it again for every token.
    """
    if base.config.model_type in _DECODES_OTHERWISE or cache_argument(base) is None:
        return Reading.TOKEN
    counts_columns = "local" in getattr(
        base.config, "attention_layers", ()
    )  # GPT-Neo keeps the keys of its local layers
    sees_ahead = {"token_type_ids", "pixel_values"} <= _accepted(base).keys()  # inside an image, with Gemma 3
    if counts_columns or sees_ahead or not takes_position_ids(base):
        return Reading.TURN
    plain = all(type(layer) is DynamicLayer for layer in DynamicCache(config=base.config).layers)
    return Reading.NEW if plain else Reading.TURN


def attends_plainly(base: PreTrainedModel) -> bool:
    """Return whether each layer is attention with nothing but a mask, by a function that transformers' interface names.

    Layers with a window count, since the window is in their mask. Recurrent and indexed layers and models with an attention
    of their own do not.
    """
    kinds = {type(layer) for layer in DynamicCache(config=base.config).layers}
    return (
        base._supports_attention_backend and base._supports_sdpa and kinds <= {DynamicLayer, DynamicSlidingWindowLayer}
    )


def attention_configs(base: PreTrainedModel) -> list[PretrainedConfig]:
    """Return the configurations in which layers look up the name of their attention; they need not be the model's."""
    configs = (m.config for m in base.modules() if isinstance(getattr(m, "config", None), PretrainedConfig))
    return list({id(config): config for config in configs}.values())


def takes_position_ids(base: PreTrainedModel) -> bool:
    """Return whether the model's ``forward`` takes ``position_ids``; otherwise the model counts positions itself."""
    return "position_ids" in _accepted(base)


def takes_logits_to_keep(base: PreTrainedModel) -> bool:
    """Return whether the model's ``forward`` takes ``logits_to_keep``, to compute the last position's logits only."""
    return "logits_to_keep" in _accepted(base)


def cache_argument(base: PreTrainedModel) -> str | None:
    """Return the name by which the model's ``forward`` takes and returns its cache; None if it keeps none.

    It is ``past_key_values`` before transformers 5.24, and ``cache`` from then on.
    """
    return next((name for name in ("cache", "past_key_values") if name in _accepted(base)), None)


def _accepted(base: PreTrainedModel) -> Any:
    return inspect.signature(base.forward).parameters


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Compute the position of every token of padded rows, counted from the row's first token.

    Args:
        mask: (B, S) int64 or bool, 1 on tokens, 0 on padding at either end.

    Returns:
        (B, S) int64; padding gets the position of its nearest token.
    """
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)


def check_padding(base: PreTrainedModel) -> None:
    """Reject a model whose outputs depend on padding.

    Raises:
        ValueError: If the model's recurrence includes padding.
    """
    if base.config.model_type in _READS_PADDING:
        raise ValueError(
            f"{type(base).__name__} runs its recurrence over padding too: in a batch with longer rows, an episode would be "
            "sampled and trained with other log-probabilities than alone. Choose a model that masks padding, for example "
            "Mamba-2, Bamba, Jamba, Falcon-H1 or Qwen3-Next."
        )


def same_up_to(config: Any) -> int | None:
    """Return the batch length in tokens up to which the rotary embedding is the same for every length; None: any.

    With ``rope_type="longrope"`` (Phi-3, 3.5, 4-mini) the factors of *all* rows change as soon as one row of the batch is
    longer. (The factors of ``"dynamic"`` change beyond ``max_position_embeddings`` only.)

    Args:
        config: The model's text configuration.
    """
    ropes = getattr(config, "rope_parameters", None) or {}
    # One configuration for the model, or one for each type of layer.
    nested = [rope for rope in ropes.values() if isinstance(rope, dict) and "rope_type" in rope]
    lengths = [
        rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
        for rope in (nested or [ropes])
        if rope.get("rope_type") == "longrope"
    ]
    return min(lengths, default=None)
