"""Counts the bytes that an episode takes while it is decoded, and the episodes that fit into a GPU's free memory."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from agile_trainers.rollout.generators.transformers.kv_cache import capacity

_SHARE = 0.8
"""Part of the free memory that rows may take; fragmentation and the kernels' own memory take the rest."""
_SAMPLED = 40
"""Bytes of a row for each token of the vocabulary: logits in fp32, and four tensors of the sampler in float64."""


def bytes_per_row(config: PretrainedConfig, tokens: int, new_tokens: int, dtype: torch.dtype) -> int:
    """Estimate the most bytes that a row takes at a moment.

    A row has keys and values of every layer, in buffers with room. They are there twice while the buffers grow or rows move
    to another batch. The first pass over a conversation has them once, and beside them the hidden states of a layer: its
    input, its output and two more of that width, and two of its feed-forward part.

    Args:
        config: The model's text configuration. Experts, and latent attention, count as layers without.
        tokens: Of the longest conversation.
        new_tokens: Of its last answer, at most.
        dtype: In which the model computes.
    """
    cache = bytes_per_token(config, dtype) * capacity(tokens, new_tokens)
    wide = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    reading = (4 * config.hidden_size + 2 * wide) * dtype.itemsize * tokens
    return int(max(2 * cache, cache + reading) + _SAMPLED * config.vocab_size)


def bytes_per_token(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Return the bytes of a token's keys and values in all layers.

    Args:
        config: The model's text configuration. Latent attention counts as attention without.
        dtype: In which the model computes.
    """
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    return int(2 * config.num_hidden_layers * keys * head * dtype.itemsize)


def fitting_rows(free: int, per_row: int) -> int:
    """Return the rows of ``per_row`` bytes that are decoded at once in ``free`` bytes of a GPU, at least 1."""
    return max(1, int(_SHARE * free) // per_row)
