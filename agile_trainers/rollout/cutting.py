"""Cuts long observations and appends a note that the model can read."""

from __future__ import annotations

from agile_trainers.envs.base import Observation
from agile_trainers.types import Message


def cut_observation(observation: Observation, limit: int | None) -> tuple[Observation, bool]:
    """Cut an observation to at most ``limit`` characters plus a note.

    Args:
        observation: Text or messages. Of messages, the first ``limit`` characters of content in total are kept; the
            messages after the cut are dropped.
        limit: Number of characters; None: no limit.

    Returns:
        The observation, and True if it was cut.
    """
    if limit is None:
        return observation, False
    if isinstance(observation, str):
        return (_cut(observation, limit), True) if len(observation) > limit else (observation, False)
    kept: list[Message] = []
    for message in observation:
        content = message["content"]
        if len(content) > limit:
            return [*kept, {**message, "content": _cut(content, limit)}], True
        limit -= len(content)
        kept.append(message)
    return observation, False


def _cut(text: str, limit: int) -> str:
    return f"{text[:limit]}\n[cut: {limit} of {len(text)} characters shown]"
