"""Computes the metrics of training and evaluation."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from math import isnan
from statistics import fmean, stdev
from typing import Any

from transformers.trainer_utils import speed_metrics

from agile_trainers.evaluation.results import EpisodeResults, Range, counted_mean, evaluation_metrics
from agile_trainers.rollout.metrics import summarize
from agile_trainers.types import StopReason


def training_summary(
    rows: Sequence[dict[str, Any]],
    seconds: float,
    discarded: Sequence[dict[str, Any]] = (),
    known: Collection[str | None] = (),
) -> dict[str, float]:
    """Compute the metrics of one generation batch.

    Args:
        rows: One row per episode, of all ranks.
        seconds: Wall time of the rollout on the slowest rank; 0 for episodes that were played before.
        discarded: Rows of episodes that were played in this time and are not part of the batch.
        known: Names of environments that are known to report success.

    Returns:
        The metrics of :func:`~agile_trainers.rollout.metrics.summarize` and of :func:`length_summary`, ``time/rollout``,
        ``rollout_tokens_per_second``; ``return/answers_cut``, the mean return of episodes with a cut answer; of episodes of
        several turns ``return/early_std``, the spread of what they earned before the last, and ``observations_empty``, the
        share of the observations between two answers that say nothing.
    """
    tokens = sum(row["action_tokens"] for row in [*rows, *discarded])
    speed = {"time/rollout": seconds, "rollout_tokens_per_second": tokens / seconds} if seconds else {}
    return {**summarize(rows, known), **length_summary(rows), **_cut_returns(rows), **_between_turns(rows), **speed}


def _between_turns(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    several = [row for row in rows if row["turns"] > 1 and not StopReason(row["stop_reason"]).failed]
    if len(several) < 2:
        return {}
    answered = sum(row["turns"] - 1 for row in several)
    return {
        "return/early_std": stdev(row["early_return"] for row in several),
        "observations_empty": sum(row["observations_empty"] for row in several) / answered,
    }


def _cut_returns(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    cut = [row["return"] for row in rows if row["answers_cut"] and not StopReason(row["stop_reason"]).failed]
    return {"return/answers_cut": fmean(cut)} if cut else {}


def length_summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Compute the lengths of episodes in action tokens, under TRL's names.

    Args:
        rows: One row per episode, of all ranks.

    Returns:
        ``completions/mean_length|min_length|max_length``; ``completions/clipped_ratio``, the share of episodes that a limit
        cut short (of turns, of the conversation, of the environment, or of tokens in the last answer); and
        ``completions/mean_terminated_length|min_terminated_length|max_terminated_length`` of the others, 0 without any.
    """
    metrics = {}
    for kind, counted in (("", rows), ("terminated_", [row for row in rows if not row["clipped"]])):
        lengths = [float(row["action_tokens"]) for row in counted] or [0.0]
        for name, value in (("mean", fmean(lengths)), ("min", min(lengths)), ("max", max(lengths))):
            metrics[f"completions/{name}_{kind}length"] = value
    return metrics | {"completions/clipped_ratio": sum(row["clipped"] for row in rows) / len(rows)}


def evaluation_summary(
    results: EpisodeResults,
    rewarded: Sequence[float],
    scores: dict[str, float],
    prefix: str,
    started: float,
    *,
    only_return: bool,
) -> dict[str, float]:
    """Compute the metrics of one evaluation, as :meth:`MultiTurnTrainer.evaluate` returns them.

    Failed episodes count against the policy (see :func:`~agile_trainers.evaluation.results.evaluation_metrics`), also in
    ``reward``, the weighted sum of all reward functions.

    Args:
        results: The episodes, of all ranks.
        rewarded: The weighted sum of all reward functions for each of them; NaN without a reward.
        scores: Metrics of their rewards.
        prefix: Put before every name.
        started: ``time.time()`` at its start.
        only_return: True if the return is the only reward, whose lowest value an environment may declare.
    """
    rows, ranges = results.rows, results.ranges
    declared = ranges if only_return else {}
    mean, error = counted_mean(rewarded, rows, declared)
    scores = {**scores, "reward": mean, "reward_sem": error}
    metrics = _evaluated(rows, ranges, scores | length_summary(rows), prefix)
    for name, (own, reward) in _by_environment(rows, rewarded, declared).items():
        metrics |= _evaluated(own, ranges, length_summary(own) | reward, f"{prefix}_{name}")
    metrics |= speed_metrics(prefix, started, num_samples=len(rows))
    # One string for all evaluations, which `Trainer` keeps until the end.
    return {sys.intern(name): value for name, value in metrics.items()}


def _evaluated(
    rows: Sequence[dict[str, Any]], ranges: Mapping[str | None, Range], others: dict[str, float], prefix: str
) -> dict[str, float]:
    summary = others | evaluation_metrics(rows, ranges)
    return {f"{prefix}_{name}": value for name, value in summary.items()}


def environment_summaries(
    rows: Sequence[dict[str, Any]], rewards: Sequence[float], known: Collection[str | None] = ()
) -> dict[str, float]:
    """Compute the metrics of each of several environments in one generation batch; empty in a run of one.

    Args:
        rows: One row per episode, of all ranks.
        rewards: The weighted sum of all reward functions for each of them; NaN without a reward.
        known: Names of environments that are known to report success.

    Returns:
        Under ``environments/<name>/``: the metrics of :func:`~agile_trainers.rollout.metrics.summarize`, ``reward`` and
        ``share`` (of the batch's episodes).
    """
    metrics: dict[str, float] = {}
    for name, (own, reward) in _by_environment(rows, rewards).items():
        summary = {**summarize(own, known), **reward, "share": len(own) / len(rows)}
        metrics |= {f"environments/{name}/{metric}": value for metric, value in summary.items()}
    return metrics


def _by_environment(
    rows: Sequence[dict[str, Any]], rewards: Sequence[float], ranges: Mapping[str | None, Range] | None = None
) -> dict[str, tuple[list[dict[str, Any]], dict[str, float]]]:
    """Split the rows by environment, in order of name, with the mean ``reward`` if an episode has one.

    With ``ranges``, failed episodes count in it.
    """
    found = {}
    for name in sorted({row["environment"] for row in rows} - {None}):
        own = [(row, reward) for row, reward in zip(rows, rewards, strict=True) if row["environment"] == name]
        known = [reward for _, reward in own if not isnan(reward)]
        mean = fmean(known) if known else 0.0
        if ranges is not None:
            mean, _ = counted_mean([reward for _, reward in own], [row for row, _ in own], ranges)
        found[name] = [row for row, _ in own], {"reward": mean} if known else {}
    return found
