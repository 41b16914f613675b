"""The environment protocol."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import Any, Protocol

from agile_trainers.types import Message

Observation = str | list[Message]
ResetResult = tuple[Observation, dict[str, Any]]
StepResult = tuple[Observation, float, bool, bool, dict[str, Any]]


class Environment(Protocol):
    """A text environment: it speaks, the model answers, it rewards that answer.

    One instance plays one episode at a time and is reused (``reset`` again) for the next. Either method may be ``async
    def``. An instance may also define ``close()``. ``reset`` is called by keyword, ``step`` by position. Without dataset
    rows ``reset`` may leave out ``options``.
    """

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> ResetResult | Awaitable[ResetResult]:
        """Start an episode.

        Args:
            seed: The same seed (and options) must give the same first observation; members of a GRPO group share it.
            options: The dataset row of the episode, or None when training without a dataset.

        Returns:
            The first observation (text, taken as one user message, or a list of chat messages) and an info dict.
        """

    def step(self, action: str) -> StepResult | Awaitable[StepResult]:
        """Answer the model's text.

        Returns:
            ``(observation, reward, terminated, truncated, info)``. ``reward`` is a finite float for this action alone.
            ``terminated`` means the task itself is over, ``truncated`` that it was cut short; if both are set,
            ``terminated`` counts. ``info["success"]`` (bool) on the last step feeds the success rate; it is optional.
            Report it on every step, since the trainer's own limits may end an episode at any of them.
        """


EnvironmentFactory = Callable[[], Environment]
"""Makes one environment instance; called once for every episode that runs at the same time."""


def bound_reset(environment: Environment, seed: int | None, options: dict[str, Any] | None) -> Callable[[], Any]:
    """``reset`` with its arguments, ready to be called.

    Args:
        environment: The instance.
        seed: Of the episode.
        options: The dataset row; None is left out where the signature has no place for it.
    """
    arguments = (
        {"seed": seed} if options is None and not reads_rows(environment.reset) else {"seed": seed, "options": options}
    )
    return partial(environment.reset, **arguments)


def bound_step(environment: Environment, action: str) -> Callable[[], Any]:
    """``step`` with its argument, whatever that is called, ready to be called."""
    return partial(environment.step, action)


def reads_rows(reset: Callable[..., Any]) -> bool:
    """Whether a ``reset`` takes ``options``."""
    try:
        parameters = inspect.signature(reset).parameters.values()
    except (TypeError, ValueError):  # of a builtin, which says nothing
        return True
    return any(p.name == "options" or p.kind is p.VAR_KEYWORD for p in parameters)


def as_messages(observation: Observation) -> list[Message]:
    """An observation as chat messages: text is one user message."""
    return [{"role": "user", "content": observation}] if isinstance(observation, str) else list(observation)


def read_options(options: dict[str, Any] | None, known: Collection[str], environment: str) -> dict[str, Any]:
    """The options an environment was given, none of them unread.

    Args:
        options: What ``reset`` got. Entries that are None count as absent: a dataset fills its gaps with them.
        known: The names the environment reads.
        environment: What to call the environment in the error.

    Raises:
        ValueError: If an option is not among ``known``.
    """
    given = {name: value for name, value in (options or {}).items() if value is not None}
    unread = sorted(set(given) - set(known))
    if unread:
        raise ValueError(
            f"{environment} does not read the option(s) {', '.join(unread)}; it reads: {', '.join(known) or 'none'}. "
            "Options are the columns of the dataset row: remove or rename the column(s)."
        )
    return given
