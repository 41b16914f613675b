"""Metrics of a batch of episodes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import inf
from statistics import fmean, stdev
from typing import Any

from agile_trainers.rollout.forest import Fork
from agile_trainers.types import Message, StopReason, Trajectory, text_of

_SHOWN = 200
"""Characters of a prompt shown in a warning."""


def episode_metrics(trajectory: Trajectory) -> dict[str, Any]:
    """Return the statistics of one episode; :func:`summarize` takes those of all ranks."""
    lengths = [turn.end - turn.start for turn in trajectory.turns]
    return {
        "return": trajectory.episode_return,
        "success": trajectory.success,
        "turns": len(lengths),
        "action_tokens": sum(lengths),
        "tokens": trajectory.num_tokens,
        "answers_cut": sum(turn.finish_reason == "length" for turn in trajectory.turns),
        "observations_cut": trajectory.observations_cut,
        "observations_empty": sum(_is_empty(turn.observation) for turn in trajectory.turns[:-1]),
        "early_return": sum(turn.reward for turn in trajectory.turns[:-1]),
        "rewrites": {str(kind): sum(turn.fork == kind for turn in trajectory.turns) for kind in Fork},
        "questions": sum(turn.question for turn in trajectory.turns),
        "read_again": trajectory.read_again,
        "clipped": trajectory.clipped,
        "stop_reason": trajectory.stop_reason.value,
        "environment": trajectory.environment_name,
    }


def _is_empty(observation: str | list[Message] | None) -> bool:
    """Return True if an observation says nothing; None is that of a failed environment, or of an agent."""
    texts = [observation] if isinstance(observation, str) else [text_of(one) for one in observation or ()]
    return bool(texts) and not any(map(str.strip, texts))


@dataclass(frozen=True)
class Start:
    """Seed, prompt and environment of an episode."""

    seed: int
    prompt: str
    """The first characters of the prompt's messages."""
    digest: str
    """Hash of the whole prompt."""
    environment: str | None = None
    """The environment's name in a run of several."""


def start_of(trajectory: Trajectory) -> Start | None:
    """Return the :class:`Start` of an episode; None if its environment failed at reset."""
    if not trajectory.prompt:
        return None
    text = "\n".join(f"{message['role']}: {message['content']}" for message in trajectory.prompt)
    digest = blake2b(text.encode(), digest_size=16).hexdigest()
    return Start(trajectory.seed, text[:_SHOWN], digest, trajectory.environment_name)


def differing_groups(starts: Sequence[Start | None], group_size: int) -> list[int]:
    """Return the groups whose members did not all start from the same prompt.

    Args:
        starts: The start of each episode of all ranks; members of a group are adjacent.
        group_size: Members of a group.
    """
    groups = (starts[first : first + group_size] for first in range(0, len(starts), group_size))
    return [n for n, group in enumerate(groups) if len({start.digest for start in group if start is not None}) > 1]


def environments_with_success(rows: Sequence[dict[str, Any]]) -> set[str | None]:
    """Return the names of the environments of which an episode reports whether it succeeded."""
    return {row["environment"] for row in rows if row["success"] is not None}


def with_success(rows: Sequence[dict[str, Any]], known: Collection[str | None] = ()) -> list[dict[str, Any]]:
    """Count episodes that report no success as unsuccessful, where the environment reports it of others.

    An environment that reports success only when it wins would otherwise have a success rate of 100 %. Episodes whose
    environment failed stay as they are.

    Args:
        rows: The :func:`episode_metrics` of each episode.
        known: Names of further environments that report success, as known from other episodes.

    Returns:
        The rows; a row that was changed has ``success=False`` and ``success_reported=False``.
    """
    reporting = environments_with_success(rows) | set(known)
    return [
        {**row, "success": False, "success_reported": False}
        if row["success"] is None and row["environment"] in reporting and not StopReason(row["stop_reason"]).failed
        else row
        for row in rows
    ]


