"""The form of a dialect, the strict reading of JSON, and checks that name what was sent and what was expected."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agile_trainers.envs.images import DATA, ImageError, as_content, read_image
from agile_trainers.rollout.agents.requests import Answer, ChatRequest, Choice, Refusal
from agile_trainers.types import Content, Message

MOST_CHOICES = 128
"""The largest ``n``, as at OpenAI."""
MOST_STOPS = 128
"""Stop strings of a request. OpenAI takes 4; each is looked for in every answer, while all episodes wait."""
DEEPEST = 100
"""Levels of lists and objects in the arguments of a tool call. Python's own limit, and that of templates, is the stack."""
DEEPEST_BODY = DEEPEST + 20
"""Levels of a body, which has such arguments in its messages."""
_SETTINGS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty", "repetition_penalty",
)  # fmt: skip
ImageOf = Callable[[dict[str, Any], str], str]
"""Returns the address of a part's image, given the part and its path."""
_KINDS: dict[type, str] = {
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    list: "a list",
    dict: "an object",
}


@dataclass(frozen=True)
class Event:
    """One event of a stream."""

    data: dict[str, Any] | str
    name: str | None = None

    def encoded(self) -> bytes:
        """The event as it is sent."""
        data = self.data if isinstance(self.data, str) else ascii_json(self.data)
        return (f"event: {self.name}\n" if self.name else "").encode() + f"data: {data}\n\n".encode()


@dataclass(frozen=True)
class Dialect:
    """The form in which a family of clients asks and is answered. All functions are pure."""

    name: str
    path: str
    """The path after ``/v1``."""
    prefix: str
    """The beginning of an answer's id."""
    read: Callable[[dict[str, Any]], ChatRequest]
    """Reads a body, or raises a :class:`Refusal`."""
    write: Callable[[Answer, ChatRequest], dict[str, Any]]
    """Writes an answer whole."""
    events: Callable[[Answer, ChatRequest], Iterator[Event]]
    """Writes an answer as the events of a stream."""
    error: Callable[[Refusal], dict[str, Any]]
    """Writes a refusal."""


def ascii_json(value: Any) -> str:
    """Write JSON in ASCII: half a surrogate pair, which a tool call may hold, has no other form that can be sent."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


# ------------------------------------------------------------------------------------------------------- reading JSON


def parse(body: bytes | str, deepest: int = DEEPEST) -> Any:
    """Read JSON, strictly.

    Args:
        body: The JSON.
        deepest: The levels that it may have.

    Raises:
        Refusal: If it is not JSON in UTF-8, has a number that is not finite, half a surrogate pair (which is no text), or
            too many levels.
    """
    try:
        text = body.decode() if isinstance(body, bytes) else body
        value = json.loads(text, parse_constant=_no_number, parse_float=_finite)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise Refusal(f"The body is not UTF-8: {error}. Send JSON in UTF-8.") from None
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise Refusal(
            f"The body has {half}, half of a surrogate pair, which is no character; send whole characters."
        ) from None
    except RecursionError:
        raise _too_deep(deepest) from None
    except ValueError as error:
        raise Refusal(f"The body is not JSON: {error}. Send a JSON object.") from None
    level = [value]
    for _ in range(deepest + 1):
        parents = [
            item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list))
        ]
        if not parents:
            return value
        level = [child for parent in parents for child in parent]
    raise _too_deep(deepest)


def _too_deep(deepest: int) -> Refusal:
    return Refusal(f"The body is nested more than {deepest} levels deep; expected at most that.")


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a number that JSON has")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large a number")
    return value


# ------------------------------------------------------------------------------------------------------------- fields


def shown(value: Any) -> str:
    """The beginning of a value, for an error."""
    text = json.dumps(value) if isinstance(value, (list, dict)) else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def get(fields: Mapping[str, Any], name: str, kind: type, where: str = "") -> Any:
    """Return a field, None if it is missing or null.

    Args:
        fields: The object.
        name: The field's name.
        kind: Its type: ``str``, ``bool``, ``int`` (below 2**63), ``float`` (or a whole number), ``list`` or ``dict``.
        where: Path of the object, for the error.

    Raises:
        Refusal: If it is of another type.
    """
    value = fields.get(name)
    return None if value is None else checked(value, kind, f"{where}.{name}" if where else name)


def checked(value: Any, kind: type, where: str) -> Any:
    """Return a value of a type, as :func:`get`."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2**63
    if number if kind is float else number and isinstance(value, int) if kind is int else isinstance(value, kind):
        return value
    raise Refusal(f"`{where}` is {shown(value)}; expected {_KINDS[kind]}.")


def required(fields: Mapping[str, Any], name: str, kind: type, where: str = "") -> Any:
    """Return a field that must be there, as :func:`get`."""
    value = get(fields, name, kind, where)
    if value is None:
        raise Refusal(f"`{f'{where}.' if where else ''}{name}` is missing; send {_KINDS[kind]}.")
    return value


def stops(value: Any, where: str) -> tuple[str, ...]:
    """Read stop strings: a text or a list of texts that are not empty, None as none."""
    items = [] if value is None else [value] if isinstance(value, str) else checked(value, list, where)
    if len(items) > MOST_STOPS:
        raise Refusal(f"`{where}` has {len(items)} texts; expected at most {MOST_STOPS}.")
    for item in items:
        if not isinstance(item, str) or not item:
            raise Refusal(f"`{where}` has {shown(item)}; expected texts that are not empty.")
    return tuple(items)


def at_least_one(fields: Mapping[str, Any], name: str) -> int | None:
    """Return a whole number from 1, None if it is missing."""
    value = get(fields, name, int)
    if value is not None and value < 1:
        raise Refusal(f"`{name}` is {value}; expected 1 or more.")
    return value


