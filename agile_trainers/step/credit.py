"""Assigns credit to the turns of a generation batch: applies the credit rule, normalizes advantages."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator

from agile_trainers.objectives.advantages import pool_over_turns, whiten, with_advantage, zero_advantage_groups
from agile_trainers.objectives.segments import turn_lengths
from agile_trainers.train_batch import gather_rows
from agile_trainers.types import TurnBatch

TARGETS = "value_targets"
"""Name of the column that a credit rule with a critic returns: (B, K), the targets of V(s_k)."""
LARGEST_CREDIT = torch.finfo(torch.float32).max ** 0.5
"""Largest advantage, and largest target of a critic, that can be trained on."""


class TurnWeights(NamedTuple):
    """Weights (B, K) of turns that an earlier policy played, with ``drift_correction="decision_truncate"``."""

    rewards: torch.Tensor
    """Weights of rewards; see :func:`~agile_trainers.objectives.drift.decision_weights`."""
    ratios: torch.Tensor
    """Ratios of single answers; see :func:`~agile_trainers.objectives.drift.turn_ratios`."""

    def rows(self, index: torch.Tensor) -> TurnWeights:
        """Select some episodes."""
        return TurnWeights(self.rewards[index], self.ratios[index])


@dataclass
class CreditInputs:
    """The input of a credit rule: the turns of *all* processes, with the rows of a group side by side."""

    rewards: torch.Tensor
    """(B, K) float32."""
    mask: torch.Tensor
    """(B, K) bool, turns that happened in episodes that did not fail. Every statistic is over these."""
    failed: torch.Tensor
    """(B,) bool."""
    lengths: torch.Tensor
    """(B, K) int64, action tokens."""
    anchors: torch.Tensor
    """(B, K) int64, the environment's name of the state that each turn started from; 0 without a name."""
    environments: torch.Tensor
    """(B,) int64, the environment of each row; 0 in a run of one."""
    linear: torch.Tensor | None = None
    """(B,) bool, False for episodes whose turns do not correspond to another's by index: some were on the side or at once.
    None: all are True."""
    following: torch.Tensor | None = None
    """(B, K) int64, the next turn on the same path; K if there is none. None: each episode is one path."""
    rewarded: torch.Tensor | None = None
    """(B, K) int64, number of turns whose reward was given before each was asked for. None: all before it."""
    values: torch.Tensor | None = None
    """(B, K), V(s_k) of the critic; None without one."""
    final_values: torch.Tensor | None = None
    """(B,), V of the final state of an episode cut short, with ``bootstrap_at_limits``; 0 of the others; None without a
    critic."""
    weights: torch.Tensor | None = None
    """(B, K), weight of each turn's reward in episodes that an earlier policy played, with
    ``drift_correction="decision_truncate"``; see :func:`~agile_trainers.objectives.returns.gae`. A rule that applies them
    declares ``weighs_decisions``. None: all are 1."""
    ratios: torch.Tensor | None = None
    """(B, K), the ratio of each turn's answer alone, with ``weights``; see
    :func:`~agile_trainers.objectives.returns.vtrace_targets`."""
    demonstrations: torch.Tensor | None = None
    """(B,) bool, the episodes of an expert. A rule is applied twice: to all episodes, for the advantages of these, and to
    the policy's own, with these as if they had failed. None: there are none."""

    def own(self) -> CreditInputs:
        """Return the same with the policy's own episodes alone."""
        if self.demonstrations is None:
            return self
        mask = self.mask & ~self.demonstrations[:, None]
        return replace(self, mask=mask, failed=self.failed | self.demonstrations, demonstrations=None)


