"""Responses, the dialect of OpenAI's newer clients (https://platform.openai.com/docs/api-reference/responses)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agile_trainers.rollout.agents.dialects import base
from agile_trainers.rollout.agents.dialects.base import Dialect, Event, checked, get, required
from agile_trainers.rollout.agents.requests import Answer, CalledTool, ChatRequest, Refusal
from agile_trainers.types import Message

PREFIX = "resp_"
_TEXTS = ("input_text", "output_text", "text", "refusal")
_IMAGES: dict[str, base.ImageOf] = {"input_image": lambda part, where: required(part, "image_url", str, where)}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_LOGPROBS = "message.output_text.logprobs"
_REFUSED = {
    "background": "answers are not kept for later; leave it out",
    "conversation": "conversations are not kept; send the items, or `previous_response_id`",
    "prompt": "there are no stored prompts; send `instructions` and `input`",
    "context_management": "nothing is left out or summarized here; do it in the agent",
}


def read(body: dict[str, Any]) -> ChatRequest:
    """Read a request.

    Raises:
        Refusal: If a value has the wrong type, or the request asks for what the model cannot do.
    """
    base.refuse(body, _REFUSED)
    instructions = get(body, "instructions", str)
    choice = base.tool_choice(body)
    text = get(body, "text", dict) or {}
    form = base.text_format(text.get("format"), "text.format")
    constraints = {} if choice in (None, "auto", "none") else {"tool_choice": choice}
    if form is not None:
        constraints["response_format"] = form
    get(body, "reasoning", dict)
    truncation = get(body, "truncation", str)
    get(body, "top_logprobs", int)
    previous = get(body, "previous_response_id", str)
    messages = [{"role": "system", "content": instructions}] if instructions else []
    return ChatRequest(
        model=required(body, "model", str),
        messages=base.not_empty(messages + _input(body.get("input")), "input"),
        tools=[_tool(item, f"tools[{index}]") for index, item in enumerate(get(body, "tools", list) or ())],
        max_tokens=base.at_least_one(body, "max_output_tokens"),
        logprobs=_LOGPROBS in (get(body, "include", list) or ()),
        stream=bool(get(body, "stream", bool)),
        calls_tools=choice != "none",
        sampling=base.settings(body, "reasoning") | ({"truncation": truncation} if truncation == "auto" else {}),
        constraints=constraints,
        instructed=bool(instructions),
        previous=None if previous is None else previous.removeprefix(PREFIX),
    )


def _input(value: Any) -> list[Message]:
    """Read the input: a text, or items. The calls of an answer are items after its message."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise Refusal(f"`input` is {base.shown(value)}; expected text or a list of items.")
    messages: list[Message] = []
    calling = False  # whether the last item was part of an answer, to which further calls belong
    for index, item in enumerate(value):
        where = f"input[{index}]"
        kind = get(checked(item, dict, where), "type", str, where) or "message"
        if kind == "message":
            messages.append(_message(item, where))
            calling = messages[-1]["role"] == "assistant"
        elif kind == "function_call":
            call = base.tool_call(
                required(item, "call_id", str, where),
                required(item, "name", str, where),
                get(item, "arguments", str, where),
            )
            if not calling:
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
            calling = True
        elif kind == "function_call_output":
            output = base.content_of(item.get("output"), f"{where}.output", _TEXTS, _IMAGES)
            messages.append({"role": "tool", "content": output, "tool_call_id": required(item, "call_id", str, where)})
            calling = False
        elif kind == "item_reference":
            raise Refusal(f"`{where}` refers to a stored item; items are not kept, send the item itself.")
        elif kind != "reasoning":
            raise Refusal(
                f"`{where}.type` is {base.shown(kind)}; expected message, function_call, function_call_output or reasoning. "
                "The endpoint has no tools of its own."
            )
    return messages


def _message(item: dict[str, Any], where: str) -> Message:
    role = base.word_of(required(item, "role", str, where), _ROLES, f"{where}.role")
    images = None if role == "assistant" else _IMAGES
    content = base.content_of(item.get("content"), f"{where}.content", _TEXTS, images)
    return {"role": _ROLES[role], "content": content}