def refuse(fields: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Refuse settings that would change what the model sees or does, unless they are null, false or empty.

    Args:
        fields: The body.
        reasons: Names of settings to what is to be done instead.
    """
    for name, reason in reasons.items():
        if fields.get(name):
            raise Refusal(f"`{name}` is {shown(fields[name])}, which is not supported: {reason}.")


def settings(body: Mapping[str, Any], *more: str) -> dict[str, Any]:
    """Return the settings of sampling, as sent: the numbers that all dialects name alike, ``more``, and
    ``parallel_tool_calls`` if it is false.
    """
    for name in _SETTINGS:
        get(body, name, float)
    single = {} if get(body, "parallel_tool_calls", bool) in (None, True) else {"parallel_tool_calls": False}
    return {name: body[name] for name in (*_SETTINGS, *more) if body.get(name) is not None} | single


def word_of(value: str, known: Iterable[str], where: str) -> str:
    """Return a value that is one of some words, or raise a :class:`Refusal`."""
    if value not in known:
        raise Refusal(f"`{where}` is {shown(value)}; expected one of {', '.join(known)}.")
    return value


def tool_choice(body: Mapping[str, Any]) -> Any:
    """Return OpenAI's ``tool_choice``: one of its words, an object, or None."""
    choice, words = body.get("tool_choice"), ("auto", "none", "required")
    if choice is not None and choice not in words and not isinstance(choice, dict):
        raise Refusal(f"`tool_choice` is {shown(choice)}; expected one of {', '.join(words)}, or an object.")
    return choice


def text_format(value: Any, where: str) -> dict[str, Any] | None:
    """Return the form that an answer must have, None for plain text."""
    if value is None:
        return None
    kind = required(checked(value, dict, where), "type", str, where)
    return None if kind == "text" else value


# ------------------------------------------------------------------------------------------------- messages and tools


def content_of(content: Any, where: str, kinds: Sequence[str], images: Mapping[str, ImageOf] | None = None) -> Content:
    """Return the content of a message: text, in which each part begins a line, as in vLLM, and null is empty.

    Args:
        content: Text, null, or a list of parts.
        where: Path, for the error.
        kinds: The types of parts that hold a text.
        images: The types of parts that hold an image. None where there may be none.

    Returns:
        The text; with an image, the parts, which the chat template joins.

    Raises:
        Refusal: If a part is of another type, or its image cannot be read.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Refusal(f"`{where}` is {shown(content)}; expected text or a list of parts.")
    return joined([part_of(part, f"{where}[{index}]", kinds, images) for index, part in enumerate(content)])


def joined(parts: list[dict[str, Any]]) -> Content:
    """Return parts as content: texts alone are the lines of one."""
    return "\n".join(part["text"] for part in parts) if all("text" in part for part in parts) else as_content(parts)


def part_of(part: Any, where: str, kinds: Sequence[str], images: Mapping[str, ImageOf] | None = None) -> dict[str, Any]:
    """Read one part, as :func:`content_of`."""
    kind, images = required(checked(part, dict, where), "type", str, where), images or {}
    if kind in kinds:
        return {"type": "text", "text": required(part, "refusal" if kind == "refusal" else "text", str, where)}
    if kind not in images:
        known = " or ".join(map(repr, (*kinds, *images)))
        raise Refusal(
            f"`{where}.type` is {shown(kind)}; expected {known}: the model writes text, and reads that and images."
        )
    address = images[kind](part, where)
    if not DATA.match(address):
        raise Refusal(
            f"The image of `{where}` is at {shown(address)}; addresses are not fetched and files are not read: send the "
            "image itself, as data:image/png;base64,..."
        )
    try:
        return {"type": "image", "image": read_image(address, "url")}
    except (ImageError, ImportError) as error:
        raise Refusal(f"`{where}`: {error}") from None


def tool_call(id: str, name: str, arguments: Any) -> dict[str, Any]:
    """Return a tool call in the form of requests; arguments that are not a JSON object stay as they were sent."""
    if isinstance(arguments, str):
        try:
            value = parse(arguments) if arguments.strip() else {}
        except Refusal:
            value = arguments
        arguments = value if isinstance(value, dict) else arguments
    return {
        "id": id,
        "type": "function",
        "function": {"name": name, "arguments": {} if arguments is None else arguments},
    }


def tool(fields: dict[str, Any], where: str, parameters: str = "parameters") -> dict[str, Any]:
    """Return a tool in the form of chat templates.

    Args:
        fields: ``name``, ``description`` and the JSON schema of its parameters.
        where: Path, for the error.
        parameters: Name of the schema's field.
    """
    name = required(fields, "name", str, where)
    if not name:
        raise Refusal(f"`{where}.name` is empty; expected the function's name.")
    description = get(fields, "description", str, where)
    schema = get(fields, parameters, dict, where) or {"type": "object", "properties": {}}
    described = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name, **described, "parameters": schema}}


def not_empty(messages: list[Message], where: str) -> list[Message]:
    """Refuse a conversation without messages."""
    if not messages:
        raise Refusal(f"`{where}` is empty; send at least one message.")
    return messages


# ------------------------------------------------------------------------------------------------------------ writing


def logprobs(choice: Choice) -> list[dict[str, Any]]:
    """The log-probs of a choice's tokens, in the form that OpenAI's dialects share."""
    return [
        {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": list(token.text.encode("utf-8", "replace") if token.part is None else token.part),
            "top_logprobs": [],
        }
        for token in choice.tokens
    ]


def openai_error(refusal: Refusal) -> dict[str, Any]:
    """Write a refusal as OpenAI's dialects do."""
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    return {"error": {"message": refusal.message, "type": kind, "param": None, "code": refusal.code}}
