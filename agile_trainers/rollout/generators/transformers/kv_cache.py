"""Keys and values that outlive a turn: in-place growing buffers, and packing rows of several batches into a new one.

Shape letters: ``R`` rows (episodes), ``H`` key-value heads, ``C`` columns (token slots), ``D`` head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache, DynamicLayer

_SPARE_COLUMNS = 64


class GrowingLayer(DynamicLayer):
    """One layer's keys and values in buffers with room to grow.

    ``DynamicLayer`` copies the whole cache for every token. Here a token is written in place, and the (R, H, capacity,
    D) buffers are copied only when they are full, each time to a quarter more.

    Args:
        keys: Buffer whose first ``length`` columns are in use. Default None: a layer that starts empty.
        values: The same for the values.
        length: Columns in use.
    """

    is_croppable = False

    def __init__(self, keys: torch.Tensor | None = None, values: torch.Tensor | None = None, length: int = 0) -> None:
        super().__init__()
        self.keys, self.values, self.length = keys, values, length
        self.is_initialized = keys is not None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the (R, H, n, D) states of ``n`` new columns; return the keys and values in use, old and new."""
        start, self.length = self.length, self.length + key_states.shape[-2]
        self.keys = _append(self.keys, key_states, start)
        self.values = _append(self.values, value_states, start)
        self.is_initialized = True
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_seq_length(self) -> int:
        """Number of columns in use."""
        return self.length


@dataclass(eq=False)
class KVBatch:
    """The keys and values of several episodes, one per row."""

    cache: Cache | None
    """What the model is given as ``past_key_values``. To be packed, every layer must be a ``GrowingLayer``; None lets
    the model make its own."""
    mask: torch.Tensor
    """(R, C) bool, which columns hold a token of the row's episode; the others are padding."""

    @property
    def layers(self) -> list[GrowingLayer]:
        """The layers of ``cache``."""
        return self.cache.layers if self.cache is not None else []


def pack(sources: Sequence[tuple[KVBatch, list[int]]], counts: Sequence[int], room: int = 0) -> KVBatch:
    """Gather rows of several batches into a new batch without holes: every row's tokens end at the last column.

    Args:
        sources: Batches, and the rows wanted of each; at least one.
        counts: Tokens that each row holds, in the order of ``sources``. Entries beyond the rows of ``sources`` (all 0)
            make rows that hold nothing yet.
        room: Columns the caller is about to append; the buffers are made large enough for them.

    Returns:
        A batch of ``len(counts)`` rows and ``max(counts)`` columns.
    """
    first = sources[0][0]
    device, width = first.mask.device, max(counts)
    mask = torch.arange(width, device=device) >= width - torch.tensor(counts, device=device)[:, None]
    picks = []
    for kv, rows in sources:
        index = torch.tensor(rows, device=device)
        # A stable sort moves the padding to the left and keeps the tokens in order.
        picks.append((index, kv.mask[index].int().argsort(dim=1, stable=True)[:, -width:]))

    def packed(layer: int, name: str) -> torch.Tensor:
        buffers = [getattr(kv.layers[layer], name) for kv, _ in sources]
        _, heads, _, dim = buffers[0].shape
        out = buffers[0].new_empty(len(counts), heads, _capacity(width + room), dim)
        # Padding takes part in the masked product, where a stray NaN would survive the mask.
        out[:, :, :width] = 0
        row = 0
        for buffer, (rows, columns) in zip(buffers, picks):
            out[row : row + len(rows), :, width - columns.shape[1] : width] = _gather(buffer, rows, columns)
            row += len(rows)
        return out

    layers = [GrowingLayer(packed(i, "keys"), packed(i, "values"), width) for i in range(len(first.layers))]
    return KVBatch(Cache(layers=layers), mask)


def _gather(buffer: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """(n, H, w, D): of each of ``rows`` (n,), its ``columns`` (n, w)."""
    _, heads, capacity, dim = buffer.shape
    rows, columns = rows.to(buffer.device), columns.to(buffer.device)
    flat = (rows[:, None] * heads + torch.arange(heads, device=buffer.device))[:, :, None] * capacity + columns[:, None]
    # One flat index is several times faster than indexing with three tensors.
    return buffer.flatten(0, 2).index_select(0, flat.flatten()).view(*flat.shape, dim)


def _append(buffer: torch.Tensor | None, states: torch.Tensor, start: int) -> torch.Tensor:
    """Write ``states`` at column ``start``, in a larger copy of ``buffer`` when it is full."""
    end = start + states.shape[-2]
    if buffer is None or buffer.shape[2] < end:
        rows, heads, _, dim = states.shape
        larger = states.new_empty(rows, heads, _capacity(end), dim)
        if buffer is not None:
            larger[:, :, :start] = buffer[:, :, :start]
        buffer = larger
    buffer[:, :, start:end] = states
    return buffer


def capacity(tokens: int, new_tokens: int) -> int:
    """Columns of the buffers that hold episodes of ``tokens`` tokens in the end, whose last answer has ``new_tokens``."""
    columns = _capacity(max(0, tokens - new_tokens))
    while columns < tokens:
        columns = _capacity(columns + 1)
    return columns


def _capacity(columns: int) -> int:
    return columns + max(_SPARE_COLUMNS, columns // 4)
