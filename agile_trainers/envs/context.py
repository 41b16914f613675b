"""Rewrites what the model sees of its conversation: the context before each answer, and ready ways to shorten it.

A *history* is a function from a context to the messages that the next answer is sampled after. What it returns is the
context from then on: the answer and the environment's observation are appended to it, and the function is called again. If
it only appends to what the model saw, the conversation goes on; otherwise a new one begins.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from agile_trainers.envs.base import call_error
from agile_trainers.types import Message, images_of, parts_of, text_of

_INSTRUCTION = (
    "Your context is nearly full. Sum up, for yourself, everything that you need in order to go on: it replaces all that is "
    "above, except the first message."
)


class Context(list[Message]):
    """The messages before an answer, as a function that rewrites them gets them.

    Args:
        messages: What the model saw last, its answer to that, and what the environment observed since. They are copies.
        prompt: The messages that the environment began the episode with, with the run's system prompt.
        tokens: Number of tokens that the model reads if they stay as they are.
        max_tokens: The run's ``max_model_length``.
    """

    def __init__(
        self, messages: Iterable[Message] = (), prompt: Iterable[Message] = (), tokens: int = 0, max_tokens: int = 0
    ) -> None:
        super().__init__(deepcopy(list(messages)))
        self.prompt = deepcopy(list(prompt))
        self.tokens = tokens
        self.max_tokens = max_tokens


class Question(list[Message]):
    """Messages whose answer is for the function that asked, not for the environment: ask for a summary, for example.

    The answer is a turn that is trained like any other. The function is called again with the answer as the last message.
    """


History = Callable[[Context], list[Message]]
"""Returns the messages to sample the next answer after; a :class:`Question` asks for a text of the model first."""


def full(messages: Context) -> list[Message]:
    """Return the messages as they are."""
    return messages


@dataclass(frozen=True)
class LastExchanges:
    """Keeps the prompt and the last answers with their observations (a sliding window).

    Args:
        number: Answers that are kept, at least 1.

    Raises:
        ValueError: If it is less.
    """

    number: int

    def __post_init__(self) -> None:
        _check_count(self.number, "number of answers")

    def __call__(self, messages: Context) -> list[Message]:
        answers = _answers(messages)
        if len(answers) <= self.number:
            return messages
        return [*messages[: answers[0]], *messages[answers[-self.number] :]]


@dataclass(frozen=True)
class LastObservations:
    """Keeps the text of the last observations, and all answers; older observations are replaced by a note.

    Args:
        number: Observations that are kept, at least 1.
        note: What older ones are replaced by.

    Raises:
        ValueError: If the number is less than 1.
    """

    number: int
    note: str = "(dropped)"

    def __post_init__(self) -> None:
        _check_count(self.number, "number of observations")

    def __call__(self, messages: Context) -> list[Message]:
        answers = _answers(messages)
        old = set(range(answers[0], answers[-self.number])) - set(answers) if len(answers) > self.number else ()
        return [
            {**message, "content": self.note} if place in old else message for place, message in enumerate(messages)
        ]


@dataclass(frozen=True)
class Summary:
    """Asks the model to sum up once the context has too many tokens, and goes on with prompt, summary and last observation.

    Args:
        tokens: Tokens above which it asks.
        instruction: What asks for the summary.
        heading: What the summary follows.

    Raises:
        ValueError: If the tokens are fewer than 1.
    """

    tokens: int
    instruction: str = _INSTRUCTION
    heading: str = "Your summary of what happened so far:"

    def __post_init__(self) -> None:
        _check_count(self.tokens, "number of tokens")

    def __call__(self, messages: Context) -> list[Message]:
        if messages[-1]["role"] == "assistant":
            *before, summary = messages
            observed = before[_answers(before)[-1] + 1 :]
            text = "\n\n".join(map(text_of, observed)).removesuffix(self.instruction).strip()
            *first, last = messages.prompt
            whole = with_text(last, f"{self.heading}\n{text_of(summary)}\n\n{text}")
            shown = [{"type": "image", "image": image} for image in images_of(observed)]
            return [*first, {**whole, "content": [*parts_of(whole), *shown]} if shown else whole]
        # Without an answer there is nothing to sum up.
        if messages.tokens <= self.tokens or not _answers(messages):
            return messages
        last = messages[-1]
        if last["role"] != "user":
            return Question([*messages, {"role": "user", "content": self.instruction}])
        # Many templates reject two user messages in a row.
        return Question([*messages[:-1], with_text(last, self.instruction)])


@dataclass(frozen=True)
class LastImages:
    """Keeps the last images, and all texts; older images are replaced by a note.

    Args:
        number: Images that are kept, at least 1.
        note: What older ones are replaced by.

    Raises:
        ValueError: If the number is less than 1.
    """

    number: int
    note: str = "(an image that is no longer shown)"

    def __post_init__(self) -> None:
        _check_count(self.number, "number of images")

    def __call__(self, messages: Context) -> list[Message]:
        old = len(images_of(messages)) - self.number
        kept = list[Message]()
        for message in messages:
            parts = []
            for part in parts_of(message) if old > 0 and images_of([message]) else ():
                dropped = part["type"] == "image" and old > 0
                parts.append({"type": "text", "text": self.note} if dropped else part)
                old -= dropped
            kept.append({**message, "content": parts} if parts else message)
        return kept


_READY: dict[str, Callable[[int], History]] = {
    "last": LastExchanges,
    "observations": LastObservations,
    "images": LastImages,
    "summary": Summary,
}


def as_history(value: Any, name: str = "history") -> History | None:
    """Return the function that an option names.

    Args:
        value: None, a function, ``"full"``, ``"last:N"`` (exchanges), ``"observations:N"``, ``"images:N"``, ``"summary:N"``
            (tokens), or the place of a function as ``"module.path:name"``.
        name: Of the option, for the errors.

    Returns:
        The function; None for None.

    Raises:
        ValueError: For anything else.
    """
    if value is None:
        return value
    if callable(value):
        return _checked(value, f"{name}={value!r}")
    kind, _, rest = value.partition(":") if isinstance(value, str) else ("", "", "")
    if value == "full":
        return full
    if kind in _READY:
        if not (rest.isdecimal() and int(rest) >= 1):
            raise ValueError(f"{name}={value!r}: expected a whole number of at least 1 after {kind + ':'!r}.")
        return _READY[kind](int(rest))
    ready = ", ".join(repr(f"{one}:N") for one in _READY)
    if not rest:
        raise ValueError(
            f"{name}={value!r} is unknown. Use 'full', {ready}, 'module.path:function', or pass a function."
        )
    try:
        found: Any = pkgutil.resolve_name(value)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{name}={value!r} names no function: {error}. Ready ones are 'full', {ready}.") from error
    return _checked(found, f"{name}={value!r}")


def _checked(found: Callable[..., Any], given: str) -> History:
    """Return a function if it can be called with messages."""
    if isinstance(found, type) or not callable(found):
        raise ValueError(f"{given} is {found!r}; expected a function from messages to messages.")
    tests = (inspect.iscoroutinefunction, inspect.isgeneratorfunction)
    if any(test(one) for test in tests for one in (found, type(found).__call__)):
        raise ValueError(f"{given} awaits or yields; expected a plain function that returns a list of messages.")
    if (error := call_error(found, [])) is not None:
        signature = inspect.signature(found)
        raise ValueError(
            f"{given} cannot be called as function(messages): {error}. Its signature is {signature}."
        ) from error
    return found


def name_of_history(value: Any) -> Any:
    """Return the name under which :func:`as_history` finds a function, which can be saved; anything else as it is.

    Raises:
        ValueError: If it has no such name, like a lambda.
    """
    if not callable(value):
        return value
    as_history(value)
    ready = next((kind for kind, made in _READY.items() if type(value) is made), None)
    if ready is not None:
        number = next(iter(vars(value).values()))
        if value == _READY[ready](number):
            return f"{ready}:{number}"
    name = f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '')}"
    try:
        if as_history(name) is value:
            return name
    except ValueError:
        pass
    raise ValueError(
        f"history={value!r} cannot be named in a checkpoint. Define it at the top level of a module with `def`, or give the "
        "object a name there and pass 'module.path:name'."
    )


def is_ready_history(value: Any) -> bool:
    """Return whether an option names functions of this library only, which may be followed from somebody else's file."""
    if isinstance(value, dict):
        return all(map(is_ready_history, value.values()))
    return value in (None, "full") or (isinstance(value, str) and value.partition(":")[0] in _READY)


def _check_count(value: int, name: str) -> None:
    if value < 1:
        raise ValueError(f"The {name} is {value}, expected at least 1. For the whole conversation pass history='full'.")


def with_text(message: Message, text: str) -> Message:
    """Append a text to a message, after an empty line."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": f"{content}\n\n{text}"}
    return {**message, "content": [*content, {"type": "text", "text": f"\n\n{text}"}]}


def _answers(messages: list[Message]) -> list[int]:
    """Return the places of the answers after the prompt."""
    prompt = getattr(messages, "prompt", [])
    start = len(prompt) if prompt and messages[: len(prompt)] == prompt else 0
    return [place for place in range(start, len(messages)) if messages[place]["role"] == "assistant"]
