"""Attention of a pass that reads one token of each row, without copies of keys and values.

With a mask, PyTorch's attention has no form for grouped queries, and transformers before 5.23 copies keys and values once
for each query head, in every layer and for every token. Here the query heads that share a key head become the query's
positions, as in transformers 5.23: they read the same keys under the same mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from agile_trainers.rollout.generators.architecture import attends_plainly, attention_configs

IMPLEMENTATION = "agile_decoding"
"""Name of the attention, and of its mask, in ``config._attn_implementation``."""


class DecodingAttention:
    """Switches a model to the attention of this file, where the architecture admits it.

    Args:
        base: The model below the adapters.
    """

    def __init__(self, base: PreTrainedModel) -> None:
        self._configs = [c for c in attention_configs(base) if c._attn_implementation == "sdpa"]
        if not attends_plainly(base):
            self._configs = []

    @contextmanager
    def for_pass(self, columns: int) -> Iterator[None]:
        """Run a forward pass over ``columns`` new tokens of each row inside the ``with`` block."""
        configs = self._configs if columns == 1 else []
        try:
            for config in configs:
                config._attn_implementation = IMPLEMENTATION
            yield
        finally:
            for config in configs:
                config._attn_implementation = "sdpa"


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from one token of each row, in the form of transformers' ``AttentionInterface``.

    Args:
        module: The layer.
        query: (R, heads, 1, D).
        key: (R, key heads, C, D), where the number of key heads divides that of heads.
        value: (R, key heads, C, E).
        attention_mask: (R, 1, 1, C), True for columns that are read. None: all.
        dropout: Must be 0 for the form of this file.
        scaling: Factor of the scores. Default: D ** -0.5.
        kwargs: Arguments of other kinds of attention. transformers' own attention runs where one of them, or a shape,
            asks for more than the form of this file.

    Returns:
        (R, 1, heads, E), and no weights.
    """
    masks_heads = attention_mask is not None and attention_mask.size(1) != 1
    if query.size(2) != 1 or dropout or masks_heads or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    folded = query.unflatten(1, (key.size(1), -1)).squeeze(3)
    output = scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    return output.flatten(1, 2).unsqueeze(1), None


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Make the mask of transformers' own attention, without asking the device whether it could be left out."""
    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


AttentionInterface.register(IMPLEMENTATION, attend)
AttentionMaskInterface.register(IMPLEMENTATION, _mask)
