"""Runs the forward passes of scoring and training: packed or padded rows in, log-probabilities (B, T) out.

The LM head reads only the hidden states before tokens whose log-probability is asked for, and each distinct one once. Every
pass is one call of the wrapped model, so that the hooks of DDP, DeepSpeed and FSDP run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel
from trl.trainer.utils import FusedCausalLMOutput

from agile_trainers.packing.attention import Plan, TrieAttention
from agile_trainers.packing.trie import Trie, build_trie
from agile_trainers.rollout.generators.architecture import positions, takes_position_ids

Forward = Callable[..., Any]
"""A model's forward pass: keyword arguments to an output."""
Pack = Callable[[torch.Tensor, Trie], bool]
"""Returns whether rows with an attention mask (B, S) and a trie are packed."""


@dataclass(frozen=True)
class ValueReading:
    """Values that a critic gives in a forward pass of the policy."""

    positions: torch.Tensor
    """(B, U) int64, in prompt and completion. The value at padding is arbitrary."""
    heard: Callable[[torch.Tensor], None]
    """Called with the values (B, U) float32."""


_read: torch.Tensor | None = None  # of the forward pass that runs; None for all hidden states


def select_before_head(base: PreTrainedModel) -> None:
    """Add the keyword ``read`` to a model's ``forward``: the hidden states that reach the LM head.

    A deep copy of the model computes with its own weights, since neither the method nor the hook holds the model.

    Args:
        base: The model below the adapters, with TRL's fused head.
    """
    original = base.forward.__func__

    # Keeps the original signature, which `generate` and the rollout generator inspect.
    @functools.wraps(type(base).forward)
    def forward(model: PreTrainedModel, *args: Any, read: torch.Tensor | None = None, **kwargs: Any) -> Any:
        with _reading(read):
            return original(model, *args, **kwargs)

    base.forward = MethodType(forward, base)
    base.base_model.register_forward_hook(_select)


@contextmanager
def _reading(read: torch.Tensor | None) -> Iterator[None]:
    global _read
    before, _read = _read, read
    try:
        yield
    finally:
        _read = before


def _select(decoder: torch.nn.Module, inputs: Any, outputs: Any) -> Any:
    if _read is not None:
        hidden = outputs.last_hidden_state.flatten(0, 1)
        outputs.last_hidden_state = hidden.index_select(0, _read.to(hidden.device))[None]
    return outputs


