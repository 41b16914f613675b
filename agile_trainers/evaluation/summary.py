"""Summarizes the episodes of one policy: success, return and pass@k with intervals, turns and stop reasons."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from agile_trainers.evaluation.results import EpisodeResults
from agile_trainers.evaluation.statistics import (
    bootstrap_interval,
    effective_trials,
    pass_at_k,
    wilson_interval,
)
from agile_trainers.types import StopReason


@dataclass(frozen=True)
class Estimate:
    """A mean over episodes, with its 95 % confidence interval."""

    value: float
    low: float
    high: float
    episodes: int
    """Number of episodes that it is the mean of."""


@dataclass(frozen=True)
class PolicySummary:
    """The results of one policy. Means are over the episodes whose environment did not fail."""

    episodes: int
    """Number of episodes that were played."""
    failed: int
    """Number of those whose environment failed."""
    units: int
    """Number of independent units that the other episodes form; see :meth:`EpisodeStart.unit`."""
    greedy: bool
    success: Estimate | None
    """Share of successes with Wilson's interval, over the episodes that report it; None if none does."""
    episode_return: Estimate | None
    """Mean return with its bootstrap interval; None if every environment failed."""
    turns: float | None
    """Mean number of turns."""
    action_tokens: float | None
    """Mean number of sampled tokens of an episode."""
    stop_reasons: dict[str, int]
    """Number of episodes, failed ones included, by the reason why they ended; the most frequent first."""
    pass_at_k: dict[int, Estimate]
    """Unbiased pass@k for k = 1, 2, 4, ... and the number of attempts; empty with one attempt."""

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as JSON-ready data."""
        values = asdict(self)
        values["pass_at_k"] = {str(k): value for k, value in values["pass_at_k"].items()}
        return values


def summarize_policy(results: EpisodeResults) -> PolicySummary:
    """Summarize the episodes of one policy."""
    sound = [index for index, row in enumerate(results.rows) if not StopReason(row["stop_reason"]).failed]
    rows, units = [results.rows[index] for index in sound], [results.units[index] for index in sound]
    reported = [index for index, row in enumerate(rows) if row["success"] is not None]
    successes, of = [float(rows[index]["success"]) for index in reported], [units[index] for index in reported]
    reasons = [row["stop_reason"] for row in results.rows]
    return PolicySummary(
        episodes=len(results.rows),
        failed=len(results.rows) - len(sound),
        units=len(set(units)),
        greedy=results.greedy,
        success=_share(successes, of),
        episode_return=_mean([row["return"] for row in rows], units),
        turns=fmean(row["turns"] for row in rows) if rows else None,
        action_tokens=fmean(row["action_tokens"] for row in rows) if rows else None,
        stop_reasons={name: reasons.count(name) for name in sorted(set(reasons), key=lambda one: -reasons.count(one))},
        pass_at_k=_pass_at_k(results),
    )


def _share(successes: Sequence[float], units: Sequence[Hashable]) -> Estimate | None:
    if not successes:
        return None
    share, trials = fmean(successes), effective_trials(successes, units)
    return Estimate(share, *wilson_interval(share * trials, trials), len(successes))


def _mean(values: Sequence[float], units: Sequence[Hashable]) -> Estimate | None:
    return Estimate(fmean(values), *bootstrap_interval(values, units), len(values)) if values else None


def _pass_at_k(results: EpisodeResults) -> dict[int, Estimate]:
    """Estimate pass@k over the starts whose attempts all report success or failure."""
    attempts: dict[Hashable, list[bool | None]] = defaultdict(list)
    units: dict[Hashable, Hashable] = {}
    for start, row, unit in zip(results.starts, results.rows, results.units, strict=True):
        key = (start.environment, start.seed, start.row)
        attempts[key].append(row["success"])
        units[key] = unit
    counted = {key: [bool(one) for one in played] for key, played in attempts.items() if None not in played}
    most = max(map(len, counted.values()), default=1)
    if most == 1:
        return {}
    estimates = {}
    for k in sorted({1, most, *(2**power for power in range(most.bit_length()) if 2**power <= most)}):
        keys = [key for key, played in counted.items() if len(played) >= k]
        values = [pass_at_k(len(counted[key]), sum(counted[key]), k) for key in keys]
        estimates[k] = Estimate(fmean(values), *bootstrap_interval(values, [units[key] for key in keys]), len(values))
    return estimates