@dataclass
class Credit:
    """The output of a credit rule."""

    advantages: torch.Tensor
    """(B, K), of all processes."""
    metrics: dict[str, float] = field(default_factory=dict)
    columns: dict[str, torch.Tensor] = field(default_factory=dict)
    """(B, K) each, of all processes: further columns that the loss reads, by name."""

    def local(self, rows: slice, turns: int) -> Credit:
        """Select the rows of one process.

        Args:
            rows: Its rows.
            turns: Turns of its longest episode.
        """
        columns = {name: column[rows, :turns] for name, column in self.columns.items()}
        return replace(self, advantages=self.advantages[rows, :turns], columns=columns)


@dataclass
class Judged:
    """The credit of a generation batch, of all processes, before anything is normalized."""

    turns: CreditInputs
    """The policy's own: an expert's count as failed."""
    credit: Credit
    zero: torch.Tensor
    """(groups,) bool, zero-advantage groups; without groups, each episode is one."""
    demonstrated: torch.Tensor | None = None
    """(B, K), advantages of an expert's turns beside all, at least 0; 0 elsewhere. None without an expert."""


class CreditAssignment:
    """Assigns credit by the rule of an algorithm and the options that act on every rule.

    Args:
        rule: The algorithm's ``assign_credit``.
        args: A ``MultiTurnConfig``.
        accelerator: The trainer's. Every statistic is over all processes.
    """

    def __init__(self, rule: Callable[[CreditInputs], Credit], args: Any, accelerator: Accelerator) -> None:
        self._rule, self._args, self._accelerator = rule, args, accelerator

    def judge(
        self,
        batch: TurnBatch,
        values: torch.Tensor | None = None,
        final_values: torch.Tensor | None = None,
        weights: TurnWeights | None = None,
    ) -> Judged:
        """Apply the credit rule.

        Args:
            batch: The episodes of this process, before TRL shuffles rows.
            values: (B, K), of a critic.
            final_values: (B,), of a critic.
            weights: Of episodes of an earlier policy.
        """
        turns = gather_turns(batch, self._accelerator, values, final_values, weights)
        credit, args, demonstrated = self._rule(turns.own()), self._args, None
        advantages = credit.advantages
        if turns.demonstrations is not None:
            whole, there = self._rule(turns), turns.mask & turns.demonstrations[:, None]
            demonstrated = torch.where(there, whole.advantages.clamp(min=0.0), 0.0)
            advantages = advantages + demonstrated
            columns = {n: torch.where(there, whole.columns[n], column) for n, column in credit.columns.items()}
            credit = replace(credit, columns=columns)
        # Before whitening, which moves an advantage of 0 by the batch's mean.
        zero = zero_advantage_groups(advantages, turns.mask, args.zero_advantage_eps, args.num_generations)
        return Judged(turns.own(), credit, zero, demonstrated)

    def finish(self, judged: Judged) -> Credit:
        """Whiten, clip and pool advantages, as the options say.

        Args:
            judged: Of :meth:`judge`, for the final rewards of the turns.

        Returns:
            The credit of all processes, with the metrics.

        Raises:
            ValueError: On every process, if a turn's reward is infinite (the environment's with those of reward functions),
                or rewards are so large that the loss or its gradient would overflow.
        """
        turns = judged.turns
        credit = normalize(judged.credit, turns.mask, self._args)
        credit.metrics |= credit_by_turn(turns.rewards, credit.advantages, turns.mask)
        if judged.demonstrated is not None:
            bound = self._args.advantage_clip_range
            credit.advantages = credit.advantages + (
                judged.demonstrated if bound is None else judged.demonstrated.clamp(max=bound)
            )
        sizes = {"rewards": turns.rewards, "advantages": credit.advantages}
        sizes |= {TARGETS: credit.columns[TARGETS]} if TARGETS in credit.columns else {}  # others are a rule's own
        largest = [values.abs().amax().double() for values in sizes.values()]
        zero, *found = torch.stack([judged.zero.double().mean(), *largest]).tolist()  # one wait for the GPU
        if not self._args.groupless:
            credit.metrics["zero_advantage_groups"] = zero
        _check_sizes(dict(zip(sizes, found, strict=True)))
        return credit