def demonstration_metrics(rows: Sequence[dict[str, Any]], shown: Sequence[bool], group_size: int) -> dict[str, float]:
    """Compute the metrics of an expert's episodes.

    Args:
        rows: The :func:`episode_metrics` of each episode of all ranks; members of a group are adjacent.
        shown: Whether an expert gave the answers of each.
        group_size: Members of a group; 1 without groups, where the batch is compared as one.

    Returns:
        ``demonstrations/return``, ``demonstrations/success`` where it is reported, and ``demonstrations/alone``: the share
        of groups in which an expert succeeded, or had a higher return where success is not reported, and no own episode did.
    """
    size = group_size if group_size > 1 else len(rows)
    experts = [row for row, expert in zip(rows, shown, strict=True) if expert]
    metrics = {"demonstrations/return": fmean(row["return"] for row in experts)}
    reported = [row["success"] for row in experts if row["success"] is not None]
    if reported:
        metrics["demonstrations/success"] = fmean(reported)
    key = "success" if reported else "return"
    groups = [range(first, first + size) for first in range(0, len(rows), size)]

    def best(group: range, expert: bool) -> float:
        return max((float(rows[n][key] or 0.0) for n in group if shown[n] == expert), default=-inf)

    metrics["demonstrations/alone"] = fmean(best(group, True) > best(group, False) for group in groups)
    return metrics


def summarize(rows: Sequence[dict[str, Any]], known: Collection[str | None] = ()) -> dict[str, float]:
    """Compute the metrics of a batch of episodes.

    Args:
        rows: The :func:`episode_metrics` of each episode of all ranks.
        known: Names of environments that are known to report success; see :func:`with_success`.

    Returns:
        ``return/mean|std|min|max`` and ``success`` over the episodes whose environment did not fail (``success`` only if
        an environment reports it; ``success/unreported`` is then the share of these episodes that do not, if there are any,
        which count as unsuccessful), ``turns/mean|max``, ``tokens_per_turn``, ``answers_cut`` (share of answers that ended
        at a token limit), ``observations_cut`` (number per episode) and ``stop/<reason>`` (share of all episodes) for
        every stop reason. Where contexts are rewritten also ``rewrites/context`` and ``rewrites/template`` (share of turns
        that begin a new path), ``rewrites/questions`` (share of turns that the environment does not get) and
        ``tokens_read_again`` (number per episode, if the generator counts them). Keys whose population is empty are left
        out.
    """
    metrics: dict[str, float] = {}
    rows = with_success(rows, known)
    sound = [row for row in rows if not StopReason(row["stop_reason"]).failed]
    if sound:
        returns = [row["return"] for row in sound]
        metrics["return/mean"] = fmean(returns)
        metrics["return/std"] = stdev(returns) if len(returns) > 1 else 0.0
        metrics["return/min"], metrics["return/max"] = min(returns), max(returns)
        turns = [row["turns"] for row in sound]
        metrics["turns/mean"], metrics["turns/max"] = fmean(turns), float(max(turns))
    successes = [row["success"] for row in sound if row["success"] is not None]
    if successes:
        metrics["success"] = fmean(successes)
    unreported = sum(not row.get("success_reported", True) for row in sound)
    if unreported:
        metrics["success/unreported"] = unreported / len(sound)
    answers = sum(row["turns"] for row in rows)
    if answers:
        metrics["tokens_per_turn"] = sum(row["action_tokens"] for row in rows) / answers
        metrics["answers_cut"] = sum(row["answers_cut"] for row in rows) / answers
        metrics |= _rewrites(rows, answers)
    metrics["observations_cut"] = sum(row["observations_cut"] for row in rows) / len(rows)
    for reason in StopReason:
        metrics[f"stop/{reason.value}"] = sum(row["stop_reason"] == reason.value for row in rows) / len(rows)
    return metrics


def _rewrites(rows: Sequence[dict[str, Any]], answers: int) -> dict[str, float]:
    counts = {f"rewrites/{kind.name.lower()}": sum(row["rewrites"][kind] for row in rows) for kind in Fork}
    counts["rewrites/questions"] = sum(row["questions"] for row in rows)
    read = [row["read_again"] for row in rows if row["read_again"] is not None]
    if not any(counts.values()) and not any(read):
        return {}
    again = {"tokens_read_again": fmean(read)} if read else {}
    return {name: count / answers for name, count in counts.items()} | again
