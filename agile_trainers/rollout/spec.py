"""Defines an episode: its seeds and row, its limits, and the interface of the chat renderer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isclose
from typing import Any, Protocol

from agile_trainers.envs.base import Observation
from agile_trainers.envs.checker import LONG_OBSERVATION
from agile_trainers.types import Message, Picture, Trajectory, parts_of


class Chat(Protocol):
    """Interface of a chat renderer, as the loop uses it; see :class:`agile_trainers.rollout.chat.renderer.ChatRenderer`."""

    eos_token_ids: list[int]
    """Ids that end an answer."""
    chat_template: str | None
    """The template in use; None for plain text."""
    rewrite: Any
    """A turn that the template rewrites later; None if it keeps them."""
    forks: bool
    """True if a conversation is rendered again where the template rewrites earlier turns."""

    @property
    def tokenizer_name(self) -> str: ...

    @property
    def longest_token(self) -> int: ...

    def first(self, observation: Observation, *, sampled: bool = False) -> list[int]: ...

    def goes_on(
        self, messages: list[Message], prompt: Sequence[str], action_ids: Sequence[int], observation: list[Message]
    ) -> bool: ...

    def before(self, text: str) -> list[int]: ...

    def delimited(self, observation: Observation, last_action_id: int) -> list[int]: ...

    def decode(self, action_ids: list[int]) -> str: ...

    def pictures(self, messages: list[Message]) -> list[Picture]: ...

    def with_tools(self, tools: list[dict[str, Any]]) -> Chat: ...

    def parsed(self, prompt_ids: list[int], action_ids: Sequence[int]) -> Message | None: ...

    def spliced(self, messages: list[Message], answers: Mapping[int, Sequence[int]]) -> list[int] | None: ...


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