class PackedForward:
    """Makes the forward passes of one model.

    Args:
        base: The model below the adapters, with TRL's fused head. It may be shared by several adapters.
        selects: False if the model adds virtual tokens, so that columns of hidden states and tokens differ.
        multiple: Packed rows are padded to a multiple of this many tokens, so that few shapes are compiled.
    """

    def __init__(self, base: PreTrainedModel, *, selects: bool = True, multiple: int = 1) -> None:
        self._attention, self._multiple, self._selects = TrieAttention(base), multiple, selects
        self._takes_positions = takes_position_ids(base)
        if selects:
            select_before_head(base)

    def reading(
        self,
        model: Forward,
        scored: torch.Tensor | None,
        *,
        pack: Pack | None = None,
        values: ValueReading | None = None,
    ) -> Forward:
        """Wrap ``model`` for TRL's ``_get_per_token_logps_and_entropies``.

        Args:
            model: The model, wrapped for distributed training.
            scored: (B, T) bool, the completion tokens whose log-probability is asked for; it is 0 elsewhere. None: all.
            pack: Returns whether rows with an attention mask (B, S) and a trie are packed. Default: never.
            values: Values to read in the same pass.
        """

        def forward(
            *, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor, **inputs: Any
        ) -> Any:
            if scored is not None:
                labels = labels.clone()
                labels[:, -scored.size(1) :].masked_fill_(~scored, -100)
            rows = _Rows(input_ids, attention_mask, labels)
            read = labels.roll(-1, dims=1) != -100
            if values is not None:
                read |= _marked(values.positions, attention_mask)
            trie = self._trie(input_ids, attention_mask, read, pack)
            if values is not None:
                inputs["value_positions"] = values.positions if trie is None else _nodes(trie, values.positions)
            outputs = self._padded(model, rows, inputs) if trie is None else self._packed(model, trie, rows, inputs)
            if values is not None:
                values.heard(outputs.state_values.view(values.positions.shape))
            return outputs

        return forward

    def values(
        self, model: Forward, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, pack: Pack | None = None
    ) -> torch.Tensor:
        """Read a critic's values at positions (B, U) in prompt and completion, without log-probabilities.

        Args:
            model: The model, wrapped for distributed training, with a critic.
            ids: (B, S) int64, prompt and completion.
            mask: (B, S), 1 on tokens.
            positions: (B, U) int64.
            pack: See :meth:`reading`.

        Returns:
            (B, U) float32; arbitrary at padding.
        """
        trie = self._trie(ids, mask, _marked(positions, mask), pack)
        if trie is None:
            outputs = model(input_ids=ids, attention_mask=mask, **self._positions(mask), value_positions=positions)
        else:
            with self._attending(trie) as inputs:
                outputs = model(**inputs, value_positions=_nodes(trie, positions))
        return outputs.state_values.view(positions.shape)

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
        if not self._selects:
            return model(labels=rows.labels, **inputs)
        row, column, tokens = rows.scored
        outputs = model(shift_labels=tokens[None], read=row * rows.ids.size(1) + column, **inputs)
        return _scattered(outputs, rows, None)

    def _packed(self, model: Forward, trie: Trie, rows: _Rows, inputs: dict[str, Any]) -> Any:
        row, column, tokens = rows.scored
        # Rows share a token's log-probability if they share its whole prefix: the node before it, and the token.
        pairs = torch.stack([trie.nodes[row, column], tokens], dim=1)
        pairs, of = pairs.unique(dim=0, return_inverse=True)
        read = torch.cat([pairs, pairs.new_tensor([[0, -100]]).expand(-len(pairs) % self._multiple, 2)])
        with self._attending(trie) as packed:
            outputs = model(shift_labels=read[None, :, 1], read=read[:, 0], **packed, **inputs)
        return _scattered(outputs, rows, of)

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
    """The padded rows of a pass."""

    ids: torch.Tensor
    """(B, S) int64."""
    mask: torch.Tensor
    """(B, S), 1 on tokens."""
    labels: torch.Tensor
    """(B, S) int64, the tokens whose log-probability is asked for; -100 elsewhere."""

    @cached_property
    def scored(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(R,) each: row, column of the token before, and the token."""
        row, column = (self.labels[:, 1:] != -100).nonzero(as_tuple=True)
        return row, column, self.labels[row, column + 1]


def _marked(positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return (B, S) bool, True on tokens at ``positions`` (B, U)."""
    return torch.zeros_like(mask, dtype=torch.bool).scatter(1, positions, True) & mask.bool()


def _nodes(trie: Trie, positions: torch.Tensor) -> torch.Tensor:
    """Return the nodes (1, B * U) at ``positions`` (B, U), any at padding."""
    return trie.nodes.gather(1, positions).clamp(min=0).view(1, -1)


def _scattered(outputs: Any, rows: _Rows, of: torch.Tensor | None) -> FusedCausalLMOutput:
    """Replace log-probabilities and entropies (1, M) by (B, S - 1), 0 where none was computed.

    Args:
        outputs: The model's.
        rows: R tokens of them are scored.
        of: (R,) int64, the entry in (0, M) of each. Default: the same order.
    """
    row, column, _ = rows.scored
    shape = (rows.ids.size(0), rows.ids.size(1) - 1)
    for name in ("log_probs", "entropy"):
        found = getattr(outputs, name)
        if found is not None:
            found = found[0] if of is None else found[0].index_select(0, of.to(found.device))
            places = (row * shape[1] + column).to(found.device)
            setattr(outputs, name, found.new_zeros(shape[0] * shape[1]).scatter(0, places, found).view(shape))
    return outputs
