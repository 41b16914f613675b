"""Messages, the dialect of Anthropic's clients (https://docs.anthropic.com/en/api/messages)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agile_trainers.rollout.agents.dialects import base
from agile_trainers.rollout.agents.dialects.base import Dialect, Event, checked, get, required
from agile_trainers.rollout.agents.requests import Answer, ChatRequest, Refusal
from agile_trainers.types import Message

PREFIX = "msg_"
_TEXTS = ("text",)
_ROLES = ("user", "assistant", "system")
_CHOICES = ("auto", "none", "any", "tool")
_STOPPED = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
_REFUSED = {
    "container": "the endpoint runs no code",
    "mcp_servers": "the endpoint has no tools of its own; call the server in the agent",
    "context_management": "nothing is left out or summarized here; do it in the agent",
}


def _image(part: dict[str, Any], where: str) -> str:
    source = required(part, "source", dict, where)
    kind = required(source, "type", str, f"{where}.source")
    if kind != "base64":
        return str(source.get("url") or kind)
    media = required(source, "media_type", str, f"{where}.source")
    return f"data:{media};base64,{required(source, 'data', str, f'{where}.source')}"


_IMAGES: dict[str, base.ImageOf] = {"image": _image}


def read(body: dict[str, Any]) -> ChatRequest:
    """Read a request.

    Raises:
        Refusal: If a value has the wrong type, or the request asks for what the model cannot do.
    """
    base.refuse(body, _REFUSED)
    system = base.content_of(body.get("system"), "system", _TEXTS)
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for index, item in enumerate(base.not_empty(required(body, "messages", list), "messages")):
        messages += _messages(item, f"messages[{index}]")
    choice = get(body, "tool_choice", dict)
    kind = None if choice is None else required(choice, "type", str, "tool_choice")
    if kind is not None:
        base.word_of(kind, _CHOICES, "tool_choice.type")
    single = get(choice or {}, "disable_parallel_tool_use", bool, "tool_choice")
    constraints: dict[str, Any] = {"tool_choice": choice} if kind in ("any", "tool") else {}
    output = get(body, "output_config", dict) or {}
    for where, form in (("output_config.format", output.get("format")), ("output_format", body.get("output_format"))):
        if (form := base.text_format(form, where)) is not None:
            constraints["response_format"] = form
    get(body, "thinking", dict)
    effort = get(output, "effort", str, "output_config")
    return ChatRequest(
        model=required(body, "model", str),
        messages=messages,
        tools=[_tool(item, f"tools[{index}]") for index, item in enumerate(get(body, "tools", list) or ())],
        max_tokens=base.at_least_one(body, "max_tokens"),
        stop=base.stops(body.get("stop_sequences"), "stop_sequences"),
        stream=bool(get(body, "stream", bool)),
        calls_tools=kind != "none",
        sampling={
            **base.settings(body, "thinking"),
            **({} if effort is None else {"effort": effort}),
            **({"disable_parallel_tool_use": True} if single else {}),
        },
        constraints=constraints,
    )


def _messages(item: Any, where: str) -> list[Message]:
    """Read a message; the results of tools in it are messages of their own."""
    role = base.word_of(required(checked(item, dict, where), "role", str, where), _ROLES, f"{where}.role")
    content = item.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": base.content_of(content, f"{where}.content", _TEXTS)}]
    messages: list[Message] = []
    for index, block in enumerate(content):
        at = f"{where}.content[{index}]"
        kind = required(checked(block, dict, at), "type", str, at)
        if kind == "tool_result" and role == "user":
            result = base.content_of(block.get("content"), f"{at}.content", _TEXTS, _IMAGES)
            messages.append(
                {"role": "tool", "content": result, "tool_call_id": required(block, "tool_use_id", str, at)}
            )
            continue
        if kind in ("thinking", "redacted_thinking") and role == "assistant":
            continue
        if not messages or messages[-1]["role"] != role:
            messages.append({"role": role, "content": []})
        if kind == "tool_use" and role == "assistant":
            call = base.tool_call(
                required(block, "id", str, at), required(block, "name", str, at), get(block, "input", dict, at)
            )
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            images = _IMAGES if role == "user" else None
            messages[-1]["content"].append(base.part_of(block, at, _TEXTS, images))
    for message in messages:
        if message["role"] == role:
            message["content"] = base.joined(message["content"])
    return messages or [{"role": role, "content": ""}]


def _tool(item: Any, where: str) -> dict[str, Any]:
    kind = get(checked(item, dict, where), "type", str, where)
    if kind not in (None, "custom"):
        raise Refusal(
            f"`{where}.type` is {base.shown(kind)}; expected 'custom': the endpoint has no tools of its own, "
            "and the model knows none by name alone. Send `name`, `description` and `input_schema`."
        )
    return base.tool(item, where, "input_schema")


# ------------------------------------------------------------------------------------------------------------ writing


def write(answer: Answer, request: ChatRequest) -> dict[str, Any]:
    """Write an answer as a ``message``."""
    return {
        **_begun(answer),
        "content": _blocks(answer),
        **_end(answer),
        "usage": _usage(answer, answer.completion_tokens),
    }


def events(answer: Answer, request: ChatRequest) -> Iterator[Event]:
    """Write an answer as the events of a message."""

    def event(name: str, **fields: Any) -> Event:
        return Event({"type": name, **fields}, name)

    begun = {**_begun(answer), "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(answer, 0)}
    yield event("message_start", message=begun)
    for index, block in enumerate(_blocks(answer)):
        if block["type"] == "text":
            empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            partial = answer.choices[0].tool_calls[index - len(_blocks(answer))].text
            empty, delta = {**block, "input": {}}, {"type": "input_json_delta", "partial_json": partial}
        yield event("content_block_start", index=index, content_block=empty)
        yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    yield event("message_delta", delta=_end(answer), usage=_usage(answer, answer.completion_tokens))
    yield event("message_stop")


def _begun(answer: Answer) -> dict[str, Any]:
    return {"id": PREFIX + answer.id, "type": "message", "role": "assistant", "model": answer.model}


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    """The blocks of an answer: its text unless there are calls alone, then the calls."""
    choice = answer.choices[0]
    text = [{"type": "text", "text": choice.text, "citations": None}] if choice.text or not choice.tool_calls else []
    return text + [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments} for call in choice.tool_calls
    ]


def _end(answer: Answer) -> dict[str, Any]:
    choice = answer.choices[0]
    if choice.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop}
    return {"stop_reason": _STOPPED[choice.finish_reason], "stop_sequence": None}


def _usage(answer: Answer, output_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "output_tokens": output_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def error(refusal: Refusal) -> dict[str, Any]:
    """Write a refusal."""
    kind = _ERRORS.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": refusal.message}, "request_id": None}


MESSAGES = Dialect("Messages", "/messages", PREFIX, read, write, events, error)