def _check_sizes(largest: dict[str, float]) -> None:
    rewards = largest.pop("rewards")
    if rewards == math.inf:
        raise ValueError(
            "The reward of a turn, with what reward functions add to an episode's last turn, exceeds 3.4e+38 (float32). "
            "Let the environment or the functions return less."
        )
    for name, value in largest.items():
        if value > LARGEST_CREDIT:
            raise ValueError(
                f"Rewards are too large: those of turns reach {rewards:.3g} and {name} {value:.3g}, "
                f"beyond {LARGEST_CREDIT:.2g}, whose square leaves float32: the loss or the norm of its gradient would be "
                "infinite. Divide the rewards."
            )


def own_turns(
    batch: TurnBatch,
    values: torch.Tensor | None = None,
    final_values: torch.Tensor | None = None,
    weights: TurnWeights | None = None,
) -> CreditInputs:
    """Make the input of a credit rule from the turns of this process alone.

    Args:
        batch: Its episodes.
        values: (B, K), of a critic.
        final_values: (B,), of a critic.
        weights: Of episodes of an earlier policy.
    """
    lengths = turn_lengths(batch.turn_ids, batch.turn_mask.size(1))
    mask = batch.turn_mask & ~batch.failed[:, None]
    inputs = CreditInputs(batch.turn_rewards, mask, batch.failed, lengths, batch.anchors, batch.environments)
    inputs.values, inputs.final_values, inputs.demonstrations = values, final_values, batch.demonstrations
    if weights is not None:
        inputs.weights, inputs.ratios = weights
    if batch.path_ids is not None:
        inputs.linear, inputs.following, inputs.rewarded = batch.linear, batch.following, batch.rewarded
    return inputs


def gather_turns(
    batch: TurnBatch,
    accelerator: Accelerator,
    values: torch.Tensor | None = None,
    final_values: torch.Tensor | None = None,
    weights: TurnWeights | None = None,
) -> CreditInputs:
    """Gather the turns of all processes, before TRL shuffles rows.

    Args:
        batch: The episodes of this process.
        accelerator: The trainer's.
        values: (B, K), of a critic.
        final_values: (B,), of a critic.
        weights: Of episodes of an earlier policy.
    """
    own, last = own_turns(batch, values, final_values, weights), batch.turn_mask.size(1)
    own.mask, own.linear, own.rewarded = own.mask.long(), batch.linear, batch.rewarded
    # "None" is K of this process until the processes agree on one K; -1 stands for it meanwhile.
    own.following = torch.where(batch.following < last, batch.following, -1)
    # All processes must gather the same, though only some may have an episode of several paths, or an expert's.
    shown = torch.zeros_like(batch.failed) if batch.demonstrations is None else batch.demonstrations
    several, own.demonstrations = torch.full_like(batch.failed, batch.path_ids is not None), None
    names = [one.name for one in fields(own) if getattr(own, one.name) is not None]
    *found, several, shown = gather_rows(accelerator, *(getattr(own, name) for name in names), several, shown)
    inputs = CreditInputs(**dict(zip(names, found, strict=True)))
    inputs.mask = inputs.mask.bool()
    paths, experts = torch.stack([several, shown]).any(dim=1).tolist()
    inputs.demonstrations = shown if experts else None
    if paths:
        assert inputs.following is not None
        inputs.following = torch.where(inputs.following < 0, inputs.rewards.size(1), inputs.following)
    else:
        inputs.linear = inputs.following = inputs.rewarded = None
    return inputs


