"""Runs the forward passes of scoring and training: packed or padded rows in, log-probabilities (B, T) out.

The LM head reads only the hidden states before tokens whose log-probability is asked for, and each distinct one once. Every
pass is one call of the wrapped model, so that the hooks of DDP, DeepSpeed and FSDP run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel
from trl.trainer.utils import FusedCausalLMOutput

from agile_trainers.objectives.kept_sets import KeptSets
from agile_trainers.packing.attention import Plan, TrieAttention
from agile_trainers.packing.kept_head import KeptHead, Teaching
from agile_trainers.packing.trie import Trie, build_trie
from agile_trainers.rollout.generators.architecture import positions, takes_position_ids
from agile_trainers.rollout.generators.images import Shown, reader_of
from agile_trainers.train_batch import Paths

Forward = Callable[..., Any]
"""A model's forward pass: keyword arguments to an output."""
Pack = Callable[[torch.Tensor, Trie], bool]
"""Returns whether rows with an attention mask (B, S) and a trie are packed."""


@dataclass(frozen=True)
class BatchImages:
    """The image tokens of B episodes."""

    features: torch.Tensor
    """(B, V, W); see :class:`~agile_trainers.types.TurnBatch`."""
    places: torch.Tensor
    """(B, V, 5) int64."""


@dataclass(frozen=True)
class ValueReading:
    """Values that a critic gives in a forward pass of the policy."""

    positions: torch.Tensor
    """(B, U) int64, in prompt and completion, or columns of ``path_ids``. The value at padding is arbitrary."""
    heard: Callable[[torch.Tensor], None]
    """Called with the values (B, U) float32."""


@dataclass(frozen=True)
class Taught:
    """A teacher whose distributions are compared with the policy's in a forward pass."""

    teaching: Teaching
    heard: Callable[[torch.Tensor], None]
    """Called with the divergence (B, L - 1) of the distribution of each token, 0 where none was scored."""


_SELECTS = "selects_rows"
_read: torch.Tensor | None = None  # of the forward pass that runs; None for all hidden states
_heard: list[torch.Tensor] | None = None  # gets these (R, H) where the LM head is ours


def select_before_head(base: PreTrainedModel, head: KeptHead) -> None:
    """Add the keywords ``read``, ``kept``, ``teaching`` and ``heard`` to a model's ``forward``.

    These are the hidden states that reach the LM head, the sets of tokens that their distributions are renormalised over, a
    teacher that they are compared with, and a function that gets the hidden states. With one of the last three, TRL's head
    reads the first hidden state alone, and ours all of them, or none for the function.

    A deep copy of the model computes with its own weights, since neither the method nor the hook holds the model.

    Args:
        base: The model below the adapters, with TRL's fused head.
        head: Computes log-probabilities where there are sets.
    """
    original = base.forward.__func__

    # Keeps the original signature, which `generate` and the rollout generator inspect.
    @functools.wraps(type(base).forward)
    def forward(
        model: PreTrainedModel,
        *args: Any,
        read: torch.Tensor | None = None,
        kept: KeptSets | None = None,
        teaching: Teaching | None = None,
        heard: Callable[[torch.Tensor], None] | None = None,
        **kwargs: Any,
    ) -> Any:
        if kept is None and teaching is None and heard is None:
            with _reading(read):
                return original(model, *args, **kwargs)
        tokens = kwargs.pop("shift_labels")
        hidden: list[torch.Tensor] = []
        with _reading(read, hidden):
            outputs = original(model, *args, shift_labels=tokens[:, :1], **kwargs)
        if heard is None:
            return head(model, hidden[0], tokens[0], kept, outputs, teaching)
        heard(hidden[0])
        return outputs

    base.forward = MethodType(forward, base)
    if not hasattr(base.base_model, _SELECTS):  # an earlier trainer of the same model has done it, also for a copy
        base.base_model.register_forward_hook(_select)
        setattr(base.base_model, _SELECTS, True)


@contextmanager
def _reading(read: torch.Tensor | None, heard: list[torch.Tensor] | None = None) -> Iterator[None]:
    global _read, _heard
    before, _read, _heard = (_read, _heard), read, heard
    try:
        yield
    finally:
        _read, _heard = before


def _select(decoder: torch.nn.Module, inputs: Any, outputs: Any) -> Any:
    if _read is not None:
        hidden = outputs.last_hidden_state.flatten(0, 1)
        hidden = hidden.index_select(0, _read.to(hidden.device))
        if _heard is not None:
            _heard.append(hidden)
            hidden = hidden[:1]
        outputs.last_hidden_state = hidden[None]
    return outputs


