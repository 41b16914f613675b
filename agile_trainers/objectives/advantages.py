"""Advantages of turns. Statistics are over the given rows: pass the rows of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Literal

import torch

from agile_trainers.objectives.returns import discounted_returns, gae

Granularity = Literal["turn", "trajectory", "anchor"]
TurnCredit = Literal["return", "reward"]
Scale = Literal["group", "batch", "mean", "none"]
Baseline = Literal["mean", "leave_one_out", "shrunk"]

STD_EPSILON = 1e-4
"""Added to standard deviations of rewards, as in TRL."""


@dataclass
class GroupAdvantages:
    """Advantages and their statistics for the log."""

    advantages: torch.Tensor
    """(B, K), 0 where no turn happened and on failed episodes."""
    uncompared_turns: float
    """Share of turns with nothing to compare: no other member of the group reached the turn or, with anchors, the state."""


@dataclass
class _Compared:
    """The result of comparing each value with the others of its set. All tensors have the shape of the values, and are 0
    where there was nothing to compare."""

    advantages: torch.Tensor
    alone: torch.Tensor
    """bool, True on values that are alone in their set."""
    others: torch.Tensor
    """Mean of the others; 0 where there are none."""
    factor: torch.Tensor
    """Factor from the difference of value and ``others`` to the advantage; 0 where the rule has no advantage."""

    def where(self, chosen: torch.Tensor, other: _Compared) -> _Compared:
        """Return this result with the entries where ``chosen`` is True replaced by those of ``other``."""
        names = (one.name for one in fields(self))
        return _Compared(*(torch.where(chosen, getattr(other, name), getattr(self, name)) for name in names))

    def weighted(self, rewards: torch.Tensor, mask: torch.Tensor, gamma: float, weights: torch.Tensor) -> torch.Tensor:
        """Compute the advantages (B, K) of returns whose rewards are weighted, from the rewards of turns."""
        final = rewards.new_zeros(len(rewards))
        return self.factor * gae(rewards, self.others, final, mask, gamma=gamma, gae_lambda=1.0, weights=weights)


@dataclass
class _Comparison:
    """Values and the sets within which they are compared. All tensors have one shape."""

    values: torch.Tensor
    sets: torch.Tensor
    """int64, the set of each value."""
    mask: torch.Tensor
    """bool, False on values that are ignored."""
    further: torch.Tensor | None = None
    """A further member of each value's set. None: there are none."""

    def compared(self, scale: Scale, baseline: Baseline, batch: torch.Tensor | None = None) -> _Compared:
        """Compute advantages.

        ``batch`` holds the values whose deviation ``scale="batch"`` divides by. Default: the compared values.
        """
        count, mean, std = self._statistics()
        centred = self.values - mean
        # Rounding gives equal rewards a tiny spread instead of 0, which must not be scaled up.
        differ = self.mask & (count >= 2) & (std > 1e-6 * mean.abs().clamp(min=1.0))
        centred = torch.where(differ, centred, 0.0)
        apart = centred * count / (count - 1).clamp(min=1)
        has_others = self.mask & (count >= 2)
        others = torch.where(has_others, self.values - apart, 0.0)
        factor = has_others.to(centred.dtype)
        if baseline == "leave_one_out":
            centred = apart
        else:
            factor = factor * (count - 1) / count.clamp(min=1)
        if scale == "group":
            centred = centred / (std + STD_EPSILON)
            factor = torch.where(differ, factor / (std + STD_EPSILON), 0.0)
        elif scale == "batch":
            batch = self.values[self.mask] if batch is None else batch
            deviation = (batch.std() if batch.numel() > 1 else 0.0) + STD_EPSILON
            centred, factor = centred / deviation, factor / deviation
        elif scale == "mean":
            centred, factor = (torch.where(differ, value / mean, 0.0) for value in (centred, factor))
        return _Compared(centred, self.mask & (self.count < 2), others, factor)

    def _statistics(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return number, mean and deviation of each value's set, with the further member."""
        count, total = self.count, self._total(self.values)
        if self.further is not None:
            count, total = count + 1, total + self.further
        mean = total / count.clamp(min=1)
        squares = self._total((self.values - mean) ** 2)
        if self.further is not None:
            squares = squares + (self.further - mean) ** 2
        return count, mean, (squares / (count - 1).clamp(min=1)).sqrt()

    def with_mean(self, sets: torch.Tensor) -> _Comparison:
        """Return this with the mean of the values of larger sets, int64, as the further member of each set."""
        larger = _Comparison(self.values, sets.unique(return_inverse=True)[1], self.mask)
        return replace(self, further=larger._total(self.values) / larger.count.clamp(min=1))

    @cached_property
    def count(self) -> torch.Tensor:
        """Number of values in each value's set, as a float."""
        return self._total(torch.ones_like(self.values))

    @cached_property
    def _number(self) -> int:
        """Length of a tensor that the sets index; reading it waits for a GPU."""
        return int(self.sets.max()) + 1

    def _total(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of each value's set, at each of its values."""
        kept = torch.where(self.mask, values, 0.0).flatten()
        return kept.new_zeros(self._number).index_add(0, self.sets.flatten(), kept)[self.sets]


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
    trajectory_fallback: bool = False,
    anchors: torch.Tensor | None = None,
    rewarded: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    environments: torch.Tensor | None = None,
) -> GroupAdvantages:
    """Compute group-relative advantages (GRPO: Shao et al., 2024, eq. 3), per trajectory or per turn.

    ``"trajectory"``: ``(R - mean of the group) / (std of the group + 1e-4)`` with ``R`` the sum of the turn rewards, the
    same for every turn. ``"turn"``: the same per turn index, over the members of the group that reached that turn, with
    ``R`` the discounted return from that turn on (``turn_credit="return"``) or the turn's own reward (``"reward"``).
    ``"anchor"`` (GiGPO: Feng et al., 2025): the trajectory's advantage plus that of the turn among itself and the turns
    of the *other* members that started from the same state. A turn with nothing to compare gets 0.

    Any baseline that does not depend on a turn's action is unbiased. Returns of the same episode depend on it: an episode
    that comes to a state twice is not compared with itself there (in GiGPO it is). If no other member reached the turn,
    ``trajectory_fallback`` compares its ``R`` with the discounted returns of the other members' whole episodes, which
    estimate the value of the group's initial state. Without it, a turn that few episodes reach is hardly trained.

    With ``weights`` the episodes are of another policy, and advantages are those of
    :func:`~agile_trainers.objectives.returns.gae` at lambda 1. The value of a turn is the mean of the other members that it
    is compared with. That mean, and what advantages are scaled by, are of the returns as they were played: a baseline is
    exact without weights of its own, varies less, and gives members of equal returns no advantage.

    Args:
        turn_rewards: (B, K); rows ``i * group_size`` to ``(i + 1) * group_size`` are one group.
        turn_mask: (B, K) bool.
        failed: (B,) bool, rows left out of every statistic.
        group_size: Members of a group.
        granularity: ``"turn"``, ``"trajectory"`` or ``"anchor"``.
        turn_credit: ``"return"`` or ``"reward"``; not for ``"trajectory"``.
        gamma: Discount per turn for ``turn_credit="return"``.
        scale: TRL's ``scale_rewards``: divide by the standard deviation of the compared values (``"group"``), of the
            whole ``"batch"``, by the ``"mean"`` of the compared values (MaxRL: Tajwar et al., 2026; a mean of 0 gives 0), or
            not at all (``"none"``, Dr. GRPO).
        baseline: The ``"mean"`` of the compared values, or of the other values only (``"leave_one_out"``, RLOO: Ahmadian
            et al., 2024), which does not shrink the gradient: without scaling, its expectation is exact, at granularity
            ``"turn"`` together with ``trajectory_fallback`` if episodes differ in length. ``"shrunk"``: the mean of the
            group, and of the whole batch as one member more (at granularity ``"turn"``: of the same turn), in ``scale`` too;
            not together with ``weights``. A group of equal returns then has an advantage: over the deviation of the group
            ``1 / sqrt(group_size + 1)``, with the sign of the difference from the batch.
        trajectory_fallback: For ``"turn"`` with ``turn_credit="return"``, as described above.
        anchors: (B, K) int64, the state each turn started from, 0 for none. For ``"anchor"`` only.
        rewarded: (B, K) int64, the number of calls whose rewards had been given when a turn's call was submitted, see
            :func:`~agile_trainers.objectives.returns.discounted_returns`. Default: the turn's index.
        weights: (B, K), of :func:`~agile_trainers.objectives.drift.decision_weights`. For ``"turn"`` with
            ``turn_credit="return"`` only. Default: 1.
        environments: (B,) int64, of which the episodes count as a batch each, for ``"shrunk"``. Default: one for all.

    Returns:
        The advantages and their statistics. Computed in float64, returned as float32, or float64 if the rewards are.

    Raises:
        ValueError: If ``scale="mean"`` and a reward is negative, or as ``discounted_returns`` does.
    """
    valid = turn_mask & ~failed[:, None]
    rewards = torch.where(valid, turn_rewards.double(), 0.0)
    _check_scale(scale, rewards)
    groups = (torch.arange(len(rewards), device=rewards.device) // group_size)[:, None].expand_as(rewards)
    episodes = _Comparison(rewards.sum(dim=1), groups[:, 0], ~failed)
    kinds = torch.zeros_like(groups[:, 0]) if environments is None else environments
    found = (episodes.with_mean(kinds) if baseline == "shrunk" else episodes).compared(scale, baseline)
    whole = found.advantages[:, None] * valid
    dtype = torch.promote_types(turn_rewards.dtype, torch.float32)
    if granularity == "trajectory":
        return _result(whole, found.alone, ~failed, dtype)

    values = discounted_returns(rewards, valid, gamma, rewarded) if turn_credit == "return" else rewards
    indices = torch.arange(rewards.size(1), device=rewards.device).expand_as(groups)
    compared, keys = (valid, indices) if granularity == "turn" else _named(valid, anchors)
    sets = _numbered(groups, keys)
    comparison = _Comparison(values, sets, compared)
    if baseline == "shrunk" and granularity == "turn":
        comparison = comparison.with_mean(_numbered(kinds[:, None].expand_as(indices), indices))
    found, rule = comparison.compared(scale, baseline), (group_size, scale, baseline)
    if granularity == "anchor":
        rows = torch.arange(len(rewards), device=rewards.device)[:, None].expand_as(sets)
        again = compared & (_Comparison(values, _numbered(rows, sets), compared).count > 1)
        if again.any():
            found = found.where(again, _against_others(values, again, comparison, values[compared], *rule))
        return _result(whole + found.advantages, found.alone | (valid & ~compared), valid, dtype)
    alone = found.alone
    if trajectory_fallback and alone.any():
        episodes = _Comparison(values[:, :1], torch.zeros_like(sets[:, :1]), ~failed[:, None])
        found = found.where(alone, _against_others(values, alone, episodes, values[valid], *rule))
    advantages = found.advantages if weights is None else found.weighted(rewards, valid, gamma, weights)
    return _result(advantages, alone, valid, dtype)


def _check_scale(scale: Scale, rewards: torch.Tensor) -> None:
    if scale == "mean" and (rewards < 0).any():
        raise ValueError(
            f"scale_rewards='mean' divides by a mean and takes rewards of at least 0, got {rewards.min().item():.6g}. "
            "Shift the environment's rewards to 0 or above, or set scale_rewards='group' or 'none'."
        )


def _named(valid: torch.Tensor, anchors: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which turns are compared by their states, and the states: one without a name equals no other."""
    assert anchors is not None
    return valid & (anchors != 0), anchors


def _numbered(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Number the pairs of two tensors' entries: int64 of their shape, equal where the pairs are."""
    pairs = torch.stack([first, second], dim=-1).view(-1, 2)
    return pairs.unique(dim=0, return_inverse=True)[1].view(first.shape)


def _against_others(
    values: torch.Tensor,
    chosen: torch.Tensor,
    others: _Comparison,
    batch: torch.Tensor,
    group_size: int,
    scale: Scale,
    baseline: Baseline,
) -> _Compared:
    """Compare chosen turns, each with the values of its set that other members of its group have.

    Args:
        values: (B, K).
        chosen: (B, K) bool.
        others: What they are compared with: (B, K) by turn, or (B, 1) by episode.
        batch: The values whose deviation ``scale="batch"`` divides by.
        group_size: Rows of a group.
        scale: See :func:`group_advantages`.
        baseline: See :func:`group_advantages`.

    Returns:
        The result of each comparison, (B, K); 0 and False where not chosen.
    """
    rows, turns = chosen.nonzero(as_tuple=True)
    columns = torch.arange(others.values.size(1), device=rows.device)
    found = _Compared(*(torch.zeros_like(one) for one in (values, chosen, values, values)))
    at_once = max(1, 2**20 // (group_size * len(columns)))
    for row, turn in zip(rows.split(at_once), turns.split(at_once)):
        number, place = torch.arange(len(row), device=rows.device), turn.clamp(max=len(columns) - 1)
        group = (row // group_size * group_size)[:, None] + torch.arange(group_size, device=rows.device)
        own = (group == row[:, None])[:, :, None]
        itself = own & (columns == place[:, None, None])  # (turns, members, columns), as everything below
        alike = others.mask[group] & (others.sets[group] == others.sets[row, place][:, None, None])
        comparison = _Comparison(
            torch.where(itself, values[row, turn][:, None, None], others.values[group]),
            number[:, None, None].expand_as(itself),
            itself | (alike & ~own),
        )
        compared = comparison.compared(scale, baseline, batch)
        at = (number, row % group_size, place)
        for one in fields(_Compared):
            getattr(found, one.name)[row, turn] = getattr(compared, one.name)[at]
    return found


def _result(
    advantages: torch.Tensor, uncompared: torch.Tensor, valid: torch.Tensor, dtype: torch.dtype
) -> GroupAdvantages:
    share = uncompared.sum() / valid.sum().clamp(min=1)
    return GroupAdvantages(advantages.to(dtype), share.item())


def with_advantage(advantages: torch.Tensor, mask: torch.Tensor, eps: float) -> torch.Tensor:
    """Return which episodes have an advantage. Everything that leaves out, replaces or counts zero-advantage episodes and
    groups goes by this function.

    Args:
        advantages: (B, K).
        mask: (B, K) bool, turns that count.
        eps: Largest absolute advantage of a turn that counts as none.

    Returns:
        (B,) bool, True where the advantage of any turn is larger.
    """
    return ((advantages.abs() > eps) & mask).any(dim=1)


def zero_advantage_groups(advantages: torch.Tensor, mask: torch.Tensor, eps: float, group_size: int) -> torch.Tensor:
    """Return which groups have no episode with an advantage.

    Args:
        advantages: (B, K); rows ``i * group_size`` to ``(i + 1) * group_size`` are one group.
        mask: (B, K) bool, turns that count.
        eps: Largest absolute advantage of a turn that counts as none.
        group_size: Members of a group.

    Returns:
        (groups,) bool.
    """
    return ~with_advantage(advantages, mask, eps).view(-1, group_size).any(dim=1)


Centre = Callable[[torch.Tensor], torch.Tensor]
"""Maps a mean (0-d) to what is scaled, (B, K), such as advantages minus that mean."""


def whiten_each(
    advantages: torch.Tensor,
    mask: torch.Tensor,
    weights: torch.Tensor | None,
    sets: torch.Tensor,
    centre: Centre | None = None,
) -> torch.Tensor:
    """Apply :func:`whiten` within each set of episodes.

    Args:
        advantages: (B, K).
        mask: (B, K) bool.
        weights: (B, K), or None.
        sets: (B,) int64, the set each episode belongs to.
        centre: See :func:`whiten`.
    """
    whitened = torch.zeros_like(advantages, dtype=torch.float32)
    for one in sets.unique():
        chosen = mask & (sets == one)[:, None]
        whitened = torch.where(chosen, whiten(advantages, chosen, weights, centre), whitened)
    return whitened


def whiten(
    advantages: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor | None = None, centre: Centre | None = None
) -> torch.Tensor:
    """Shift and scale to mean 0 and standard deviation 1 over every (episode, turn) that the mask keeps.

    A spread below ``1e-6 * max(1, |mean|)`` gives exactly zero.

    Args:
        advantages: (B, K).
        mask: (B, K) bool.
        weights: (B, K) non-negative counts: how often each turn enters the statistics. Default: once.
        centre: Subtracts the mean from something else, which the deviation then scales. Default: from the advantages.

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
    centred = values - mean if centre is None else centre(mean)
    return torch.where(mask, centred / (std + 1e-8), 0.0).float()


def pool_over_turns(advantages: torch.Tensor, turn_mask: torch.Tensor) -> torch.Tensor:
    """Assign each turn the mean over its episode's turns, for a ratio that spans the whole episode.

    Args:
        advantages: (B, K).
        turn_mask: (B, K) bool.

    Returns:
        (B, K), 0 where no turn happened. Every turn counts once, independent of its length.
    """
    kept = torch.where(turn_mask, advantages, advantages.new_zeros(()))
    mean = kept.sum(dim=1, keepdim=True) / turn_mask.sum(dim=1, keepdim=True).clamp(min=1)
    return mean * turn_mask
