"""Attention over a trie: each node sees its ancestors and itself.

On a CPU the keys of each segment are read by two dense blocks: by the segment itself, causally, and by its descendants,
without a mask. Blocks are merged by their log-sum-exp, and the backward pass computes each from the merged output, so that
no mask and no copy of a key exists. On a GPU one FlexAttention kernel skips the blocks in which no node sees another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property, partial
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad
from transformers import AttentionInterface, PreTrainedModel

from agile_trainers.adapters.roles import wrap_checkpointing
from agile_trainers.packing.trie import Trie
from agile_trainers.rollout.generators.architecture import attention_configs

IMPLEMENTATION = "agile_trie"
"""Name of the attention in ``config._attn_implementation``. There is no mask function of this name: masks are None."""
BLOCK = 128
"""Nodes of a block of FlexAttention's mask."""
_REFUSED = ("softcap", "s_aux", "position_bias", "position_biases", "head_mask", "relative_position_bias")
"""Arguments of other kinds of attention."""


class Plan:
    """The trie of a forward pass, with what attention derives from it once for all layers."""

    def __init__(self, trie: Trie) -> None:
        self.trie = trie

    @cached_property
    def mask(self) -> BlockMask:
        """FlexAttention's mask, from the first and last visible node of each block instead of all N x N pairs."""
        return _block_mask(self.trie)


_plan: Plan | None = None  # of the forward pass, or recomputation, that runs; None for padded rows


class TrieAttention:
    """Switches a model between its own attention and that of a plan.

    Gradient checkpointing recomputes a layer during the backward pass, when another plan, or none, may be current. The
    plan of every checkpoint is recorded, in reentrant and non-reentrant mode.

    Args:
        base: The model below the adapters. Its ``_set_gradient_checkpointing`` is replaced on the instance, so call this
            before checkpointing is enabled.
    """

    def __init__(self, base: PreTrainedModel) -> None:
        self._own = [(config, config._attn_implementation) for config in attention_configs(base)]
        wrap_checkpointing(base, lambda: partial(self.using, _plan))

    @contextmanager
    def using(self, plan: Plan | None) -> Iterator[None]:
        """Run the attention of ``plan`` inside the ``with`` block; None runs the model's own."""
        before = _plan
        if plan is before:
            yield
            return
        try:
            self._switch(plan)
            yield
        finally:
            self._switch(before)

    def _switch(self, plan: Plan | None) -> None:
        global _plan
        _plan = plan
        for config, own in self._own:
            config._attn_implementation = own if plan is None else IMPLEMENTATION


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of the current plan, in the form of transformers' ``AttentionInterface``."""
    plan = _plan
    if plan is None or query.size(2) != key.size(2) or query.size(2) != plan.trie.size:
        raise RuntimeError("Packed attention ran outside of a packed forward pass.")
    refused = [name for name in _REFUSED if kwargs.get(name) is not None]
    if dropout or refused or attention_mask is not None:
        raise NotImplementedError(f"{type(module).__name__} attends with {', '.join(refused) or 'dropout or a mask'}.")
    scale = query.size(-1) ** -0.5 if scaling is None else scaling
    if torch.is_autocast_enabled(query.device.type):  # as torch does for its own attention: norms give queries in fp32
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if query.device.type == "cpu":
        output = trie_attention(query, key, value, plan.trie, scale)
    else:
        output = _flex(query, key, value, plan.mask, scale)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(IMPLEMENTATION, torch.compiler.disable(_attend))

# --------------------------------------------------------------------------------------------------------------- GPU


class _Kind(NamedTuple):
    """Properties of inputs for which FlexAttention is compiled anew; other sizes are dynamic."""

    heads: int
    key_heads: int
    size: int
    value_size: int
    dtype: torch.dtype
    gradients: tuple[bool, ...]
    """Four flags: gradients are recorded; queries, keys and values need them."""


_BACKEND = "inductor"


