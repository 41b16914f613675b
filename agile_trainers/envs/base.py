"""The environment protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from agile_trainers.types import Message

Observation = str | list[Message]
StepResult = tuple[Observation, float, bool, bool, dict[str, Any]]


class Environment(Protocol):
    """A text environment: it speaks, the model answers, it rewards that answer.

    One instance plays one episode at a time and is reused (``reset`` again) for the next. Either method may be ``async
    def``. An instance may also define ``close()``.
    """

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        """Start an episode.

        Args:
            seed: The same seed (and options) must give the same first observation; members of a GRPO group share it.
            options: The dataset row of the episode, or None when training without a dataset.

        Returns:
            The first observation (text, taken as one user message, or a list of chat messages) and an info dict.
        """

    def step(self, action: str) -> StepResult:
        """Answer the model's text.

        Returns:
            ``(observation, reward, terminated, truncated, info)``. ``reward`` is a finite float for this action alone.
            ``terminated`` means the task itself is over, ``truncated`` that it was cut short. ``info["success"]`` (bool)
            on the last step feeds the success rate; it is optional.
        """


EnvironmentFactory = Callable[[], Environment]
"""Makes one environment instance; called once for every episode that runs at the same time."""
