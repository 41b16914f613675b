"""Estimates the cost of packed and padded rows, and bounds their difference by rounding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from agile_trainers.packing.attention import BLOCK
from agile_trainers.packing.trie import Trie

MARGIN = 0.95
"""Share of the padded rows' cost that packed rows may have."""


@dataclass(frozen=True)
class _Device:
    """Cost of packing on a kind of device, in floating-point operations of its matrix products."""

    plan: float
    """The cost of planning a pass of any size."""
    node: float
    """The cost of planning a node."""
    mask: float
    """The cost of a pair of blocks of nodes in the mask."""
    block: float
    """The cost of a block of attention in a layer."""
    pair: float
    """Factor of a pair of nodes in packed attention."""


_DEVICES = {
    "cpu": _Device(plan=2e7, node=0.0, mask=0.0, block=1.5e6, pair=1.2),
    "cuda": _Device(plan=2e11, node=1e7, mask=1.5e6, block=0.0, pair=1.5),
}
"""On a CPU about 1 ms of planning, and 60 microseconds a block on a core.

A GPU, whose kernel is FlexAttention's, waits while a core plans, and could do 1e14 operations a second. It takes 2 ms, and
as measured 0.1 microseconds a node and 15 nanoseconds a pair of blocks: 20 ms for 96k nodes, 56 ms for 195k.
"""


class Cost:
    """Compares passes by the operations of matrix products and attention. It depends on shapes only, never on time.

    Args:
        base: The model below the adapters.
    """

    def __init__(self, base: PreTrainedModel) -> None:
        config = base.config.get_text_config()
        embedded = {id(m.weight) for m in (base.get_input_embeddings(), base.get_output_embeddings()) if m is not None}
        sizes = (getattr(p, "ds_numel", p.numel()) for p in base.parameters() if p.ndim > 1 and id(p) not in embedded)
        self._token = 2.0 * sum(sizes)
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._layers = config.num_hidden_layers
        self._pair = 4.0 * config.num_attention_heads * head * self._layers
        self._device = _DEVICES["cpu" if base.device.type == "cpu" else "cuda"]

    def padded(self, rows: int, columns: int) -> float:
        """Return the operations of a padded forward pass."""
        return rows * columns * (self._token + columns * self._pair)

    def packed(self, trie: Trie) -> float:
        """Return the operations of a packed forward pass, with what its plan and its blocks of attention cost."""
        device, blocks = self._device, sum(1 + (s.end > s.stop) for s in trie.segments)
        attention = trie.pairs * self._pair * device.pair + blocks * self._layers * device.block
        plan = device.plan + trie.size * device.node + math.ceil(trie.size / BLOCK) ** 2 * device.mask
        return trie.size * self._token + attention + plan

    def pays(self, mask: torch.Tensor, trie: Trie) -> bool:
        """Return whether packing rows with an attention mask (B, S) pays."""
        return self.packed(trie) < MARGIN * self.padded(*mask.shape)

    def pays_to_share(self, mask: torch.Tensor, trie: Trie) -> bool:
        """Return whether a trie costs less than its rows one by one, without any padding."""
        return self.packed(trie) < MARGIN * sum(self.padded(1, length) for length in mask.sum(dim=1).tolist())


def rounding_bound(base: PreTrainedModel, dtype: torch.dtype) -> float:
    """Return the largest mean difference of log-probabilities, in nats a token, that rounding explains.

    In fp32 it is 1e-3, a thousand times what is observed. In half precision each of the 2 L additions to the residual stream
    of L layers rounds by up to u of its value (u = 2^-8 for bf16, 2^-11 for fp16). If the errors are independent, the logits
    of two arrangements of the same sums differ by u sqrt(2 (2 L + 1)) of their spread, which is taken as 4 nats.

    Args:
        base: The model below the adapters.
        dtype: In which its layers compute.
    """
    if dtype == torch.float32:
        return 1e-3
    layers = base.config.get_text_config().num_hidden_layers
    return 1e-3 + 4.0 * torch.finfo(dtype).eps / 2 * math.sqrt(2 * (2 * layers + 1))