def _flex(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask, scale: float) -> torch.Tensor:
    """Run FlexAttention, compiled.

    Raises:
        RuntimeError: If it would run without compilation, which computes the scores of all pairs of nodes.
    """
    gradients = torch.is_grad_enabled(), *(x.requires_grad for x in (query, key, value))
    kind = _Kind(query.size(1), key.size(1), query.size(3), value.size(3), query.dtype, gradients)
    if torch._dynamo.config.disable:
        raise RuntimeError(f"{_UNCOMPILED} TORCH_COMPILE_DISABLE or TORCHDYNAMO_DISABLE is set. Unset it{_OR_PADDED}")
    try:
        return _compiled(kind)(query, key, value, mask, scale)
    except FailOnRecompileLimitHit as error:
        raise RuntimeError(
            f"{_UNCOMPILED} PyTorch has compiled {torch._dynamo.config.recompile_limit} graphs for {kind}, its limit. Raise "
            f"`torch._dynamo.config.recompile_limit`{_OR_PADDED}"
        ) from error


_UNCOMPILED = "FlexAttention would compute the scores of all pairs of nodes, which fill the memory of a GPU:"
_OR_PADDED = ', or set sequence_packing="none".'


@cache
def _compiled(kind: _Kind) -> Callable[..., torch.Tensor]:
    """Compile FlexAttention for a kind of inputs.

    PyTorch counts the graphs of a function by its code, and runs it uncompiled beyond eight. Each kind has code of its own,
    so that models and adapters of one process do not share a limit.
    """
    grouped = kind.heads != kind.key_heads

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask, scale: float) -> torch.Tensor:
        output: torch.Tensor = flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=grouped)
        return output

    # The name distinguishes the code where PyTorch looks it up by name and line.
    code = attend.__code__.replace(co_name=f"attend {kind}")
    own = FunctionType(code, attend.__globals__, code.co_name, None, attend.__closure__)
    return torch.compile(own, dynamic=True, fullgraph=True, backend=_BACKEND)