_UNSCALED = KeptHead()


class PackedForward:
    """Makes the forward passes of one model.

    Args:
        base: The model below the adapters, with TRL's fused head. It may be shared by several adapters.
        kept_head: Computes log-probabilities where tokens have kept sets.
        selects: False if the model adds virtual tokens, so that columns of hidden states and tokens differ.
        multiple: Packed rows are padded to a multiple of this many tokens, so that few shapes are compiled.
    """

    def __init__(
        self, base: PreTrainedModel, kept_head: KeptHead = _UNSCALED, *, selects: bool = True, multiple: int = 1
    ) -> None:
        self._attention, self._multiple, self._selects = TrieAttention(base), multiple, selects
        self._takes_positions, self._reader = takes_position_ids(base), reader_of(base)
        if selects:
            select_before_head(base, kept_head)

    def reading(
        self,
        model: Forward,
        scored: torch.Tensor | None,
        *,
        pack: Pack | None = None,
        values: ValueReading | None = None,
        paths: Paths | None = None,
        kept: KeptSets | None = None,
        images: BatchImages | None = None,
        taught: Taught | None = None,
    ) -> Forward:
        """Wrap ``model`` for TRL's ``_get_per_token_logps_and_entropies``.

        Args:
            model: The model, wrapped for distributed training.
            scored: (B, T) bool, the completion tokens whose log-probability is asked for; it is 0 elsewhere. None: all.
            pack: Returns whether rows with an attention mask (Q, S) and a trie are packed. Default: never.
            values: Values to read in the same pass.
            paths: The rows that are read. Default: prompt and completion of each episode.
            kept: The sets of the (B * T,) completion tokens that the policy is renormalised over. Default: all tokens.
            images: The images of the episodes. Their rows are not packed.
            taught: A teacher whose distributions are compared with the model's in the same pass.

        Raises:
            ValueError: For sets with a model that adds virtual tokens.
        """
        if kept is not None and not self._selects:
            raise ValueError(
                "A prompt-learning adapter cannot be trained on episodes with kept sets. Use another adapter, or sample "
                "without top_p, top_k, min_p and min_new_tokens."
            )

        def forward(
            *, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor, **inputs: Any
        ) -> Any:
            if scored is not None:
                labels = labels.clone()
                labels[:, -scored.size(1) :].masked_fill_(~scored, -100)
            rows = _Rows.of(input_ids, attention_mask, labels, paths)
            read = torch.zeros_like(rows.mask, dtype=torch.bool)
            read.view(-1)[rows.before] = True
            cells = None if values is None else _cells(values.positions, rows.mask, paths)
            if cells is not None:
                read |= _marked(cells, rows.mask)
            trie = self._trie(rows.ids, rows.mask, read, pack)
            if cells is not None:
                inputs["value_positions"], order = _value_positions(cells, rows.mask, trie, paths)
            if kept is not None:
                inputs["kept"] = kept.at(rows.completion_places(len(kept.sizes)))
            if taught is not None:
                inputs["teaching"] = taught.teaching
            with self._showing(images, rows.mask, paths) as more:
                inputs |= more
                outputs = self._padded(model, rows, inputs) if trie is None else self._packed(model, trie, rows, inputs)
            if cells is not None:
                assert values is not None
                values.heard(_in_order(outputs.state_values, order, cells))
            if taught is not None:
                taught.heard(outputs.divergence)
            return outputs

        return forward

    def values(
        self,
        model: Forward,
        ids: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        pack: Pack | None = None,
        paths: Paths | None = None,
        images: BatchImages | None = None,
    ) -> torch.Tensor:
        """Read a critic's values at positions (B, U) in prompt and completion, without log-probabilities.

        Args:
            model: The model, wrapped for distributed training, with a critic.
            ids: (Q, S) int64, prompt and completion, or the rows of ``paths``.
            mask: (Q, S), 1 on tokens.
            positions: (B, U) int64, in these, or columns of ``path_ids``.
            pack: See :meth:`reading`.
            paths: See :meth:`reading`.
            images: See :meth:`reading`.

        Returns:
            (B, U) float32; arbitrary at padding.
        """
        cells = _cells(positions, mask, paths)
        trie = self._trie(ids, mask, _marked(cells, mask), pack)
        where, order = _value_positions(cells, mask, trie, paths)
        if trie is None:
            with self._showing(images, mask, paths) as more:
                given = {**self._positions(mask), **more}
                outputs = model(input_ids=ids, attention_mask=mask, **given, value_positions=where)
        else:
            with self._attending(trie) as inputs:
                outputs = model(**inputs, value_positions=where)
        return _in_order(outputs.state_values, order, cells)

    @contextmanager
    def _showing(
        self, images: BatchImages | None, mask: torch.Tensor, paths: Paths | None
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Show images in rows with a mask (Q, S) inside the block; yield what the model takes beside."""
        if images is None or self._reader is None:
            yield {}
            return
        there = images.places[..., 0] >= 0
        if paths is None:
            cells = _cells(images.places[..., 0] + mask.int().argmax(dim=1)[:, None], mask, None)
        else:
            there &= paths.has(images.places[..., 0])
            cells = paths.at(images.places[..., 0])
        cells = cells[there]
        shown = Shown(images.features[there], cells // mask.size(1), cells % mask.size(1))
        with self._reader.showing(shown):
            yield self._reader.inputs(mask, shown, images.places[there][:, 1:])

    def _trie(self, ids: torch.Tensor, mask: torch.Tensor, read: torch.Tensor, pack: Pack | None) -> Trie | None:
        """Return the trie of rows that are packed; None for rows that stay padded."""
        if pack is None:
            return None
        trie = build_trie(ids, mask, read)
        return trie if pack(mask, trie) else None

    def _positions(self, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"position_ids": positions(mask)} if self._takes_positions else {}

    def _padded(self, model: Forward, rows: _Rows, inputs: dict[str, Any]) -> Any:
        inputs = {"input_ids": rows.ids, "attention_mask": rows.mask, **self._positions(rows.mask), **inputs}
        if self._selects:
            outputs = model(shift_labels=rows.tokens[None], read=rows.before, **inputs)
            return outputs if "heard" in inputs else _scattered(outputs, rows, None)
        outputs = model(labels=rows.labels, **inputs)
        # Virtual tokens are in front, and the last token has no output.
        columns, width = rows.ids.size(1), outputs.log_probs.size(1)
        row, column = rows.before // columns, rows.before % columns
        return _scattered(outputs, rows, row * width + column + width - (columns - 1))

    def _packed(self, model: Forward, trie: Trie, rows: _Rows, inputs: dict[str, Any]) -> Any:
        # Rows share a token's log-probability if they share its whole prefix: the node before it, and the token.
        pairs = torch.stack([trie.nodes.view(-1)[rows.before], rows.tokens], dim=1)
        of = None
        read = pairs
        if not {"kept", "teaching", "heard"} & inputs.keys():  # with these, what they say would have to be the same too
            pairs, of = pairs.unique(dim=0, return_inverse=True)
            read = torch.cat([pairs, pairs.new_tensor([[0, -100]]).expand(-len(pairs) % self._multiple, 2)])
        with self._attending(trie) as packed:
            outputs = model(shift_labels=read[None, :, 1], read=read[:, 0], **packed, **inputs)
        return outputs if "heard" in inputs else _scattered(outputs, rows, of)

    @contextmanager
    def _attending(self, trie: Trie) -> Iterator[dict[str, torch.Tensor]]:
        """Run the attention of a trie inside the ``with`` block, for the inputs that it yields."""
        trie = trie.padded(self._multiple)
        with self._attention.using(Plan(trie)):
            yield {
                "input_ids": trie.tokens[None],
                "attention_mask": torch.ones_like(trie.tokens)[None],
                "position_ids": trie.depths[None],
            }


@dataclass(frozen=True)
class _Rows:
    """The Q rows of a pass, and the R tokens of B episodes whose log-probability is asked for.

    A *cell* is an index into flattened rows or outputs.
    """

    ids: torch.Tensor
    """(Q, S) int64."""
    mask: torch.Tensor
    """(Q, S), 1 on tokens."""
    before: torch.Tensor
    """(R,) int64, cell of the token before each."""
    tokens: torch.Tensor
    """(R,) int64."""
    outputs: torch.Tensor
    """(R,) int64, cell of each in the output (B, L - 1)."""
    shape: tuple[int, int]
    """B and L - 1, of the episodes' own rows."""

    @classmethod
    def of(cls, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor, paths: Paths | None) -> _Rows:
        """Make the rows of a pass.

        Args:
            ids: (B, L) int64, prompt and completion of each episode.
            mask: (B, L), 1 on tokens.
            labels: (B, L) int64, the tokens whose log-probability is asked for; -100 elsewhere.
            paths: The rows that are read. Default: these.
        """
        shape = (ids.size(0), ids.size(1) - 1)
        asked = labels[:, 1:] != -100
        if paths is not None:
            asked = asked.clone()
            asked[:, -paths.cells.size(1) :] &= paths.cells >= 0
            asked[:, : -paths.cells.size(1)] = False
        row, column = asked.nonzero(as_tuple=True)
        tokens, outputs = labels[row, column + 1], row * shape[1] + column
        if paths is None:
            return cls(ids, mask, row * ids.size(1) + column, tokens, outputs, shape)
        before = paths.cells[row, column - (shape[1] - paths.cells.size(1))] - 1
        return cls(paths.ids, paths.mask, before, tokens, outputs, shape)

    def completion_places(self, count: int) -> torch.Tensor:
        """Return the place (R,) of each token among the ``count`` completion tokens (B * T,) of the episodes."""
        episodes, columns = self.shape
        length = count // episodes
        return self.outputs // columns * length + self.outputs % columns - (columns - length)

    @property
    def labels(self) -> torch.Tensor:
        """(Q, S) int64, the tokens whose log-probability is asked for; -100 elsewhere."""
        labels = torch.full_like(self.ids, -100)
        labels.view(-1)[self.before + 1] = self.tokens
        return labels


def _cells(positions: torch.Tensor, mask: torch.Tensor, paths: Paths | None) -> torch.Tensor:
    """Return the cells (B, U) of rows with a mask (Q, S) that positions (B, U) are in."""
    if paths is not None:
        return paths.at(positions)
    return positions + torch.arange(len(positions), device=positions.device)[:, None] * mask.size(1)


def _marked(cells: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return (Q, S) bool, True on tokens at cells (B, U)."""
    marked = torch.zeros_like(mask, dtype=torch.bool)
    marked.view(-1)[cells] = True
    return marked & mask.bool()


def _value_positions(
    cells: torch.Tensor, mask: torch.Tensor, trie: Trie | None, paths: Paths | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the positions of values in the rows that a model reads, from their cells (B, U) in rows with a mask (Q, S).

    Returns:
        (1, B * U) nodes of a trie, any at padding; or columns of the rows, (Q, V). And the index (B * U,) of each value
        among these; None if the order is the same.
    """
    if trie is not None:
        return trie.nodes.view(-1)[cells].clamp(min=0).view(1, -1), None
    row, column = cells // mask.size(1), cells % mask.size(1)
    if paths is None:
        return column, None
    return _by_row(row.view(-1), column.view(-1), len(mask))


def _by_row(row: torch.Tensor, column: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Arrange N columns (N,) of some rows as (count, V), padded with 0; and return the index (N,) of each in it."""
    order = row.argsort(stable=True)
    numbers = torch.bincount(row, minlength=count)
    rank = torch.empty_like(row)
    rank[order] = torch.arange(len(row), device=row.device) - (numbers.cumsum(0) - numbers)[row[order]]
    width = int(numbers.max())
    index = row * width + rank
    return column.new_zeros(count * width).index_put((index,), column).view(count, width), index


def _in_order(values: torch.Tensor, order: torch.Tensor | None, cells: torch.Tensor) -> torch.Tensor:
    """Return values that were read for :func:`_value_positions` in the shape of the cells (B, U)."""
    return (values if order is None else values.flatten()[order.to(values.device)]).view(cells.shape)


def _scattered(outputs: Any, rows: _Rows, of: torch.Tensor | None) -> FusedCausalLMOutput:
    """Replace log-probabilities and entropies by those of the episodes, (B, L - 1), 0 where none was computed.

    Args:
        outputs: The model's.
        rows: R tokens of them are scored.
        of: (R,) int64, the entry of each in the flattened output. Default: the same order.
    """
    for name in ("log_probs", "entropy", "divergence"):
        found = getattr(outputs, name, None)
        if found is not None:
            found = found.flatten() if of is None else found.flatten().index_select(0, of.to(found.device))
            zeros = found.new_zeros(rows.shape[0] * rows.shape[1])
            setattr(outputs, name, zeros.scatter(0, rows.outputs.to(found.device), found).view(rows.shape))
    return outputs
