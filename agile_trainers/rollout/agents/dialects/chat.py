"""Chat Completions, the dialect that most clients speak (https://platform.openai.com/docs/api-reference/chat)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agile_trainers.rollout.agents.dialects import base
from agile_trainers.rollout.agents.dialects.base import Dialect, Event, checked, get, required
from agile_trainers.rollout.agents.requests import Answer, ChatRequest, Choice, Refusal
from agile_trainers.types import Message

PREFIX = "chatcmpl-"
_TEXTS = ("text", "refusal")
_IMAGES: dict[str, base.ImageOf] = {
    "image_url": lambda part, where: required(
        required(part, "image_url", dict, where), "url", str, f"{where}.image_url"
    )
}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_THE_RUNS = "the run's settings decide what the model sees"
_REFUSED = {
    "functions": "send the functions as `tools`",
    "function_call": "use `tools` and `tool_choice`",
    "audio": "the model reads and writes text only",
    "web_search_options": "the endpoint has no tools of its own; call a search of yours",
    "chat_template": _THE_RUNS,
    "chat_template_kwargs": f"{_THE_RUNS} (`chat_template_kwargs` of the configuration)",
    "documents": f"{_THE_RUNS}; write documents into a message",
    "continue_final_message": "an answer begins where the model's turn begins",
    "echo": "an answer has no prompt in it",
    "include_stop_str_in_output": "an answer ends before its stop string; add it in the agent",
    "truncate_prompt_tokens": "nothing is left out here; do it in the agent",
    "prompt_logprobs": "only an answer has log-probs; leave it out",
}
_CONSTRAINTS = (
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "grammar", "bad_words",
    "allowed_token_ids", "ignore_eos", "min_tokens", "stop_token_ids", "best_of", "use_beam_search",
)  # fmt: skip
"""Settings of vLLM and others that ask for another distribution."""


def read(body: dict[str, Any]) -> ChatRequest:
    """Read a request.

    Raises:
        Refusal: If a value has the wrong type, or the request asks for what the model cannot do.
    """
    base.refuse(body, _REFUSED)
    n = base.at_least_one(body, "n")
    if n is not None and n > base.MOST_CHOICES:
        raise Refusal(f"`n` is {n}; expected at most {base.MOST_CHOICES}.")
    if unheard := [kind for kind in get(body, "modalities", list) or () if kind != "text"]:
        raise Refusal(f"`modalities` has {base.shown(unheard[0])}; expected 'text' alone: the model writes text only.")
    get(body, "logit_bias", dict)
    get(body, "reasoning_effort", str)
    get(body, "top_logprobs", int)
    limits = [base.at_least_one(body, name) for name in ("max_tokens", "max_completion_tokens")]
    choice = base.tool_choice(body)
    form = base.text_format(body.get("response_format"), "response_format")
    constraints = {name: body[name] for name in _CONSTRAINTS if body.get(name) and (name, body[name]) != ("best_of", 1)}
    if choice not in (None, "auto", "none"):
        constraints["tool_choice"] = choice
    if form is not None:
        constraints["response_format"] = form
    messages = [_message(item, f"messages[{index}]") for index, item in enumerate(required(body, "messages", list))]
    tools = [_tool(item, f"tools[{index}]") for index, item in enumerate(get(body, "tools", list) or ())]
    return ChatRequest(
        model=required(body, "model", str),
        messages=base.not_empty(messages, "messages"),
        tools=tools,
        n=n or 1,
        max_tokens=min((limit for limit in limits if limit is not None), default=None),
        stop=base.stops(body.get("stop"), "stop"),
        logprobs=bool(get(body, "logprobs", bool)),
        stream=bool(get(body, "stream", bool)),
        stream_usage=bool(get(get(body, "stream_options", dict) or {}, "include_usage", bool, "stream_options")),
        calls_tools=choice != "none",
        sampling=base.settings(body, "logit_bias", "reasoning_effort"),
        constraints=constraints,
    )


def _message(item: Any, where: str) -> Message:
    role = base.word_of(required(checked(item, dict, where), "role", str, where), _ROLES, f"{where}.role")
    base.refuse(item, {"audio": "the model reads and writes text only", "function_call": "send `tool_calls`"})
    images = None if role == "assistant" else _IMAGES
    content = base.content_of(item.get("content"), f"{where}.content", _TEXTS, images)
    message: Message = {"role": _ROLES[role], "content": content}
    name = get(item, "name", str, where)
    if name is not None:
        message["name"] = name
    if role == "tool":
        message["tool_call_id"] = required(item, "tool_call_id", str, where)
    calls = get(item, "tool_calls", list, where)
    if calls and role != "assistant":
        raise Refusal(f"`{where}.tool_calls` is in a message of role {role!r}; expected it in the assistant's alone.")
    if calls:
        message["tool_calls"] = [_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]
    return message


def _call(item: Any, where: str) -> dict[str, Any]:
    function = _function(item, where)
    arguments = function.get("arguments")
    if not isinstance(arguments, (str, dict, type(None))):
        raise Refusal(f"`{where}.function.arguments` is {base.shown(arguments)}; expected JSON as text.")
    return base.tool_call(
        required(item, "id", str, where), required(function, "name", str, f"{where}.function"), arguments
    )


def _tool(item: Any, where: str) -> dict[str, Any]:
    return base.tool(_function(item, where), f"{where}.function")


def _function(item: Any, where: str) -> dict[str, Any]:
    kind = get(checked(item, dict, where), "type", str, where)
    if kind not in (None, "function"):
        raise Refusal(f"`{where}.type` is {base.shown(kind)}; expected 'function', the only kind of tool there is.")
    function: dict[str, Any] = required(item, "function", dict, where)
    return function


# ------------------------------------------------------------------------------------------------------------ writing


def write(answer: Answer, request: ChatRequest) -> dict[str, Any]:
    """Write an answer as a ``chat.completion``."""
    return {
        "id": PREFIX + answer.id,
        "object": "chat.completion",
        "created": answer.created,
        "model": answer.model,
        "choices": [
            {
                "index": index,
                "message": _answer_message(choice),
                "logprobs": _logprobs(choice, request),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(answer.choices)
        ],
        "usage": _usage(answer),
        "system_fingerprint": None,
    }


def events(answer: Answer, request: ChatRequest) -> Iterator[Event]:
    """Write an answer as ``chat.completion.chunk`` events, a choice after the other."""

    def chunk(choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> Event:
        return Event(
            {
                "id": PREFIX + answer.id,
                "object": "chat.completion.chunk",
                "created": answer.created,
                "model": answer.model,
                "system_fingerprint": None,
                "choices": choices,
                **({"usage": usage} if request.stream_usage else {}),
            }
        )

    def delta(index: int, finish_reason: str | None = None, logprobs: Any = None, **fields: Any) -> Event:
        return chunk([{"index": index, "delta": fields, "logprobs": logprobs, "finish_reason": finish_reason}])

    for index, choice in enumerate(answer.choices):
        logprobs = _logprobs(choice, request)
        yield delta(index, role="assistant", content="" if choice.text or not choice.tool_calls else None, refusal=None)
        if choice.text or logprobs:
            yield delta(index, logprobs=logprobs, **({"content": choice.text} if choice.text else {}))
        for number, call in enumerate(choice.tool_calls):
            begun = {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
            yield delta(index, tool_calls=[{"index": number, **begun}])
            yield delta(index, tool_calls=[{"index": number, "function": {"arguments": call.text}}])
        yield delta(index, choice.finish_reason)
    if request.stream_usage:
        yield chunk([], _usage(answer))
    yield Event("[DONE]")


def _answer_message(choice: Choice) -> dict[str, Any]:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.text}}
        for call in choice.tool_calls
    ]
    content = choice.text if choice.text or not calls else None
    return {"role": "assistant", "content": content, "refusal": None, **({"tool_calls": calls} if calls else {})}


def _logprobs(choice: Choice, request: ChatRequest) -> dict[str, Any] | None:
    return {"content": base.logprobs(choice), "refusal": None} if request.logprobs else None


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


CHAT = Dialect("Chat Completions", "/chat/completions", PREFIX, read, write, events, base.openai_error)