def _block_mask(trie: Trie) -> BlockMask:
    """Make FlexAttention's mask of a trie, in time linear in the nodes and quadratic in the blocks."""
    size, ends = trie.size, trie.ends()
    blocks = -(-size // BLOCK)
    padded = np.concatenate([ends, np.full(blocks * BLOCK - size, 0, dtype=np.int64)]).reshape(blocks, BLOCK)
    furthest, nearest = padded.max(axis=1), padded.min(axis=1)
    first = np.arange(blocks) * BLOCK
    last = np.minimum(first + BLOCK, size)  # node after the last query
    seen = (furthest[None, :] > first[:, None]) & (first[None, :] <= first[:, None])
    whole = (nearest[None, :] >= last[:, None]) & (first[None, :] < first[:, None])
    device = trie.tokens.device
    end = torch.from_numpy(padded.reshape(-1)).to(device)

    def sees(batch: Any, head: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= q) & (q < end[k])

    # The blocks of keys by query, and of queries by key for the backward pass; PyTorch sorts to find the second.
    partial = seen & ~whole
    return BlockMask(
        (size, size),
        *_listed(partial, device),
        *_listed(whole, device),
        *_listed(partial.T, device),
        *_listed(whole.T, device),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=sees,
    )


def _listed(chosen: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of chosen blocks of each row, and their indices first, with two leading dimensions of 1."""
    counts = chosen.sum(axis=1, dtype=np.int32)
    indices = np.zeros(chosen.shape, dtype=np.int32)
    indices[np.arange(len(chosen)) < counts[:, None]] = np.nonzero(chosen)[1]
    return torch.from_numpy(counts).to(device)[None, None], torch.from_numpy(indices).to(device)[None, None]


# --------------------------------------------------------------------------------------------------------------- CPU


_of_block = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""Returns attention of one dense or causal block, and the log-sum-exp of its scores."""
_of_block_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""Returns the gradients of one block's queries, keys and values, given output and log-sum-exp over all blocks."""


def trie_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, trie: Trie, scale: float) -> torch.Tensor:
    """Compute attention over a trie on a CPU.

    Args:
        q: (1, heads, N, D).
        k: (1, key heads, N, D), where the number of key heads divides that of heads.
        v: (1, key heads, N, E).
        trie: Of N nodes.
        scale: Factor of the scores.

    Returns:
        (1, heads, N, E).
    """
    size = v.size(-1)
    if size != q.size(-1):  # the kernel takes one size: zeros add nothing to scores, and columns of zeros to the output
        width = max(size, q.size(-1))
        q, k, v = (pad(x, (0, width - x.size(-1))) for x in (q, k, v))
    output: torch.Tensor = _TrieAttention.apply(q, k, v, trie, scale)
    return output[..., :size]


class _TrieAttention(torch.autograd.Function):
    """Keeps queries, keys, values, the output and its log-sum-exp for the backward pass, and nothing per block."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, trie: Trie, scale: float) -> torch.Tensor:
        groups = q.size(1) // k.size(1)
        queries, keys, values = _grouped(q, groups), k.expand(groups, -1, -1, -1), v.expand(groups, -1, -1, -1)
        wide = torch.promote_types(q.dtype, torch.float32)
        output = torch.empty((*queries.shape[:-1], v.size(-1)), dtype=wide)
        total = torch.empty(queries.shape[:-1], dtype=wide)
        for own, _ in _blocks(trie):
            output[:, :, own], total[:, :, own] = _of_block(
                queries[:, :, own], keys[:, :, own], values[:, :, own], 0.0, True, scale=scale
            )
        for own, below in _blocks(trie):
            if below is None:
                continue
            part, logs = _of_block(queries[:, :, below], keys[:, :, own], values[:, :, own], 0.0, False, scale=scale)
            before = total[:, :, below]
            after = torch.logaddexp(before, logs)
            merged = output[:, :, below].mul_((before - after).exp()[..., None])
            merged.add_(part * (logs - after).exp()[..., None])
            total[:, :, below] = after
        output = output.to(q.dtype)
        ctx.save_for_backward(q, k, v, output, total)
        ctx.trie, ctx.scale = trie, scale
        return _flat(output, groups)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v, output, total = ctx.saved_tensors
        groups = q.size(1) // k.size(1)
        queries, keys, values = _grouped(q, groups), k.expand(groups, -1, -1, -1), v.expand(groups, -1, -1, -1)
        grad = _grouped(grad, groups)
        wide = total.dtype
        dq = torch.zeros(queries.shape, dtype=wide)
        dk, dv = torch.empty(k.shape, dtype=wide), torch.empty(v.shape, dtype=wide)
        for own, below in _blocks(ctx.trie):
            for reading, causal in ((own, True), (below, False)):
                if reading is None:
                    continue
                parts = _of_block_backward(
                    grad[:, :, reading], queries[:, :, reading], keys[:, :, own], values[:, :, own],
                    output[:, :, reading], total[:, :, reading], 0.0, causal, scale=ctx.scale,
                )  # fmt: skip
                dq[:, :, reading] += parts[0]
                for sums, part in ((dk, parts[1]), (dv, parts[2])):
                    summed = part.to(wide) if groups == 1 else part.to(wide).sum(dim=0, keepdim=True)
                    if causal:
                        sums[:, :, own] = summed
                    else:
                        sums[:, :, own] += summed
        return _flat(dq, groups).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _blocks(trie: Trie) -> Iterator[tuple[slice, slice | None]]:
    """Yield the nodes of each segment, and their descendants outside of it."""
    for s in trie.segments:
        yield slice(s.start, s.stop), slice(s.stop, s.end) if s.end > s.stop else None


def _grouped(x: torch.Tensor, groups: int) -> torch.Tensor:
    """View (1, heads, N, D) as (heads of a key head, key heads, N, D)."""
    return x[0].unflatten(0, (-1, groups)).transpose(0, 1)


def _flat(x: torch.Tensor, groups: int) -> torch.Tensor:
    return x.transpose(0, 1).flatten(0, 1)[None]
