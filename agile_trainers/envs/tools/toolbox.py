"""Runs the tool calls of an answer and formats their results for the model."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jsonschema import Draft202012Validator, ValidationError, validators
from jsonschema.exceptions import best_match
from transformers.utils import get_json_schema

from agile_trainers.envs.base import Observation
from agile_trainers.envs.checker import EnvironmentProtocolError, describe_error
from agile_trainers.envs.context import History, LastObservations
from agile_trainers.envs.images import as_content, is_image, read_part
from agile_trainers.envs.isolation.levels import IsolationError
from agile_trainers.imports import pass_on_interrupt
from agile_trainers.types import Content, Message, parts_of

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_EXPECTED = '{"name": "<tool>", "arguments": {"<argument>": <value>}}'
_BETWEEN = re.compile(r"[\s;]*")
_PYTHON_TAG = "<|python_tag|>"
_WITHOUT_ASYNC = (
    "Let it return its result (a wrapper may call asyncio.run), or play an `async def` tool by "
    "trl_environment(tools=[...])."
)
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

    JSON without tags is a call if it has ``name`` and ``parameters`` (or ``arguments``), and else an answer in JSON.

    Args:
        text: The model's answer, without special tokens.
    """
    if _OPEN in text or _CLOSE in text:
        return _hermes_calls(text)
    bare = text.strip()
    answer = bare.removeprefix(_PYTHON_TAG).lstrip()
    if not re.match(r'\{\s*"(name|type|function|parameters|arguments)"', answer):
        return []
    return _llama_calls(answer, tagged=bare.startswith(_PYTHON_TAG))


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


def _llama_calls(answer: str, *, tagged: bool) -> list[ToolCall | MalformedCall]:
    calls: list[ToolCall | MalformedCall] = []
    decoder = json.JSONDecoder()
    position = 0
    while position < len(answer):
        try:
            value, position = decoder.raw_decode(answer, position)
        except (ValueError, RecursionError) as error:
            return [*calls, MalformedCall(_json_error(error))]
        if not (calls or tagged or value.keys() & {"arguments", "parameters"} or _is_nested(value)):
            return []
        calls.append(_checked(value))
        position = _BETWEEN.match(answer, position).end()  # type: ignore[union-attr]
    return calls


def _is_nested(value: dict[str, Any]) -> bool:
    """Return whether a call has OpenAI's form, which the model is told of rather than taken by its word."""
    return value.get("type") == "function" or isinstance(value.get("function"), dict)


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


CallFormat = Literal["hermes", "llama3"]
CALL_EXAMPLES = {
    "hermes": '<tool_call>\n{"name": "<tool>", "arguments": {"<argument>": <value>}}\n</tool_call>',
    "llama3": '{"name": "<tool>", "parameters": {"<argument>": <value>}}',
}
"""Example of a call in each format."""
_FAILED = "Error: "


class Toolbox:
    """Typed functions that a model calls by name.

    Args:
        tools: The functions, each with a docstring that describes it and every argument.
        awaits: Whether its user runs calls by :meth:`run_awaited`, so that tools may be ``async``.

    Raises:
        ValueError: If two tools have the same name, there is none, or one is a generator or is not awaited.
        Exception: Of transformers, if a tool has no usable docstring or type hints.
    """

    def __init__(self, tools: Sequence[Callable[..., Any]], *, awaits: bool = False):
        self.schemas = [get_json_schema(tool) for tool in tools]
        """JSON schemas in the form of chat templates."""
        for schema in self.schemas:
            schema["function"].pop("return", None)  # chat templates do not show it
        self.tools = {schema["function"]["name"]: tool for schema, tool in zip(self.schemas, tools)}
        """Functions by name."""
        if not tools or len(self.tools) < len(tools):
            raise ValueError(f"Pass at least one tool, with different names: got {list(self.tools)}.")
        for name, tool in self.tools.items():
            if inspect.isgeneratorfunction(tool) or inspect.isasyncgenfunction(tool):
                raise ValueError(f"The tool {name} is a generator, whose values nobody takes. Return a list of them.")
            if is_async(tool) and not awaits:
                raise ValueError(f"The tool {name} is async, and is not awaited here. {_WITHOUT_ASYNC}")
        self._parameters = {s["function"]["name"]: s["function"].get("parameters", {}) for s in self.schemas}

    def error(self, call: ToolCall | MalformedCall) -> str | None:
        """Return the error of a call, for the model; None if it can be run."""
        if isinstance(call, MalformedCall):
            return call.reason
        if call.name not in self.tools:
            return f"there is no tool {call.name[:40]!r}; the tools are: {', '.join(self.tools)}"
        error = argument_error(self._parameters[call.name], call.arguments)
        return None if error is None else f"{call.name}: {error}"

    def run(self, call: ToolCall | MalformedCall) -> Content:
        """Run a call and return its result for the model, or an error.

        The result is JSON unless it is text, an image (of PIL, or an :class:`~agile_trainers.types.Image`), or a list of
        parts with such an image, as TRL takes it: ``[{"type": "image", "image": ...}, {"type": "text", "text": ...}]``. An
        image that cannot be shown is an error of the call.

        Raises:
            IsolationError: If this machine cannot isolate the tool.
            EnvironmentProtocolError: If the tool returned a coroutine or a generator.
        """
        try:
            return _shown(_result(call, self._invoke(call)))
        except BaseException as error:
            pass_on_interrupt(error)
            return _failure(error)

    async def run_awaited(self, call: ToolCall | MalformedCall) -> Content:
        """Run a call like :meth:`run`, and await its result if it is awaitable."""
        try:
            result = self._invoke(call)
            return _shown(_result(call, await result if inspect.isawaitable(result) else result))
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                raise
            pass_on_interrupt(error)
            return _failure(error)

    def _invoke(self, call: ToolCall | MalformedCall) -> Any:
        error = self.error(call)
        if error is not None or isinstance(call, MalformedCall):
            raise ValueError(error)
        return self.tools[call.name](**call.arguments)


