"""The environment protocol."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import lru_cache, partial
from types import FunctionType, MethodType
from typing import Any, Protocol

from agile_trainers.types import Message

Observation = str | list[Message]
ResetResult = tuple[Observation, dict[str, Any]]
StepResult = tuple[Observation, float, bool, bool, dict[str, Any]]


class Environment(Protocol):
    """A text environment, which gives observations and rewards the model's answers.

    One instance plays one episode at a time and is reused (``reset`` again) for the next. All methods may be ``async def``.
    ``reset`` is called by keyword, ``step`` by position. Without dataset rows, ``reset`` may omit ``options``.

    An instance may also have an attribute ``return_range``, the lowest and highest return of an episode, and define three
    methods. ``close()`` frees what it holds. ``context(messages) -> messages`` rewrites what the model sees before each
    answer; see :mod:`agile_trainers.envs.context`. ``end(reason) -> float | None`` rewards an episode that a limit of the
    trainer ends before the environment does: it is called after the last ``step``, with ``"max_turns"``,
    ``"context_full"`` or ``"rewrite_full"``, and its reward is added to the last turn's. The episode stays truncated, and
    PPO does not estimate what is left of it. None leaves the episode without such a reward, as if there were no ``end``.
    """

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> ResetResult | Awaitable[ResetResult]:
        """Start an episode.

        Args:
            seed: The same seed (and options) must give the same first observation; members of a GRPO group share it.
            options: The dataset row of the episode, or None when training without a dataset.

        Returns:
            The first observation (text, taken as one user message, or a list of chat messages, whose content may have parts
            with images, see :mod:`agile_trainers.envs.images`) and an info dict.
        """

    def step(self, action: str) -> StepResult | Awaitable[StepResult]:
        """Take the model's text as an action.

        Returns:
            ``(observation, reward, terminated, truncated, info)``. ``reward`` is a finite float for this action alone.
            ``terminated`` means that the task is over, ``truncated`` that a limit stopped it; if both are set,
            ``terminated`` counts. ``info["success"]`` (bool, optional) on the last step gives the success rate. Report
            it on every step, since the trainer's limits may end an episode at any step; an episode that ends without it
            counts as unsuccessful if another one reported it.
        """


EnvironmentFactory = Callable[[], Environment]
"""Makes one environment instance; called once for every episode that runs at the same time."""


def bound(environment: Any, method: str, *arguments: Any) -> Callable[[], Any]:
    """Bind a method of an environment to its arguments, as a rollout calls it.

    Args:
        environment: The instance.
        method: ``"reset"``, which gets its arguments by keyword, or another one, which gets them by position. Where it is
            not defined, ``"end"`` returns None and ``"context"`` returns ``NotImplemented``.
        arguments: For ``reset`` the seed and the dataset row. A row that is None is omitted if the signature takes none.
    """
    if method == "reset":
        seed, options = arguments
        rows = {} if options is None and not reads_rows(environment.reset) else {"options": options}
        return partial(environment.reset, seed=seed, **rows)
    if method == "end" and getattr(environment, "end", None) is None:
        return lambda: None
    if method == "context" and not callable(getattr(environment, "context", None)):
        return lambda: NotImplemented
    return partial(getattr(environment, method), *arguments)


def call_error(function: Callable[..., Any], /, *arguments: Any, **named: Any) -> TypeError | None:
    """Return why a function cannot be called with these arguments; None if it can, or has no signature to tell by."""
    try:
        signature = inspect.signature(function)
        signature.bind(*arguments, **named)
    except TypeError as error:
        return error
    except ValueError:  # some callables written in C have no signature
        return None
    for name, value in named.items():
        if isinstance(value, str) and name in signature.parameters and _is_boolean(signature.parameters[name]):
            return TypeError(f"{name} must be true or false, got a text, which counts as true")
    return None


def _is_boolean(parameter: inspect.Parameter) -> bool:
    kind = parameter.annotation
    written = kind if isinstance(kind, str) else inspect.formatannotation(kind)
    return written.removeprefix("typing.") in ("bool", "bool | None", "Optional[bool]")


def check_no_text_for_booleans(arguments: Mapping[str, Any], where: str) -> None:
    """Check that no argument of another library is a text that spells a boolean, since any text counts as true there.

    Args:
        arguments: Name to value.
        where: What they are arguments of, for the error.

    Raises:
        ValueError: For the first one that is.
    """
    for name, value in arguments.items():
        if isinstance(value, str) and value.lower() in ("true", "false"):
            raise ValueError(
                f"{where}: {name}={value!r} is a text, which counts as true. Write {value.lower()} without quotation marks, "
                f"in Python {value.capitalize()}."
            )


def reads_rows(reset: Callable[..., Any]) -> bool:
    """Return whether a ``reset`` takes ``options``."""
    if isinstance(reset, MethodType) and isinstance(reset.__func__, FunctionType):
        return _reads_rows(reset.__func__)  # a hundred times faster than to read a signature before each episode
    return _reads_rows.__wrapped__(reset)


@lru_cache(maxsize=128)
def _reads_rows(reset: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(reset).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return True
    return any(p.name == "options" or p.kind is p.VAR_KEYWORD for p in parameters)


def as_messages(observation: Observation) -> list[Message]:
    """Convert an observation to chat messages: text is one user message."""
    return [{"role": "user", "content": observation}] if isinstance(observation, str) else list(observation)


def read_options(options: dict[str, Any] | None, known: Collection[str], environment: str) -> dict[str, Any]:
    """Return the options of an environment, and reject unknown ones.

    Args:
        options: The ``options`` of ``reset``. None values count as absent, since data sets fill missing columns with them.
        known: Names of the options that the environment reads.
        environment: Name of the environment in the error.

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