def normalize(credit: Credit, mask: torch.Tensor, args: Any) -> Credit:
    """Whiten, clip and pool advantages as the options say, and add their metrics.

    Args:
        credit: The output of a credit rule.
        mask: (B, K) bool, turns that count.
        args: A ``MultiTurnConfig``.
    """
    advantages, metrics = credit.advantages, dict(credit.metrics)
    live = with_advantage(advantages, mask, args.zero_advantage_eps)[mask.any(dim=1)].float()
    metrics["advantage/zero"] = 1.0 - live.mean().item() if live.numel() else 1.0
    if args.whiten_advantages:
        advantages = whiten(advantages, mask)
    if args.advantage_clip_range is not None:
        bound = args.advantage_clip_range
        metrics["advantage/clipped"] = (advantages[mask].abs() > bound).float().mean().item()
        advantages = advantages.clamp(-bound, bound)
    if args.importance_sampling_level == "sequence":
        # A ratio of the whole sequence is clipped once, by the sign of one advantage.
        advantages = pool_over_turns(advantages, mask)
    kept = advantages[mask]
    metrics["advantage/mean"] = kept.mean().item() if kept.numel() else 0.0
    metrics["advantage/std"] = kept.std().item() if kept.numel() > 1 else 0.0
    return replace(credit, advantages=advantages, metrics=metrics)


FIRST = 8
"""Number of turn indices with metrics of their own; those of later turns are pooled under ``turn/9+/``."""


def credit_by_turn(rewards: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """Compute the mean reward and advantage of each turn index.

    Args:
        rewards: (B, K), those that credit is computed from.
        advantages: (B, K), those that enter the loss.
        mask: (B, K) bool, turns that happened in episodes that did not fail.

    Returns:
        ``turn/1/reward``, ``turn/1/advantage``, ``turn/2/...``, of the indices that an episode reached.
    """
    index = torch.arange(mask.size(1), device=mask.device).expand_as(mask)
    return _means("reward", *_sums(rewards, index, mask)) | _means("advantage", *_sums(advantages, index, mask))


class TurnMeans:
    """Collects a value of the tokens of each turn index over the micro-batches of an optimizer step.

    Args:
        name: Name of the metric.
        overall: Name of the mean over all turns. Default: it is not logged.
    """

    def __init__(self, name: str, overall: str | None = None) -> None:
        self._name, self._overall = name, overall
        self._totals: torch.Tensor | None = None

    def add(self, values: torch.Tensor, turn_ids: torch.Tensor, mask: torch.Tensor) -> None:
        """Add a micro-batch.

        Args:
            values: (B, T).
            turn_ids: (B, T) int64, -1 outside of turns.
            mask: (B, T) bool, the tokens that count.
        """
        new = torch.stack(_sums(values.detach(), turn_ids, mask & (turn_ids >= 0)))
        self._totals = new if self._totals is None else self._totals + new

    def remember(self) -> Callable[[], None]:
        """Return a function that drops the micro-batches that are added after this call."""
        return partial(setattr, self, "_totals", self._totals)

    def close(self, accelerator: Accelerator) -> dict[str, float]:
        """Return the mean of each turn index, ``turn/1/entropy`` for example, over all processes, and forget it."""
        totals = self._totals if self._totals is not None else torch.zeros(2, FIRST + 1, device=accelerator.device)
        self._totals = None
        sums, counts = accelerator.reduce(totals, reduction="sum")
        found = _means(self._name, sums, counts)
        if self._overall is not None and found:
            found[self._overall] = (sums.sum() / counts.sum()).item()
        return found


def _sums(values: torch.Tensor, index: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sum and number of the values of each turn index, (FIRST + 1,) each."""
    slots = index[mask].clamp(max=FIRST)  # the last slot pools the later turns
    empty = torch.zeros(FIRST + 1, device=values.device)
    kept = values[mask].float()
    return empty.index_add(0, slots, kept), empty.index_add(0, slots, torch.ones_like(kept))


def _means(name: str, sums: torch.Tensor, counts: torch.Tensor) -> dict[str, float]:
    titles = [*map(str, range(1, FIRST + 1)), f"{FIRST + 1}+"]
    found = zip(titles, *torch.stack([sums, counts]).tolist(), strict=True)
    return {f"turn/{title}/{name}": total / count for title, total, count in found if count}
