"""Makes of a sampled answer what the client gets: its text up to a stop string, and the tool calls in it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from hashlib import sha256

from agile_trainers.envs.tools.toolbox import ToolCall, parse_tool_calls
from agile_trainers.rollout.agents.dialects.base import parse as strict_json
from agile_trainers.rollout.agents.requests import CalledTool, Choice, Refusal
from agile_trainers.types import Message

_HERMES = re.compile(r"\s*<tool_call>.*?</tool_call>\s*", re.DOTALL)
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_ID_LENGTH = 9
"""Characters of a tool call's id: the template of Mistral takes no other length."""


def length_to_stop(ids: Sequence[int], stop: Sequence[str], decode: Callable[[list[int]], str]) -> int | None:
    """Return the number of tokens up to the one that completes a stop string; None if there is none.

    Args:
        ids: The sampled tokens.
        stop: The stop strings.
        decode: Decodes tokens.
    """

    def stops(length: int) -> bool:
        text = decode(list(ids[:length]))
        return any(one in text for one in stop)

    if not stop or not stops(len(ids)):
        return None
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if stops(middle) else (middle + 1, high)
    return low


def cut_at_stop(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """Return the text before the first stop string in it, and that."""
    places = {one: text.find(one) for one in stop if one in text}
    first = min(places, key=places.__getitem__) if places else None
    return (text, None) if first is None else (text[: places[first]], first)


def tool_calls(
    text: str, identity: bytes, parse: Callable[[], Message | None] = lambda: None
) -> tuple[str, tuple[CalledTool, ...]]:
    """Part the tool calls of an answer from its other text.

    An answer with a call that broke off or is malformed is text as a whole: its author sees what the model wrote.

    Args:
        text: The answer.
        identity: The source of the calls' ids, so that they repeat with the tokens.
        parse: Parses an answer that has no call in the form of Hermes or Llama 3, into a message; None if nothing can.

    Returns:
        The other text and the calls.
    """
    found = parse_tool_calls(text)
    calls = [call for call in found if isinstance(call, ToolCall)]
    if calls and len(calls) == len(found):
        rest = _HERMES.sub("", text) if "<tool_call>" in text else ""
    elif calls or (message := parse()) is None or not message.get("tool_calls"):
        return text, ()
    else:
        functions = [one["function"] for one in message["tool_calls"]]
        if not all(isinstance(one["name"], str) and isinstance(one["arguments"], dict) for one in functions):
            return text, ()
        rest, calls = message["content"], [ToolCall(one["name"], one["arguments"]) for one in functions]
    try:
        for call in calls:
            strict_json(json.dumps(call.arguments))
    except Refusal:  # NaN, half a surrogate pair: no client could send it back
        return text, ()
    return rest, tuple(
        CalledTool(_call_id(identity, place), call.name, call.arguments) for place, call in enumerate(calls)
    )


def as_message(choice: Choice) -> Message:
    """Return the message that a client has of an answer."""
    message: Message = {"role": "assistant", "content": choice.text}
    if choice.tool_calls:
        message["tool_calls"] = [
            {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
            for one in choice.tool_calls
        ]
    return message


def _call_id(identity: bytes, place: int) -> str:
    number, letters = int.from_bytes(sha256(identity + bytes([place % 256, place // 256])).digest()), ""
    for _ in range(_ID_LENGTH):
        number, digit = divmod(number, len(_DIGITS))
        letters += _DIGITS[digit]
    return letters
