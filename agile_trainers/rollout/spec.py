"""Defines an episode: its seeds and row, its limits, and the answers of an expert."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from math import isclose
from typing import Any

from agile_trainers.envs.base import Observation
from agile_trainers.envs.checker import LONG_OBSERVATION
from agile_trainers.types import Message, Trajectory, parts_of


@dataclass(frozen=True)
class Limits:
    """Limits of an episode, in tokens unless stated otherwise."""

    max_turns: int
    max_new_tokens: int
    """Tokens of one answer."""
    max_model_length: int
    """Tokens of a conversation, prompt included."""
    max_observation_length: int = LONG_OBSERVATION
    """Characters of one observation; longer ones are cut, with a note."""


@dataclass(frozen=True)
class GivenAnswer:
    """An answer of an expert."""

    token_ids: list[int]
    prompt_ids: list[int] | None = None
    """The prompt that it was sampled after, if that is known: only then the two below are."""
    sampled_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Log-probabilities under the expert."""


@dataclass(frozen=True)
class Demonstration:
    """An episode of an expert, to be replayed."""

    source: str
    """Its origin, for errors."""
    answers: list[GivenAnswer]
    rewards: list[float]
    """Reward of each turn, which the environment must give again."""

    def check(self, played: Trajectory) -> None:
        """Check that an environment repeated the rewards; one that failed may not have.

        Raises:
            ValueError: If it did not.
        """
        if played.stop_reason.failed:
            return
        rewards = played.rewards
        if len(rewards) < len(self.answers):
            raise ValueError(
                f"A demonstration ({self.source}) has {len(self.answers)} answers, and its episode ended after "
                f"{len(rewards)} of them ({played.stop_reason}). Raise max_turns or max_model_length if they end it; "
                "otherwise the environment does not repeat itself from a seed, or differs from the recorded one."
            )
        ended = [*rewards[:-1], rewards[-1] - (played.end_reward or 0.0)] if rewards else rewards
        if not any(all(map(partial(isclose, abs_tol=1e-6), one, self.rewards)) for one in (rewards, ended)):
            raise ValueError(
                f"A demonstration ({self.source}) got the rewards {self.rewards} when it was recorded and {rewards} now. "
                "The environment does not repeat itself from a seed, or differs from the recorded one: record it again."
            )


@dataclass(frozen=True)
class EpisodeSpec:
    """Specification from which an episode is reproducible, independent of process and batch."""

    seed: int
    """The environment's seed."""
    stream: tuple[int, ...]
    """Entropy of the sampling noise; it differs between the members of a group, unlike the seed."""
    options: dict[str, Any] | None = None
    """The dataset row, passed to ``reset``."""
    environment: str | None = None
    """Name of the environment in a run of several."""
    demonstration: Demonstration | None = None
    """The answers of an expert, which take the place of sampled ones."""


def cut_observation(observation: Observation, limit: int) -> tuple[Observation, bool]:
    """Cut an observation to at most ``limit`` characters plus a note.

    Args:
        observation: Text or messages. Of messages, the first ``limit`` characters of content in total are kept; the
            messages after the cut are dropped.
        limit: Number of characters. Images have none.

    Returns:
        The observation, and True if it was cut.
    """
    if isinstance(observation, str):
        return (_cut(observation, limit), True) if len(observation) > limit else (observation, False)
    kept: list[Message] = []
    for message in observation:
        content, parts = message["content"], []
        for part in parts_of(message):
            text = part.get("text", "")
            if len(text) > limit:
                parts.append({**part, "text": _cut(text, limit)})
                return [*kept, {**message, "content": parts[0]["text"] if isinstance(content, str) else parts}], True
            limit -= len(text)
            parts.append(part)
        kept.append(message)
    return observation, False


def _cut(text: str, limit: int) -> str:
    return f"{text[:limit]}\n[cut: {limit} of {len(text)} characters shown]"