class _NoResultError(EnvironmentProtocolError):
    """A tool returned what nobody has run: it ends the episode, since the model cannot mend it."""


def is_async(function: Any) -> bool:
    """Return whether a function, or the ``__call__`` of an object, is ``async``."""
    return any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))  # noqa: B004


def _result(call: ToolCall | MalformedCall, result: Any) -> Any:
    """Return the result of a call, which is no mistake of the model if it is none."""
    if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
        if hasattr(result, "close"):
            result.close()
        name = call.name if isinstance(call, ToolCall) else ""
        raise _NoResultError(f"The tool {name} returned {type(result).__name__}, no result. {_WITHOUT_ASYNC}")
    return result


def count_failed(results: Sequence[Content]) -> int:
    """Count the errors among the results of calls."""
    return sum(isinstance(result, str) and result.startswith(_FAILED) for result in results)


def as_observation(results: Sequence[Content]) -> Observation:
    """Join results to one text, or to one message of parts if there are images.

    Each is in ``<tool_response>`` tags, which are escaped inside a result.
    """
    parts = list[dict[str, Any]]()
    for result in results:
        begin = "\n<tool_response>\n" if parts else "<tool_response>\n"
        parts += [{"type": "text", "text": begin}, *_escaped(result), {"type": "text", "text": "\n</tool_response>"}]
    content = as_content(parts)
    return content if isinstance(content, str) else [{"role": "user", "content": content}]


def as_tool_messages(results: Sequence[Content]) -> list[Message]:
    """Return each result as a message of the role ``tool``; the tags, which many templates add, are escaped inside."""
    return [{"role": "tool", "content": as_content(_escaped(result))} for result in results]


def _escaped(result: Content) -> list[dict[str, Any]]:
    parts = parts_of({"content": result})
    return [
        {**one, "text": one["text"].replace("tool_response>", "tool_response >")} if "text" in one else one
        for one in parts
    ]


def dropping_results(keep_results: int, *, tagged: bool = True) -> History:
    """Return the method ``context`` of an environment that shows the results of the last answers with calls only.

    Args:
        keep_results: Number of answers whose results stay; ``(dropped)`` takes the place of older ones.
        tagged: Whether results are in the tags of :func:`as_observation`.

    Raises:
        ValueError: If the number is below 1.
    """
    note = LastObservations.note
    return LastObservations(keep_results, str(as_observation([note])) if tagged else note)


def describe_tools(schemas: Sequence[dict[str, Any]], call_format: CallFormat = "hermes") -> str:
    """Describe the tools and the format of calls in text, for models whose chat template does not list tools.

    Args:
        schemas: Schemas from ``transformers.utils.get_json_schema``.
        call_format: ``"hermes"`` (also for Qwen) or ``"llama3"``.
    """
    listed = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    return (
        f"These tools can be called:\n<tools>\n{listed}\n</tools>\nTo call one, write\n{CALL_EXAMPLES[call_format]}\n"
        "Its result comes back in <tool_response> tags. When you know the final answer, write it without calling a tool."
    )


def _shown(result: Any) -> Content:
    parts = [{"type": "image", "image": result}] if is_image(result) else result
    if isinstance(parts, list) and any(isinstance(part, dict) and is_image(part.get("image")) for part in parts):
        return as_content(map(read_part, parts))
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def _failure(error: BaseException) -> str:
    if isinstance(error, (IsolationError, _NoResultError)):
        raise error
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    try:
        return f"{_FAILED}{kind}{error}"
    except BaseException as second:  # of its __str__
        pass_on_interrupt(second)
        return f"{_FAILED}{describe_error(error)}"
