"""KV caches that persist between turns, the packing of rows of several batches into a new one, and the bytes of a row.

Shape letters: ``R`` rows (episodes), ``H`` key-value heads, ``C`` columns (token slots), ``D`` head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, DynamicLayer

_SPARE_COLUMNS = 64


class GrowingLayer(DynamicLayer):
    """One layer's keys and values in buffers with spare capacity.

    ``DynamicLayer`` copies the whole cache for every token. This class writes a token in place and copies the (R, H,
    capacity, D) buffers only when they are full, to buffers that are a quarter larger. Under autocast it keeps the type that
    attention computes in: rotary embeddings give keys in fp32, and all of them would be cast again for every token.

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
        """Append the (R, H, n, D) states of ``n`` new columns; return all keys and values in use."""
        start, self.length = self.length, self.length + key_states.shape[-2]
        self.keys = _append(self.keys, as_kept(key_states), start)
        self.values = _append(self.values, as_kept(value_states), start)
        self.is_initialized = True
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_seq_length(self) -> int:
        """Return the number of columns in use."""
        return self.length


@dataclass(eq=False)
class KVBatch:
    """The keys and values of several episodes, one per row."""

    cache: Cache | None
    """The model's ``past_key_values``. For packing, every layer must be a ``GrowingLayer``. None: the model makes its
    own."""
    mask: torch.Tensor
    """(R, C) bool, True for columns that hold a token of the row's episode; the others are padding."""

    @property
    def layers(self) -> list[GrowingLayer]:
        """The layers of ``cache``."""
        return self.cache.layers if self.cache is not None else []


def pack(sources: Sequence[tuple[KVBatch, list[int]]], counts: Sequence[int], room: int = 0) -> KVBatch:
    """Gather rows of several batches into a new left-padded batch without gaps.

    Args:
        sources: Batches and the selected rows of each; at least one. A row that is listed twice is copied.
        counts: Number of tokens that are taken of each row, its first ones, in the order of ``sources``. Entries beyond the
            rows of ``sources`` (all 0) make empty rows.
        room: Number of columns that the caller will append; the buffers are made large enough for them.

    Returns:
        A batch of ``len(counts)`` rows and ``max(counts)`` columns.
    """
    first = sources[0][0]
    device, width = first.mask.device, max(counts)
    tokens = torch.tensor(counts, device=device)
    mask = torch.arange(width, device=device) >= width - tokens[:, None]
    picks, picked = [], 0
    for kv, rows in sources:
        index = torch.tensor(rows, device=device)
        picks.append((index, _first_columns(kv.mask[index], tokens[picked : picked + len(rows)], width)))
        picked += len(rows)

    def packed(layer: int, name: str) -> torch.Tensor:
        buffers = [getattr(kv.layers[layer], name) for kv, _ in sources]
        _, heads, _, dim = buffers[0].shape
        out = buffers[0].new_empty(len(counts), heads, _capacity(width + room), dim)
        # Padding enters the masked product, where a NaN would survive the mask.
        out[:, :, :width] = 0
        row = 0
        for buffer, (rows, columns) in zip(buffers, picks):
            out[row : row + len(rows), :, width - columns.shape[1] : width] = _gather(buffer, rows, columns)
            row += len(rows)
        return out

    layers = [GrowingLayer(packed(i, "keys"), packed(i, "values"), width) for i in range(len(first.layers))]
    return KVBatch(Cache(layers=layers), mask)


def as_kept(states: torch.Tensor) -> torch.Tensor:
    """Cast keys or values to the type that they are kept in: under autocast, attention casts those in fp32 to its type."""
    device = states.device.type
    if states.dtype == torch.float32 and torch.is_autocast_enabled(device):
        return states.to(torch.get_autocast_dtype(device))
    return states


def _first_columns(mask: torch.Tensor, counts: torch.Tensor, width: int) -> torch.Tensor:
    """Return the columns (n, w) of the first ``counts`` (n,) tokens of each row of ``mask``, on the right."""
    # A stable sort moves the padding to the left and keeps the tokens in order.
    order = mask.int().argsort(dim=1, stable=True)
    width = min(width, mask.shape[1])
    dropped = mask.sum(dim=1) - counts
    chosen = torch.arange(mask.shape[1] - width, mask.shape[1], device=mask.device) - dropped[:, None]
    # Columns left of the tokens are padding, whatever they hold.
    return order.gather(1, chosen.clamp(min=0))


def _gather(buffer: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Gather the ``columns`` (n, w) of each of ``rows`` (n,) to (n, H, w, D)."""
    _, heads, capacity, dim = buffer.shape
    rows, columns = rows.to(buffer.device), columns.to(buffer.device)
    flat = (rows[:, None] * heads + torch.arange(heads, device=buffer.device))[:, :, None] * capacity + columns[:, None]
    # One flat index is several times faster than indexing with three tensors.
    return buffer.flatten(0, 2).index_select(0, flat.flatten()).view(*flat.shape, dim)


def _append(buffer: torch.Tensor | None, states: torch.Tensor, start: int) -> torch.Tensor:
    """Write ``states`` at column ``start``, in a larger copy of ``buffer`` if it is full."""
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
    """Return the columns of buffers for episodes that grow to ``tokens`` tokens, with a last answer of ``new_tokens``."""
    columns = _capacity(max(0, tokens - new_tokens))
    while columns < tokens:
        columns = _capacity(columns + 1)
    return columns


def _capacity(columns: int) -> int:
    return columns + max(_SPARE_COLUMNS, columns // 4)


# --------------------------------------------------------------------------------------------------------------- memory


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
