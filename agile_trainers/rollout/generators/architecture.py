"""What sampler and trainer must know about a model's architecture to compute the same log-probabilities."""

from __future__ import annotations

import inspect

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer


def takes_position_ids(base: PreTrainedModel) -> bool:
    """Whether the model's ``forward`` takes ``position_ids``; otherwise it counts positions by itself."""
    return "position_ids" in inspect.signature(base.forward).parameters


def keeps_every_key(base: PreTrainedModel) -> bool:
    """Whether the keys of a conversation may be kept between its turns, and moved to other columns of another batch.

    True if every layer keeps and reads the keys and values of the whole conversation, wherever they lie.
    """
    if not takes_position_ids(base):
        return False  # ALiBi and others count columns
    if "local" in getattr(base.config, "attention_layers", ()):
        return False  # GPT-Neo's local layers keep every key, but count columns
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=base.config).layers)


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Position of every token of padded rows, counted from the row's first token.

    Args:
        mask: (B, S) int64 or bool, 1 on tokens, 0 on padding at either end.

    Returns:
        (B, S) int64; padding gets the position of its nearest token.
    """
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)
