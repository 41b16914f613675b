"""Advantages of turns. Statistics are over whatever rows are given: pass the rows of all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from .returns import discounted_returns

Granularity = Literal["turn", "trajectory"]
TurnCredit = Literal["return", "reward"]
Scale = Literal["group", "batch", "none"]
Baseline = Literal["mean", "leave_one_out"]

STD_EPSILON = 1e-4
"""Added to standard deviations of rewards, as in TRL."""


@dataclass
class GroupAdvantages:
    """Advantages and what is worth logging about them."""

    advantages: torch.Tensor
    """(B, K), 0 where no turn happened and on failed episodes."""
    groups_without_signal: float
    """Share of groups in which every advantage is 0, for equal rewards or too few members."""
    lonely_turns: float
    """Share of turns that no other valid member of the group reached; they get advantage 0."""


def _group_mean_std(values: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean, sample standard deviation (ddof 1) and count over dim 1 of (G, N, K), of what the mask keeps."""
    count = mask.sum(dim=1, keepdim=True)
    kept = torch.where(mask, values, values.new_zeros(()))
    mean = kept.sum(dim=1, keepdim=True) / count.clamp(min=1)
    squares = torch.where(mask, (values - mean) ** 2, values.new_zeros(()))
    return mean, (squares.sum(dim=1, keepdim=True) / (count - 1).clamp(min=1)).sqrt(), count


def group_advantages(
    turn_rewards: torch.Tensor,
    turn_mask: torch.Tensor,
    failed: torch.Tensor,
    *,
    group_size: int,
    granularity: Granularity = "turn",
    turn_credit: TurnCredit = "return",
    gamma: float = 1.0,
    scale: Scale = "group",
    baseline: Baseline = "mean",
) -> GroupAdvantages:
    """Group-relative advantages (GRPO: Shao et al., 2024, eq. 3), per trajectory or per turn.

    ``"trajectory"``: ``(R - mean of the group) / (std of the group + 1e-4)`` with ``R`` the sum of the turn rewards, the
    same for every turn. ``"turn"``: the same per turn index, over the members of the group that reached that turn, with
    ``R`` the discounted return from that turn on (``turn_credit="return"``) or the turn's own reward (``"reward"``). A
    turn that fewer than two members reached has nothing to be compared with and gets 0.

    Args:
        turn_rewards: (B, K); rows ``i * group_size`` to ``(i + 1) * group_size`` are one group.
        turn_mask: (B, K) bool.
        failed: (B,) bool, rows left out of every statistic.
        group_size: Members of a group.
        granularity: ``"turn"`` or ``"trajectory"``.
        turn_credit: ``"return"`` or ``"reward"``; only for ``"turn"``.
        gamma: Discount per turn for ``turn_credit="return"``.
        scale: TRL's ``scale_rewards``: divide by the ``"group"`` standard deviation, by that of the ``"batch"``, or not
            at all (``"none"``, Dr. GRPO).
        baseline: The ``"mean"`` of the group, or of the other members only (``"leave_one_out"``, RLOO: Ahmadian et al.,
            2024), which does not shrink the gradient: unscaled, its expectation is the exact one.

    Returns:
        The advantages and their statistics. Computed in float64, returned as float32.
    """
    num_turns = turn_rewards.size(1)
    valid = turn_mask & ~failed[:, None]
    rewards = torch.where(valid, turn_rewards.double(), 0.0)
    if granularity == "trajectory":
        values, mask = rewards.sum(dim=1, keepdim=True), ~failed[:, None]
    elif turn_credit == "return":
        values, mask = discounted_returns(rewards, valid, gamma), valid
    else:
        values, mask = rewards, valid

    grouped = values.view(-1, group_size, values.size(1))
    group_mask = mask.view(grouped.shape)
    mean, std, count = _group_mean_std(grouped, group_mask)
    comparable = group_mask & (count >= 2)
    # Equal rewards have a spread of rounding size, not of exactly 0; it must not be blown up to a signal.
    comparable &= std > 1e-6 * mean.abs().clamp(min=1.0)
    centred = torch.where(comparable, grouped - mean, 0.0)
    if baseline == "leave_one_out":
        centred = centred * count / (count - 1).clamp(min=1)
    if scale == "group":
        centred = centred / (std + STD_EPSILON)
    elif scale == "batch":
        flat = values[mask]
        centred = centred / ((flat.std() if flat.numel() > 1 else flat.new_zeros(())) + STD_EPSILON)

    lonely = group_mask & (count < 2)
    advantages = centred.view(-1, values.size(1)).expand(-1, num_turns) * valid
    return GroupAdvantages(
        advantages=advantages.float(),
        groups_without_signal=(~comparable.flatten(1).any(dim=1)).double().mean().item(),
        lonely_turns=(lonely.sum() / group_mask.sum().clamp(min=1)).item(),
    )


def whiten(advantages: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Shift and scale to mean 0 and standard deviation 1 over every (episode, turn) that the mask keeps.

    A spread below ``1e-6 * max(1, |mean|)`` gives exactly zero.

    Args:
        advantages: (B, K).
        mask: (B, K) bool.
        weights: (B, K) non-negative counts: how often each turn enters the statistics. Default: once.

    Returns:
        (B, K) float32, 0 where the mask is False. Statistics are in float64, the deviation with ddof 1.
    """
    values = torch.where(mask, advantages, 0.0).double()
    counts = mask.double() if weights is None else mask * weights.double()
    total = counts.sum()
    if total < 2:
        return torch.zeros_like(advantages, dtype=torch.float32)
    mean = (counts * values).sum() / total
    std = ((counts * (values - mean) ** 2).sum() / (total - 1)).sqrt()
    if std <= 1e-6 * max(1.0, abs(mean.item())):
        return torch.zeros_like(advantages, dtype=torch.float32)
    return torch.where(mask, (values - mean) / (std + 1e-8), 0.0).float()


def pool_over_turns(advantages: torch.Tensor, turn_mask: torch.Tensor) -> torch.Tensor:
    """Mean over an episode's turns, given to each of them: for a ratio that spans the whole episode.

    Args:
        advantages: (B, K).
        turn_mask: (B, K) bool.

    Returns:
        (B, K), 0 where no turn happened. A turn counts once, whatever its length.
    """
    kept = torch.where(turn_mask, advantages, advantages.new_zeros(()))
    mean = kept.sum(dim=1, keepdim=True) / turn_mask.sum(dim=1, keepdim=True).clamp(min=1)
    return mean * turn_mask