def _tool(item: Any, where: str) -> dict[str, Any]:
    kind = required(checked(item, dict, where), "type", str, where)
    if kind != "function":
        raise Refusal(
            f"`{where}.type` is {base.shown(kind)}; expected 'function': the endpoint has no tools of its own, "
            "pass a function of yours."
        )
    return base.tool(item, where)


# ------------------------------------------------------------------------------------------------------------ writing


def write(answer: Answer, request: ChatRequest) -> dict[str, Any]:
    """Write an answer as a ``response``."""
    done = answer.choices[0].finish_reason != "length"
    return _response(answer, request, "completed" if done else "incomplete", _output(answer, request))


def events(answer: Answer, request: ChatRequest) -> Iterator[Event]:
    """Write an answer as the events of a response, numbered from 0."""
    number = -1

    def event(kind: str, **fields: Any) -> Event:
        nonlocal number
        number += 1
        return Event({"type": kind, "sequence_number": number, **fields}, kind)

    begun = _response(answer, request, "in_progress", [])
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for index, item in enumerate(_output(answer, request)):
        at = {"item_id": item["id"], "output_index": index}
        if item["type"] == "message":
            part = item["content"][0]
            empty = {**part, "text": "", "logprobs": []}
            read_back = [
                {name: token[name] for name in ("token", "logprob", "top_logprobs")} for token in part["logprobs"]
            ]
            open_item = {**item, "status": "in_progress", "content": []}
            yield event("response.output_item.added", output_index=index, item=open_item)
            yield event("response.content_part.added", **at, content_index=0, part=empty)
            if part["text"]:
                yield event("response.output_text.delta", **at, content_index=0, delta=part["text"], logprobs=read_back)
            yield event("response.output_text.done", **at, content_index=0, text=part["text"], logprobs=read_back)
            yield event("response.content_part.done", **at, content_index=0, part=part)
        else:
            open_item = {**item, "status": "in_progress", "arguments": ""}
            yield event("response.output_item.added", output_index=index, item=open_item)
            yield event("response.function_call_arguments.delta", **at, delta=item["arguments"])
            yield event("response.function_call_arguments.done", **at, name=item["name"], arguments=item["arguments"])
        yield event("response.output_item.done", output_index=index, item=item)
    response = write(answer, request)
    yield event(f"response.{response['status']}", response=response)


def _output(answer: Answer, request: ChatRequest) -> list[dict[str, Any]]:
    """The items of an answer: its message unless there are calls alone, then the calls."""
    choice = answer.choices[0]
    status = "incomplete" if choice.finish_reason == "length" else "completed"
    logprobs = base.logprobs(choice) if request.logprobs else []
    part = {"type": "output_text", "text": choice.text, "annotations": [], "logprobs": logprobs}
    message = {
        "id": f"msg_{answer.id}", "type": "message", "role": "assistant", "status": status, "content": [part],
    }  # fmt: skip
    items = [message] if choice.text or not choice.tool_calls else []
    return items + [_call_item(answer, index, call) for index, call in enumerate(choice.tool_calls)]


def _call_item(answer: Answer, index: int, call: CalledTool) -> dict[str, Any]:
    return {
        "id": f"fc_{answer.id}{index}",
        "type": "function_call",
        "status": "completed",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.text,
    }


def _response(answer: Answer, request: ChatRequest, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    finished = status != "in_progress"
    tools = [{"type": "function", "strict": False, "description": None, **tool["function"]} for tool in request.tools]
    return {
        "id": PREFIX + answer.id,
        "object": "response",
        "created_at": answer.created,
        "completed_at": answer.created if status == "completed" else None,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": None,
        "max_output_tokens": request.max_tokens,
        "max_tool_calls": None,
        "metadata": {},
        "model": answer.model,
        "output": output,
        "parallel_tool_calls": request.sampling.get("parallel_tool_calls", True),
        "previous_response_id": None if request.previous is None else PREFIX + request.previous,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto" if request.calls_tools else "none",
        "tools": tools,
        "top_p": None,
        "truncation": "disabled",
        "usage": _usage(answer) if finished else None,
        "user": None,
    }


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


RESPONSES = Dialect("Responses", "/responses", PREFIX, read, write, events, base.openai_error)
