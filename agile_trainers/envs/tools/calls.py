"""Parses tool calls in a model's text and checks their arguments.

Two formats are read. Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` any number of times in
any text. Llama 3: an answer that consists of ``{"name": ..., "parameters": {...}}``, several separated by ``;``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from jsonschema import Draft202012Validator, ValidationError, validators
from jsonschema.exceptions import best_match

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_EXPECTED = '{"name": "<tool>", "arguments": {"<argument>": <value>}}'
_BETWEEN = re.compile(r"[\s;]*")
_SHOWN = 200
"""Characters of an error that the model sees."""


@dataclass(frozen=True)
class ToolCall:
    """A call in the model's text."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MalformedCall:
    """An invalid call in the model's text."""

    reason: str
    """The error and the expected form, for the model."""


def parse_tool_calls(text: str) -> list[ToolCall | MalformedCall]:
    """Parse the calls in an answer, in order; empty if there are none.

    Args:
        text: The model's answer, without special tokens.
    """
    if _OPEN in text or _CLOSE in text:
        return _hermes_calls(text)
    answer = text.strip().removeprefix("<|python_tag|>").lstrip()
    return _llama_calls(answer) if re.match(r'\{\s*"(name|type|function|parameters|arguments)"', answer) else []


def argument_error(schema: dict[str, Any], arguments: dict[str, Any]) -> str | None:
    """Return the error in a call's arguments, None if they are valid.

    Args:
        schema: JSON schema of the tool's parameters from ``transformers.utils.get_json_schema``, with ``nullable``; ``1.0``
            is not an integer.
        arguments: The arguments by name.
    """
    known = schema.get("properties", {})
    missing = [name for name in schema.get("required", []) if name not in arguments]
    if missing:
        return f"missing argument(s): {', '.join(missing)}"
    unknown = sorted(set(arguments) - set(known))
    if unknown:
        return f"unknown argument(s): {', '.join(unknown)}; the tool takes: {', '.join(known) or 'none'}"
    error = best_match(_Validator(schema).iter_errors(arguments))
    if error is None:
        return None
    message = error.message if len(error.message) <= _SHOWN else f"...{error.message[-_SHOWN:]}"
    return f"argument {error.json_path.removeprefix('$.')}: {message}"


def _hermes_calls(text: str) -> list[ToolCall | MalformedCall]:
    calls: list[ToolCall | MalformedCall] = []
    for number, part in enumerate(text.split(_OPEN)):
        body, closing, rest = part.partition(_CLOSE)
        if _CLOSE in (rest if number else part):
            calls.append(MalformedCall(f"{_CLOSE} without {_OPEN} before it"))
        elif number and not closing:
            calls.append(MalformedCall(f"{_OPEN} is not closed by {_CLOSE}"))
        elif number:
            calls.append(_call(body))
    return calls


def _llama_calls(answer: str) -> list[ToolCall | MalformedCall]:
    calls: list[ToolCall | MalformedCall] = []
    decoder = json.JSONDecoder()
    position = 0
    while position < len(answer):
        try:
            value, position = decoder.raw_decode(answer, position)
        except (ValueError, RecursionError) as error:
            return [*calls, MalformedCall(_json_error(error))]
        calls.append(_checked(value))
        position = _BETWEEN.match(answer, position).end()  # type: ignore[union-attr]
    return calls


def _call(body: str) -> ToolCall | MalformedCall:
    try:
        return _checked(json.loads(body))
    except (ValueError, RecursionError) as error:
        return MalformedCall(_json_error(error))


def _checked(value: Any) -> ToolCall | MalformedCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return MalformedCall(f"a call is a JSON object such as {_EXPECTED}")
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return MalformedCall(f"the arguments of {value['name'][:40]} are no JSON object; expected {_EXPECTED}")
    return ToolCall(value["name"], arguments)


def _json_error(error: Exception) -> str:
    where = (
        f"{error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else "too deep or too long"
    )
    return f"not valid JSON ({where}); expected {_EXPECTED}"


def _unless_null(keyword: str) -> Callable[..., Iterator[ValidationError]]:
    """Extend a keyword's check by ``nullable``, which OpenAPI and transformers use and JSON schema does not have."""

    def check(validator: Any, value: Any, instance: Any, schema: dict[str, Any]) -> Iterator[ValidationError]:
        if instance is not None or not schema.get("nullable"):
            yield from Draft202012Validator.VALIDATORS[keyword](validator, value, instance, schema)

    return check


def _is_integer(checker: Any, instance: Any) -> bool:
    return isinstance(instance, int) and not isinstance(instance, bool)


_Validator = validators.extend(
    Draft202012Validator,
    {keyword: _unless_null(keyword) for keyword in ("type", "enum")},
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_integer),
)
