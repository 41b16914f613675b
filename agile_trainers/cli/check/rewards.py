"""Compares return and success of the episodes that ``agile-trainers check`` has played."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from agile_trainers.cli.check.plays import model_plays, policy_plays
from agile_trainers.cli.check.report import Report, Run
from agile_trainers.envs.agent import is_agent
from agile_trainers.evaluation.diagnosis import BY_NAME, Finding, returns_differ, unpaid
from agile_trainers.monitor.health_metrics import reward_success_correlation
from agile_trainers.rollout.metrics import episode_metrics, with_success
from agile_trainers.types import Trajectory

PAID = 0.5
"""Correlation of return and success in the first episodes from which there is no doubt that the reward pays for success."""
LIKELY = 2.0
"""Standard errors by which the correlation must lie below the diagnosis' bound for a warning."""
STARTS, ATTEMPTS, OF_MODEL = 16, 16, 4
"""Starts that are played again where the first episodes leave a doubt, and how often each is, by a policy and by a model."""
_FEWEST = 4
"""Episodes that must have succeeded, and that must not have."""


def check_rewards(report: Report, run: Run, scores: Mapping[str, Sequence[Trajectory]]) -> set[str]:
    """Report a reward that does not pay for success, and a success that says nothing.

    Where the first episodes leave a doubt, ``STARTS`` starts are played several times each, so that episodes of equal
    starts are compared, as in training. Nothing is said with reward functions, whose rewards are not known here.

    Args:
        report: Takes the findings.
        run: The run.
        scores: The episodes of each policy.

    Returns:
        The names of the findings.
    """
    pairs = [pair for episodes in scores.values() for pair in _pairs(episodes)]
    if run.reward_functions or len(pairs) < 2 * _FEWEST:
        return set()
    if all(success for _, success in pairs):
        return _doubt(report, [value for value, _ in pairs], certain=any(name != "expert" for name in scores))
    if not _mixed(pairs) or (_correlation(pairs, len(pairs)) or 0.0) >= PAID:
        return set()
    attempts = OF_MODEL if run.policy == "model" else ATTEMPTS
    more = [] if is_agent(run.factory) else _more(run, attempts)
    within = _correlation(more, attempts) if more and _mixed(more) else None
    told, degrees = (pairs, len(pairs) - 1) if within is None else (more, len(more) - STARTS)
    found = _correlation(pairs, len(pairs)) if within is None else within
    told_of = f"{len(told)} episodes{f' of {STARTS} starts' if told is more else ''}"
    won, lost = ([value for value, success in told if success is which] for which in (True, False))
    if found is None:  # every return is that of the others of its start
        found, error = 0.0, 0.0
        text = (
            f"The return is the same whether an episode succeeds or not, in {told_of}, of which {len(won)} succeeded."
        )
    else:
        error = (degrees - 2) ** -0.5  # of the inverse hyperbolic tangent, by Fisher
        text = (
            f"Return and success correlate by {found:.2f} in {told_of}: the {len(won)} that succeeded returned "
            f"{fmean(won):.3g} on average, the others {fmean(lost):.3g}."
        )
    if not unpaid(found, error, LIKELY):
        return set()
    serious = ["reward_misses_success"] if unpaid(found, error) else []
    report.diagnosis([_finding("reward_misses_success", text)], serious)
    return {"reward_misses_success"}


def _doubt(report: Report, returns: Sequence[float], *, certain: bool) -> set[str]:
    """Report episodes that all count as a success although their returns differ much."""
    low, high = min(returns), max(returns)
    if not returns_differ(low, high):  # a little may be for the number of turns
        return set()
    text = f"All {len(returns)} episodes count as a success, but their returns go from {low:.3g} to {high:.3g}."
    report.diagnosis([_finding("success_doubtful", text)], ["success_doubtful"] if certain else [])
    return {"success_doubtful"}


def _finding(name: str, text: str) -> Finding:
    return Finding(name, 0, text, BY_NAME[name].advice)


def _pairs(episodes: Sequence[Trajectory]) -> list[tuple[float, bool]]:
    """Return and success of each episode whose environment did not fail."""
    rows = with_success([episode_metrics(episode) for episode in episodes if not episode.stop_reason.failed])
    return [(row["return"], row["success"]) for row in rows if row["success"] is not None]


def _mixed(pairs: Sequence[tuple[float, bool]]) -> bool:
    won = sum(success for _, success in pairs)
    return min(won, len(pairs) - won) >= _FEWEST


def _correlation(pairs: Sequence[tuple[float, bool]], group_size: int) -> float | None:
    values, successes = zip(*pairs)
    return reward_success_correlation(values, successes, group_size)


def _more(run: Run, attempts: int) -> list[tuple[float, bool]]:
    """Play ``STARTS`` starts several times each; nothing if an episode fails, since groups would not be whole."""
    again = replace(run, episodes=STARTS)
    played = model_plays(again, attempts) if run.policy == "model" else policy_plays(again, run.policy, attempts)
    pairs = _pairs(played)
    return pairs if len(pairs) == len(played) else []
