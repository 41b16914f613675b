"""Summarizes the episodes of one policy: success, return and pass@k with intervals, turns and stop reasons."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from agile_trainers.evaluation.failures import failed_value
from agile_trainers.evaluation.results import EpisodeResults, reported_together
from agile_trainers.evaluation.statistics import mean_interval, pass_at_k, refusal
from agile_trainers.rollout.metrics import environments_with_success
from agile_trainers.types import StopReason


@dataclass(frozen=True)
class Estimate:
    """A mean over episodes, with its 95 % confidence interval."""

    value: float
    low: float | None
    """Lower bound; None if the episodes allow no interval."""
    high: float | None
    """Upper bound."""
    episodes: int
    """Number of episodes that it is the mean of."""
    refusal: str | None = None
    """Reason for which there is no interval, as a sentence."""


@dataclass(frozen=True)
class PolicySummary:
    """The results of one policy.

    Episodes whose environment failed count against it: as unsuccessful, and with the lowest return (see
    :func:`~agile_trainers.evaluation.failures.failed_value`). Turns and tokens are means over the others.
    """

    episodes: int
    """Number of episodes that were played."""
    failed: int
    """Number of those whose environment failed."""
    unreported: int
    """Number of episodes that report no success although others do; they count as unsuccessful."""
    units: int
    """Number of independent units that the episodes form; see :func:`~agile_trainers.evaluation.results.units_of`."""
    information_differs: bool
    """True in greedy play if equal games began with different information of ``reset`` (a seed, an id or the time in it)."""
    greedy: bool
    success: Estimate | None
    """Share of successes, with Wilson's interval if each episode is a unit; None if no episode reports it."""
    episode_return: Estimate | None
    """Mean return; None if every environment failed."""
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
    (results,) = reported_together([results])
    rows = [row for row in results.rows if not StopReason(row["stop_reason"]).failed]
    units, returns = results.units, results.values("return")
    limits = results.limits("return")
    lowest = failed_value([one for one in returns if one is not None], limits)
    # Of several environments, one may report success and another not.
    reporting = environments_with_success(results.rows)
    counted = [index for index, row in enumerate(results.rows) if row["environment"] in reporting]
    successes = [results.values("success")[index] or 0.0 for index in counted]
    reasons = [row["stop_reason"] for row in results.rows]
    return PolicySummary(
        episodes=len(results.rows),
        failed=len(results.rows) - len(rows),
        unreported=sum(not row.get("success_reported", True) for row in rows),
        units=len(set(units)),
        information_differs=results.greedy and _differing(results),
        greedy=results.greedy,
        success=_mean(successes, [units[index] for index in counted]),
        episode_return=_mean([lowest if one is None else one for one in returns], units, limits) if rows else None,
        turns=fmean(row["turns"] for row in rows) if rows else None,
        action_tokens=fmean(row["action_tokens"] for row in rows) if rows else None,
        stop_reasons={name: reasons.count(name) for name in sorted(set(reasons), key=lambda one: -reasons.count(one))},
        pass_at_k=_pass_at_k(results),
    )


def _differing(results: EpisodeResults) -> bool:
    """Return True if equal prompts began with different information."""
    seen: dict[Hashable, set[str]] = defaultdict(set)
    for start in results.starts:
        seen[start.environment, start.prompt].add(start.information)
    return any(len(found) > 1 for found in seen.values())


def _mean(
    values: Sequence[float], units: Sequence[Hashable], limits: tuple[float, float] | None = (0.0, 1.0)
) -> Estimate | None:
    if not values:
        return None
    low, high = mean_interval(values, units, limits) or (None, None)
    return Estimate(fmean(values), low, high, len(values), refusal(values, units, limits))


def _pass_at_k(results: EpisodeResults) -> dict[int, Estimate]:
    """Estimate pass@k over the starts; an attempt whose environment failed is no success."""
    reporting = environments_with_success(results.rows)
    attempts: dict[Hashable, list[bool]] = defaultdict(list)
    units: dict[Hashable, Hashable] = {}
    for start, row, unit in zip(results.starts, results.rows, results.units, strict=True):
        if start.environment in reporting:
            attempts[start.key].append(bool(row["success"]))
            units[start.key] = unit
    most = max(map(len, attempts.values()), default=1)
    if most == 1:
        return {}
    estimates = {}
    for k in sorted({1, most, *(2**power for power in range(most.bit_length()) if 2**power <= most)}):
        keys = [key for key, played in attempts.items() if len(played) >= k]
        values = [pass_at_k(len(attempts[key]), sum(attempts[key]), k) for key in keys]
        estimate = _mean(values, [units[key] for key in keys])
        assert estimate is not None
        estimates[k] = estimate
    return estimates
