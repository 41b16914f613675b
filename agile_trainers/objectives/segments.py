"""Conversions between tokens ``(B, T)`` and turns ``(B, K)``. ``turn_ids`` is -1 on every token outside an action."""

from __future__ import annotations

from typing import Literal

import torch

Reduction = Literal["mean", "sum"]


def turn_lengths(turn_ids: torch.Tensor, num_turns: int) -> torch.Tensor:
    """Count the action tokens of each turn, (B, K) int64."""
    counts = turn_ids.new_zeros(turn_ids.size(0), num_turns + 1)
    counts.scatter_add_(1, turn_ids + 1, torch.ones_like(turn_ids))
    return counts[:, 1:]


def first_tokens(turn_ids: torch.Tensor, num_turns: int) -> torch.Tensor:
    """Return the first token of each turn, (B, K) int64; T for a turn without tokens."""
    length = turn_ids.size(1)
    columns = torch.arange(length, device=turn_ids.device).expand_as(turn_ids)
    firsts = turn_ids.new_full((turn_ids.size(0), num_turns + 1), length)
    return firsts.scatter_reduce(1, turn_ids + 1, columns, "amin")[:, 1:]


def pool_to_turns(values: torch.Tensor, turn_ids: torch.Tensor, num_turns: int, reduction: Reduction) -> torch.Tensor:
    """Reduce token values to one value per turn.

    Args:
        values: (B, T). Values outside actions have no influence.
        turn_ids: (B, T) int64.
        num_turns: K.
        reduction: ``"mean"`` or ``"sum"`` over the tokens of a turn.

    Returns:
        (B, K) in the dtype of ``values``; 0 for a turn without tokens.
    """
    inside = torch.where(turn_ids >= 0, values, values.new_zeros(()))
    # Column 0 collects the tokens outside actions, so that -1 needs no special case.
    sums = values.new_zeros(values.size(0), num_turns + 1).scatter_add(1, turn_ids + 1, inside)[:, 1:]
    if reduction == "sum":
        return sums
    return sums / turn_lengths(turn_ids, num_turns).clamp(min=1)


def spread_to_tokens(values: torch.Tensor, turn_ids: torch.Tensor) -> torch.Tensor:
    """Assign every action token its turn's value: (B, K) -> (B, T), 0 outside actions."""
    padded = torch.cat([values.new_zeros(values.size(0), 1), values], dim=1)
    return padded.gather(1, turn_ids + 1)
