"""Computes the metrics of training and evaluation."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b
from math import isnan
from statistics import fmean, stdev
from typing import Any

from transformers.trainer_utils import speed_metrics

from agile_trainers.evaluation.results import EpisodeResults, Range, counted_mean
from agile_trainers.records.plain import content_digest
from agile_trainers.rollout.metrics import summarize
from agile_trainers.types import StopReason, Trajectory


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
    rows, of_environments = results.rows, results.by_environment
    declared = results.ranges if only_return else {}
    mean, error = counted_mean(rewarded, rows, declared, results.units)
    found = {prefix: scores | {"reward": mean, "reward_sem": error} | length_summary(rows) | results.metrics}
    for name, (own, reward) in _by_environment(rows, rewarded, declared).items():
        found[f"{prefix}_{name}"] = length_summary(own) | reward | of_environments[name]
    metrics = {f"{start}_{name}": value for start, summary in found.items() for name, value in summary.items()}
    metrics |= speed_metrics(prefix, started, num_samples=len(rows))
    # One string for all evaluations, which `Trainer` keeps until the end.
    return {sys.intern(name): value for name, value in metrics.items()}


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


def reward_success_correlation(
    rewards: Sequence[float], successes: Sequence[bool | None], group_size: int
) -> float | None:
    """Compute the correlation of reward and success among episodes that are compared with each other.

    Reward and success are taken as differences from their means over the group. Groups whose episodes all succeeded, or all
    failed, say nothing and are left out.

    Args:
        rewards: Of each episode, members of a group side by side; NaN leaves the episode out.
        successes: Of each episode; None leaves it out.
        group_size: Members of a group.

    Returns:
        Pearson's coefficient, -1 to 1; None without a group in which both differ.
    """
    products = squares = ones = 0.0
    for first in range(0, len(rewards), group_size):
        pairs = [
            (reward, float(success))
            for reward, success in zip(rewards[first : first + group_size], successes[first : first + group_size])
            if success is not None and not isnan(reward)
        ]
        if len({success for _, success in pairs}) < 2:
            continue
        mean, share = (fmean(column) for column in zip(*pairs))
        products += sum((reward - mean) * (success - share) for reward, success in pairs)
        squares += sum((reward - mean) ** 2 for reward, _ in pairs)
        ones += sum((success - share) ** 2 for _, success in pairs)
    return products / (squares * ones) ** 0.5 if squares > 1e-12 else None


def success_sem(successes: Sequence[bool | None], members: int) -> float | None:
    """Compute the standard error of a batch's success from the spread of its groups, whose tasks may differ in difficulty.

    Args:
        successes: Of each episode, members of a group side by side; None leaves it out.
        members: Episodes of a group.

    Returns:
        None with fewer than two groups.
    """
    groups = [successes[first : first + members] for first in range(0, len(successes), members)]
    means = [fmean(known) for group in groups if (known := [success for success in group if success is not None])]
    return stdev(means) / len(means) ** 0.5 if len(means) > 1 else None


def groups_without_success(successes: Sequence[bool | None], members: int) -> float | None:
    """Compute the share of groups in which no member succeeded: of starts that the policy no longer, or not yet, solves.

    Where rewards are equal too, these groups have no gradient. A run that stands still below its best success has a constant
    share of them, and nearly no others that fail.

    Args:
        successes: Of each episode, members of a group side by side; None leaves it out.
        members: Episodes of a group.

    Returns:
        None without groups, or where no success is known.
    """
    groups = [successes[first : first + members] for first in range(0, len(successes), members)]
    known = [group for group in groups if any(success is not None for success in group)]
    return fmean(not any(group) for group in known) if known and members > 1 else None


def task_of(trajectory: Trajectory) -> str | None:
    """Return a hash of what an episode was started as: environment, dataset row, ``info`` of reset and first prompt.

    None without a dataset row (seeds are the tasks then), or if the environment failed at reset.
    """
    if not trajectory.options or not trajectory.prompt:
        return None
    start = (trajectory.environment_name, trajectory.options, trajectory.reset_info, trajectory.prompt)
    return content_digest(start, trajectory.seed)


def outcomes_of(trajectory: Trajectory) -> list[tuple[str, str]]:
    """Return hashes of what was said up to each answer, and of what the environment made of it; those of the prompt first.

    Empty with a dataset row, for an agent, or if the environment failed.
    """
    if trajectory.options or not trajectory.prompt or not trajectory.linear or trajectory.stop_reason.failed:
        return []
    said = blake2b(repr((trajectory.environment_name, trajectory.prompt)).encode(), digest_size=16)
    found = [(said.hexdigest(), "")]
    for turn in trajectory.turns:
        said.update(repr(turn.text).encode())
        told = repr((turn.reward, turn.observation)).encode()
        found.append((said.hexdigest(), blake2b(told, digest_size=8).hexdigest()))
    return found


def seeds_alike(episodes: Sequence[Sequence[tuple[str, str]]], members: int) -> float | None:
    """Compare episodes of different seeds: whether the same answers always had the same results.

    A secret that the prompt does not show would give equal answers different results.

    Args:
        episodes: The :func:`outcomes_of` each episode, members of a group side by side.
        members: Episodes of the same seed.

    Returns:
        1.0 if all begin with one prompt, no answer had two results, and most first answers were given in several groups;
        None without two groups.
    """
    results: dict[str, set[str]] = {}
    firsts: dict[str, set[int]] = {}
    for index, episode in enumerate(episodes):
        for key, told in episode:
            results.setdefault(key, set()).add(told)
        if len(episode) > 1:
            firsts.setdefault(episode[1][0], set()).add(index // members)
    if len({group for groups in firsts.values() for group in groups}) < 2:
        return None
    shared = [len(firsts[episode[1][0]]) > 1 for episode in episodes if len(episode) > 1]
    one_prompt = len({episode[0][0] for episode in episodes if episode}) == 1
    return float(one_prompt and 2 * sum(shared) >= len(shared) and all(len(told) == 1 for told in results.values()))


def health_metrics(
    rows: Sequence[dict[str, Any]], rewards: Sequence[float], tasks: Sequence[str | None], group_size: int, members: int
) -> dict[str, float]:
    """Compute the metrics of a generation batch, of all processes.

    Args:
        rows: The :func:`~agile_trainers.rollout.metrics.episode_metrics` of each episode, members of a group side by side.
        rewards: Of each episode, NaN without one.
        tasks: The :func:`task_of` each episode.
        group_size: Episodes that are compared with each other.
        members: Episodes of the same task that are played side by side.

    Returns:
        ``success_sem``, where success is known of two groups; ``groups_without_success``; ``reward_success_correlation``,
        where a group has successes and failures of different reward; ``distinct_tasks``, with data set rows in more than one
        group.
    """
    sound = [row["success"] if not StopReason(row["stop_reason"]).failed else None for row in rows]
    known = {task for task in tasks if task is not None}
    found = {
        "reward_success_correlation": reward_success_correlation(rewards, sound, group_size),
        "success_sem": success_sem(sound, members),
        "groups_without_success": groups_without_success(sound, members),
        "distinct_tasks": float(len(known)) if known and len(rows) > group_size else None,
    }
    return {name: value for name, value in found.items() if value is not None}
