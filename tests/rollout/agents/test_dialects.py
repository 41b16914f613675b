"""Dialects of chat clients: what is read and refused, and what is written, as the real packages read it."""

from __future__ import annotations

import base64
import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from answering import CREATED, said

from agile_environments.colours import bitmap
from agile_trainers.rollout.agents.dialects import DIALECTS
from agile_trainers.rollout.agents.dialects.base import DEEPEST, DEEPEST_BODY, Dialect, ascii_json, parse
from agile_trainers.rollout.agents.dialects.chat import CHAT
from agile_trainers.rollout.agents.dialects.messages import MESSAGES
from agile_trainers.rollout.agents.dialects.responses import RESPONSES
from agile_trainers.rollout.agents.requests import Answer, CalledTool, ChatRequest, Choice, Refusal, SampledToken
from agile_trainers.types import Image, images_of

CLIENTS = "the clients' own packages are not installed: pip install 'agile-trainers[dev]'"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "Tell the weather.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "call0", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}

IMAGE = Image(bitmap((1, 2, 3)))
DATA = base64.b64encode(IMAGE.data).decode()
URL = f"data:image/bmp;base64,{DATA}"
IMAGE_PART = {"type": "image", "image": IMAGE}


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


CHAT_BODY = {
    "model": "policy",
    "messages": [
        {"role": "developer", "content": "Be short."},
        {
            "role": "user",
            "name": "eva",
            "content": [
                {"type": "text", "text": "How is "},
                {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
                {"type": "text", "text": "it?"},
            ],
        },
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "tool_calls": [
                {
                    "id": "call0",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{ "city" : "K\\u00f6ln"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call0", "content": [{"type": "image_url", "image_url": {"url": URL}}]},
    ],
    "tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}],
    "tool_choice": "auto",
    "n": 3,
    "max_completion_tokens": 9,
    "max_tokens": 11,
    "stop": ["\n", "END"],
    "logprobs": True,
    "top_logprobs": 5,
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.2,
    "seed": 5,
    "response_format": {"type": "text"},
    "parallel_tool_calls": False,
    "metadata": {"a": "b"},
    "store": None,
    "user": "me",
}
RESPONSES_BODY = {
    "model": "policy",
    "instructions": "Be short.",
    "input": [
        {"role": "user", "content": [
            {"type": "input_text", "text": "How is "}, {"type": "input_image", "image_url": URL, "detail": "auto"},
            {"type": "input_text", "text": "it?"},
        ]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "call0", "name": "weather", "arguments": '{"city":"Köln"}'},
        {"type": "function_call_output", "call_id": "call0", "output": [{"type": "input_image", "image_url": URL}]},
    ],
    "tools": [{"type": "function", **FUNCTION, "strict": True}],
    "max_output_tokens": 9,
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 0,
    "previous_response_id": "resp_a7",
    "text": {"format": {"type": "text"}},
    "reasoning": {"effort": "low"},
    "top_p": 0.5,
    "stream": True,
    "store": False,
}  # fmt: skip


def _image_block() -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/bmp", "data": DATA}}


MESSAGES_BODY = {
    "model": "policy-frozen",
    "max_tokens": 9,
    "system": [
        {"type": "text", "text": "Be"},
        {"type": "text", "text": "short.", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        {"role": "user", "content": "How is it?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "call0", "name": "weather", "input": {"city": "Köln"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call0", "content": [_image_block()]},
                {"type": "text", "text": "And "},
                _image_block(),
                {"type": "text", "text": "now?"},
            ],
        },
    ],
    "tools": [{"name": "weather", "description": "Tell the weather.", "input_schema": SCHEMA}],
    "tool_choice": {"type": "none"},
    "stop_sequences": ["END"],
    "top_k": 5,
    "thinking": {"type": "disabled"},
    "metadata": {"user_id": "me"},
}
BODIES: list[tuple[Dialect, dict[str, Any]]] = [
    (CHAT, CHAT_BODY), (RESPONSES, RESPONSES_BODY), (MESSAGES, MESSAGES_BODY),
]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ reading


def test_chat_completions_are_read() -> None:
    assert CHAT.read(CHAT_BODY) == ChatRequest(
        model="policy",
        messages=[
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": [_text("How is "), IMAGE_PART, _text("it?")], "name": "eva"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": [IMAGE_PART], "tool_call_id": "call0"},
        ],
        tools=[TOOL],
        n=3,
        max_tokens=9,
        stop=("\n", "END"),
        logprobs=True,
        stream=True,
        stream_usage=True,
        sampling={"temperature": 0.2, "seed": 5, "parallel_tool_calls": False},
    )


def test_responses_are_read() -> None:
    assert RESPONSES.read(RESPONSES_BODY) == ChatRequest(
        model="policy",
        messages=[
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": [_text("How is "), IMAGE_PART, _text("it?")]},
            {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
            {"role": "tool", "content": [IMAGE_PART], "tool_call_id": "call0"},
        ],
        tools=[TOOL],
        max_tokens=9,
        logprobs=True,
        stream=True,
        sampling={"top_p": 0.5, "reasoning": {"effort": "low"}},
        instructed=True,
        previous="a7",
    )


def test_messages_are_read() -> None:
    assert MESSAGES.read(MESSAGES_BODY) == ChatRequest(
        model="policy-frozen",
        messages=[
            {"role": "system", "content": "Be\nshort."},
            {"role": "user", "content": "How is it?"},
            {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
            {"role": "tool", "content": [IMAGE_PART], "tool_call_id": "call0"},
            {"role": "user", "content": [_text("And "), IMAGE_PART, _text("now?")]},
        ],
        tools=[TOOL],
        max_tokens=9,
        stop=("END",),
        calls_tools=False,
        sampling={"top_k": 5, "thinking": {"type": "disabled"}},
    )


def test_calls_of_one_response_are_one_message_and_those_after_results_another() -> None:
    def call(id: str) -> dict[str, str]:
        return {"type": "function_call", "call_id": id, "name": "weather", "arguments": "{}"}

    def result(id: str) -> dict[str, str]:
        return {"type": "function_call_output", "call_id": id, "output": id}

    items = [{"role": "user", "content": "hi"}, call("1"), call("2"), result("1"), result("2"), call("3"), result("3")]
    messages = RESPONSES.read({"model": "policy", "input": items}).messages
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "assistant", "tool"]
    assert [[call["id"] for call in message.get("tool_calls", ())] for message in messages] == [
        [], ["1", "2"], [], [], ["3"], [],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ('{"b": 1, "a": [2]}', {"a": [2], "b": 1}),
        ("", {}),
        (None, {}),
        ({"a": 1}, {"a": 1}),
        ("[1]", "[1]"),
        ('{"a": 1', '{"a": 1'),
        ('{"a": NaN}', '{"a": NaN}'),
        (r'{"a": "\ud800"}', r'{"a": "\ud800"}'),
        ('{"a":' * 200 + "1" + "}" * 200, '{"a":' * 200 + "1" + "}" * 200),
    ],
    ids=["object", "empty", "null", "parsed", "list", "broken off", "NaN", "surrogate", "deep"],
)
def test_arguments_are_parsed_where_they_are_an_object(sent: Any, read: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": sent}}
    request = CHAT.read({"model": "policy", "messages": [{"role": "assistant", "tool_calls": [call]}]})
    assert request.messages[0]["tool_calls"][0]["function"]["arguments"] == read


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_the_least_that_can_be_sent(dialect: Dialect) -> None:
    messages = "hi" if dialect is RESPONSES else [{"role": "user", "content": "hi"}]
    body = {"model": "policy", "input" if dialect is RESPONSES else "messages": messages}
    assert dialect.read(body) == ChatRequest("policy", [{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("dialect", "fields", "constraints"),
    [
        (CHAT, {"tool_choice": "required"}, {"tool_choice": "required"}),
        (CHAT, {"tool_choice": {"type": "function", "function": {"name": "weather"}}}, {"tool_choice"}),
        (CHAT, {"response_format": {"type": "json_object"}}, {"response_format": {"type": "json_object"}}),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {}}}, {"response_format"}),
        (CHAT, {"guided_json": {"type": "object"}}, {"guided_json"}),
        (
            CHAT,
            {"best_of": 2, "stop_token_ids": [3], "use_beam_search": True},
            {"best_of", "stop_token_ids", "use_beam_search"},
        ),
        (CHAT, {"best_of": 1, "stop_token_ids": [], "use_beam_search": False}, {}),
        (RESPONSES, {"tool_choice": "required"}, {"tool_choice": "required"}),
        (RESPONSES, {"tool_choice": {"type": "function", "name": "weather"}}, {"tool_choice"}),
        (RESPONSES, {"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        (MESSAGES, {"tool_choice": {"type": "any"}}, {"tool_choice": {"type": "any"}}),
        (MESSAGES, {"tool_choice": {"type": "tool", "name": "weather"}}, {"tool_choice"}),
        (MESSAGES, {"tool_choice": {"type": "auto"}}, {}),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": {}}}}, {"response_format"}),
    ],
)
def test_what_asks_for_another_distribution_is_told_apart(dialect: Dialect, fields: Any, constraints: Any) -> None:
    read = dialect.read({**_body_of(dialect), **fields}).constraints
    assert read == constraints if isinstance(constraints, dict) else set(read) == constraints


@pytest.mark.parametrize("fields, sampling", [
    ((CHAT, {"parallel_tool_calls": True}), {}),
    ((RESPONSES, given := {"parallel_tool_calls": False, "truncation": "auto"}), given),
    ((RESPONSES, {"parallel_tool_calls": True, "truncation": "disabled"}), {}),
    ((MESSAGES, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}), {"disable_parallel_tool_use": True}),
    ((MESSAGES, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": False}}), {}),
])  # fmt: skip
def test_what_has_no_effect_is_recorded(fields: tuple[Dialect, Any], sampling: dict[str, Any]) -> None:
    """And not refused: clients send it by default."""
    dialect, changed = fields
    body = {**_body_of(dialect), **changed}
    for name in ("temperature", "seed", "top_p", "top_k", "reasoning", "thinking"):
        body.pop(name, None)
    request = dialect.read(body)
    assert request.sampling == sampling and request.constraints == {}
    if dialect is RESPONSES:
        answer = said("hi")
        assert dialect.write(answer, request)["parallel_tool_calls"] == changed["parallel_tool_calls"]


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_texts_of_a_message_are_lines_in_every_dialect(role: str) -> None:
    parts, whole = [_text("a"), _text("b")], [{"role": role, "content": "a\nb"}]
    for dialect, name in ((CHAT, "messages"), (MESSAGES, "messages"), (RESPONSES, "input")):
        body = {"model": "policy", name: [{"role": role, "content": parts}]}
        assert dialect.read(body).messages == whole


def _body_of(dialect: Dialect) -> dict[str, Any]:
    return next(body for other, body in BODIES if other is dialect)


# ------------------------------------------------------------------------------------------------------------ refusing

BROKEN = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


@pytest.mark.parametrize(
    ("dialect", "fields", "words"),
    [
        (CHAT, {"model": 3}, "`model` is 3; expected text"),
        (CHAT, {"model": None}, "`model` is missing"),
        (CHAT, {"messages": []}, "`messages` is empty"),
        (CHAT, {"messages": "hi"}, "`messages` is 'hi'; expected a list"),
        (
            CHAT,
            {"messages": [{"role": "robot", "content": ""}]},
            "`messages[0].role` is 'robot'; expected one of system",
        ),
        (CHAT, {"messages": [{"role": "user", "content": [BROKEN]}]}, "`messages[0].content[0]`: An image of 1 bytes"),
        (
            CHAT,
            {"messages": [{"role": "assistant", "content": [BROKEN]}]},
            "is 'image_url'; expected 'text' or 'refusal'",
        ),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "reads that and images"),
        (CHAT, {"messages": [{"role": "tool", "content": ""}]}, "`messages[0].tool_call_id` is missing"),
        (CHAT, {"messages": [{"role": "user", "content": "", "tool_calls": [CALL]}]}, "in the assistant's alone"),
        (CHAT, {"messages": [{"role": "user", "content": {"text": "x"}}]}, "expected text or a list of parts"),
        (CHAT, {"n": 0}, "`n` is 0; expected 1 or more"),
        (CHAT, {"n": 10**30}, "expected a whole number"),
        (CHAT, {"n": 129}, "`n` is 129; expected at most 128"),
        (CHAT, {"n": True}, "`n` is True; expected a whole number"),
        (CHAT, {"max_tokens": 0}, "`max_tokens` is 0"),
        (CHAT, {"stop": ["a", ""]}, "`stop` has ''"),
        (CHAT, {"stop": ["a"] * 129}, "`stop` has 129 texts; expected at most 128"),
        (MESSAGES, {"stop_sequences": ["a"] * 129}, "`stop_sequences` has 129 texts"),
        (CHAT, {"stream": "yes"}, "`stream` is 'yes'; expected true or false"),
        (CHAT, {"temperature": "hot"}, "`temperature` is 'hot'; expected a finite number"),
        (CHAT, {"temperature": float("nan")}, "expected a finite number"),
        (CHAT, {"tool_choice": "all"}, "`tool_choice` is 'all'"),
        (CHAT, {"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "`tools[0].type` is 'custom'"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": ""}}]}, "`tools[0].function.name` is empty"),
        (CHAT, {"response_format": "json"}, "`response_format` is 'json'; expected an object"),
        (CHAT, {"modalities": ["text", "audio"]}, "`modalities` has 'audio'"),
        (CHAT, {"functions": [{"name": "x"}]}, "send the functions as `tools`"),
        (CHAT, {"truncate_prompt_tokens": 5}, "nothing is left out here"),
        (CHAT, {"parallel_tool_calls": "no"}, "`parallel_tool_calls` is 'no'; expected true or false"),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, "`chat_template_kwargs` of the configuration"),
        (RESPONSES, {"input": None}, "`input` is None; expected text or a list"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "send the item itself"),
        (RESPONSES, {"input": [{"type": "computer_call"}]}, "`input[0].type` is 'computer_call'"),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, "`tools[0].type` is 'web_search'"),
        (RESPONSES, {"background": True}, "`background` is True, which is not supported"),
        (MESSAGES, {"system": 3}, "`system` is 3"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content[0].source` is missing"),
        (MESSAGES, {"messages": [{"role": "assistant", "content": [_image_block()]}]}, "is 'image'; expected 'text'"),
        (
            MESSAGES,
            {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]},
            "is 'tool_use'; expected 'text'",
        ),
        (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "`tools[0].type` is 'bash_20250124'"),
        (MESSAGES, {"tool_choice": {"type": "maybe"}}, "`tool_choice.type` is 'maybe'"),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_value(dialect: Dialect, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(Refusal) as raised:
        dialect.read({**_body_of(dialect), **fields})
    assert raised.value.status == 400 and words in raised.value.message
    assert "\n" not in raised.value.message and len(raised.value.message) < 400


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff{}", "not UTF-8"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": 1e999}', "1e999"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "not JSON"),
        (rb'{"a": "x\ud800"}', r"\ud800, half of a surrogate pair"),
        (rb'{"\udfff": 1}', r"\udfff"),
        (b"[" * 102 + b"]" * 102, "100 levels"),
        (b"[" * 1_000_000, "100 levels"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "100 levels"),
    ],
)
def test_what_is_not_plain_json_is_refused(body: bytes, words: str) -> None:
    with pytest.raises(Refusal) as raised:
        parse(body)
    assert words in raised.value.message


def test_plain_json_is_read_to_its_hundredth_level() -> None:
    assert parse(b"[" * 100 + b"]" * 100)
    assert parse(rb'{"a": "\ud83d\ude00 \u00e9"}') == {"a": "😀 é"}


JUNK = [
    None, True, False, 0, -1, 1, 10**40, 1.5, float("nan"), "", "x", "\ud800", [], [None], [[]], ["x"], [3], {}, {"type": 3},
    {"type": "text"}, {"type": "function"}, {"x": {}}, [{"type": "text", "text": 5}], [{"type": "message"}],
]  # fmt: skip


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key, child in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _places(child, (*path, key))


@pytest.mark.parametrize(("dialect", "body"), BODIES, ids=lambda value: getattr(value, "name", ""))
def test_junk_in_any_place_is_read_or_refused(dialect: Dialect, body: dict[str, Any]) -> None:
    """Every value of a body is replaced by every kind of junk, or removed: that gives a request or a 400."""
    read = refused = 0
    for path in list(_places(body))[1:]:
        for junk in [*JUNK, KeyError]:
            changed = copy.deepcopy(body)
            parent: Any = changed
            for key in path[:-1]:
                parent = parent[key]
            if junk is KeyError:
                del parent[path[-1]]
            else:
                parent[path[-1]] = copy.deepcopy(junk)
            try:
                request = dialect.read(changed)
            except Refusal as refusal:
                assert refusal.status == 400 and refusal.message
                ascii_json(dialect.error(refusal))
                refused += 1
            else:
                _check_form(request)
                read += 1
    assert read > 300 and refused > 300


def _check_form(request: ChatRequest) -> None:
    assert isinstance(request.model, str) and 1 <= request.n <= 128 and request.messages
    assert request.max_tokens is None or request.max_tokens >= 1
    assert all(isinstance(stop, str) and stop for stop in request.stop)
    assert {type(flag) for flag in (request.stream, request.logprobs, request.stream_usage, request.calls_tools)} == {
        bool
    }
    for message in request.messages:
        assert message["role"] in ("system", "user", "assistant", "tool")
        assert isinstance(message["content"], str) or images_of([message])
        assert message.keys() <= {"role", "content", "name", "tool_calls", "tool_call_id"}
        for call in message.get("tool_calls", ()):
            assert isinstance(call["id"], str) and call["type"] == "function"
            assert isinstance(call["function"]["name"], str) and isinstance(call["function"]["arguments"], (dict, str))
    for tool in request.tools:
        assert tool["type"] == "function" and isinstance(tool["function"]["name"], str)
        assert isinstance(tool["function"]["parameters"], dict)


# ------------------------------------------------------------------------------------------------------------- writing

TEXT, TOOLS = (
    said("It is fine."),
    said("I look.", ("weather", {"city": "Köln"}), ("weather", {"city": "Ulm", "days": [1, 2.5]})),
)
ANSWERS = {
    "text": TEXT,
    "cut off": said("It is", finish="length"),
    "empty": said(""),
    "tools": TOOLS,
    "tools alone": said("", ("weather", {})),
    "odd text": said('</s> "\n\u2028 😀'),
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
@pytest.mark.parametrize("logprobs", [False, True], ids=["", "logprobs"])
def test_chat_completions_as_the_openai_package_reads_them(answer: Answer, logprobs: bool) -> None:
    pytest.importorskip("openai", reason=CLIENTS)
    from openai.lib.streaming.chat import ChatCompletionStreamState
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    request = ChatRequest("policy", [], logprobs=logprobs, stream_usage=True)
    whole = ChatCompletion.model_validate(_sent(CHAT.write(answer, request)), strict=True)
    choice, [expected] = whole.choices[0], answer.choices
    assert whole.id == "chatcmpl-a1" and whole.created == CREATED and whole.model == "policy"
    assert (choice.message.content or "") == expected.text and choice.finish_reason == expected.finish_reason
    calls = [
        (call.id, call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or ()
    ]
    assert calls == [(call.id, call.name, call.arguments) for call in expected.tool_calls]
    assert choice.message.content is not None or calls
    if logprobs:
        assert [(token.token, token.logprob, token.bytes, token.top_logprobs) for token in choice.logprobs.content] == [
            (token.text, token.logprob, list(token.text.encode()), []) for token in expected.tokens
        ]
    else:
        assert choice.logprobs is None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (7, 3, 10)

    state = ChatCompletionStreamState()
    *chunks, done = CHAT.events(answer, request)
    for event in chunks:
        assert event.name is None
        state.handle_chunk(ChatCompletionChunk.model_validate(_sent(event.data), strict=True))
    assert done.encoded() == b"data: [DONE]\n\n"
    streamed = state.current_completion_snapshot.model_dump(exclude_unset=True, exclude_none=True)
    _same(streamed, whole.model_dump(exclude_none=True))


def _same(streamed: dict[str, Any], whole: dict[str, Any]) -> None:
    """A stream adds up to the whole answer, but for what the package's sums leave in it."""
    for choice in streamed["choices"]:
        for call in choice["message"].get("tool_calls", ()):
            call.pop("index")
            call["function"].pop("parsed_arguments", None)
        choice["message"].pop("parsed", None)
    assert streamed == whole


def test_n_choices_are_streamed_one_after_the_other() -> None:
    answer = Answer("a1", "policy", 0, (Choice("one"), Choice("two"), Choice("three", finish_reason="length")))
    *chunks, _ = CHAT.events(answer, ChatRequest("policy", [], n=3))
    written = CHAT.write(answer, ChatRequest("policy", [], n=3))["choices"]
    assert [choice["index"] for choice in written] == [0, 1, 2]
    for choice in written:
        mine = [chunk.data["choices"][0] for chunk in chunks if chunk.data["choices"][0]["index"] == choice["index"]]
        assert "".join(part["delta"].get("content", "") for part in mine) == choice["message"]["content"]
        assert [part["finish_reason"] for part in mine] == [None, None, choice["finish_reason"]]
    assert not any("usage" in chunk.data for chunk in chunks)


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
@pytest.mark.parametrize("logprobs", [False, True], ids=["", "logprobs"])
def test_responses_as_the_openai_package_reads_them(answer: Answer, logprobs: bool) -> None:
    pytest.importorskip("openai", reason=CLIENTS)
    from openai import omit
    from openai.lib.streaming.responses._responses import ResponseStreamState
    from openai.types.responses import Response, ResponseStreamEvent
    from pydantic import TypeAdapter

    request = ChatRequest("policy", [], [TOOL], logprobs=logprobs, max_tokens=9, previous="a7")
    sent = _sent(RESPONSES.write(answer, request))
    whole, [expected] = Response.model_validate(sent, strict=True), answer.choices
    assert whole.id == "resp_a1" and whole.previous_response_id == "resp_a7" and whole.output_text == expected.text
    assert whole.status == ("incomplete" if expected.finish_reason == "length" else "completed")
    calls = [
        (item.call_id, item.name, json.loads(item.arguments)) for item in whole.output if item.type == "function_call"
    ]
    assert calls == [(call.id, call.name, call.arguments) for call in expected.tool_calls]
    assert len({item.id for item in whole.output}) == len(whole.output) == len(calls) + bool(expected.text or not calls)
    if whole.output[0].type == "message":
        tokens = whole.output[0].content[0].logprobs
        assert [(token.token, token.logprob) for token in tokens] == (
            [(token.text, token.logprob) for token in expected.tokens] if logprobs else []
        )

    state = ResponseStreamState(text_format=omit, input_tools=[])
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    events = list(RESPONSES.events(answer, request))
    for number, event in enumerate(events):
        assert event.data["type"] == event.name and event.data["sequence_number"] == number
        adapter.validate_python(_sent(event.data), strict=True)
        state.handle_event(adapter.validate_python(_sent(event.data)))
    assert events[-1].data["response"] == sent
    added = [item.model_dump(exclude_unset=True) for item in state._ResponseStreamState__current_snapshot.output]
    for item, final in zip(added, sent["output"], strict=True):
        if item["type"] == "message":
            assert [part["text"] for part in item["content"]] == [part["text"] for part in final["content"]]
        else:
            assert item["arguments"] == final["arguments"] and item["call_id"] == final["call_id"]
    done = [event.data["item"] for event in events if event.name == "response.output_item.done"]
    assert done == sent["output"]


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
def test_messages_as_the_anthropic_package_reads_them(answer: Answer) -> None:
    pytest.importorskip("anthropic", reason=CLIENTS)
    from anthropic.lib.streaming._messages import accumulate_event
    from anthropic.types import Message, RawMessageStreamEvent
    from pydantic import TypeAdapter

    request = ChatRequest("policy", [])
    whole, [expected] = Message.model_validate(_sent(MESSAGES.write(answer, request)), strict=True), answer.choices
    assert whole.id == "msg_a1"
    assert "".join(block.text for block in whole.content if block.type == "text") == expected.text
    calls = [(block.id, block.name, block.input) for block in whole.content if block.type == "tool_use"]
    assert calls == [(call.id, call.name, call.arguments) for call in expected.tool_calls]
    assert len(whole.content) == len(calls) + bool(expected.text or not calls)
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    assert whole.stop_reason == reasons[expected.finish_reason] and whole.stop_sequence is None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (7, 3)

    adapter: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    snapshot: Any = None
    partial: dict[int, bytes] = {}
    for event in MESSAGES.events(answer, request):
        assert event.data["type"] == event.name
        adapter.validate_python(_sent(event.data), strict=True)
        read = adapter.validate_python(_sent(event.data))
        snapshot = accumulate_event(event=read, current_snapshot=snapshot, json_bufs=partial)
    streamed = snapshot.model_dump(exclude_none=True)
    for block in streamed["content"]:
        block.pop("parsed_output", None)
    assert streamed == whole.model_dump(exclude_none=True)


def test_a_stop_string_is_named_in_messages() -> None:
    answer = Answer("a1", "policy", 0, (Choice("x", stop="END"),))
    written = MESSAGES.write(answer, ChatRequest("policy", []))
    assert (written["stop_reason"], written["stop_sequence"]) == ("stop_sequence", "END")


def _sent(value: Any) -> Any:
    """What a client reads from the wire."""
    return json.loads(ascii_json(value))


def test_half_a_surrogate_pair_of_a_tool_call_and_half_a_character_of_a_token_can_be_sent() -> None:
    choice = Choice("�", (CalledTool("c", "f", {"x": "\ud800"}),), "tool_calls", (SampledToken("\ud800", -1.0),))
    answer = Answer("a1", "policy", 0, (choice,))
    for dialect in DIALECTS:
        request = ChatRequest("policy", [], logprobs=True)
        ascii_json(dialect.write(answer, request)).encode()
        assert b"".join(event.encoded() for event in dialect.events(answer, request)).isascii()


# ----------------------------------------------------------------------------------------------------------- echoes


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_that_is_sent_back_is_read_as_it_was_delivered(name: str) -> None:
    choice, request = ANSWERS[name].choices[0], ChatRequest("policy", [])
    chat = CHAT.write(ANSWERS[name], request)["choices"][0]["message"]
    responses = RESPONSES.write(ANSWERS[name], request)["output"]
    messages = MESSAGES.write(ANSWERS[name], request)["content"]
    user = {"role": "user", "content": "hi"}
    for dialect, body in (
        (CHAT, {"messages": [user, chat, user]}),
        (RESPONSES, {"input": [user, *responses, user]}),
        (MESSAGES, {"messages": [user, {"role": "assistant", "content": messages}, user]}),
    ):
        _, echo, _ = dialect.read({"model": "policy", **_sent(body)}).messages
        calls = [
            (call["id"], call["function"]["name"], call["function"]["arguments"]) for call in echo.get("tool_calls", ())
        ]
        assert echo["role"] == "assistant" and echo["content"] == choice.text
        assert calls == [(call.id, call.name, call.arguments) for call in choice.tool_calls]


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_the_deepest_arguments_that_are_a_call_can_be_sent_back(dialect: Dialect) -> None:
    arguments = {"x": parse("[" * (DEEPEST - 1) + "]" * (DEEPEST - 1))}
    parse(json.dumps(arguments))
    written = dialect.write(said("", ("f", arguments)), ChatRequest("policy", []))
    user = {"role": "user", "content": "hi"}
    body = {
        CHAT.name: {"messages": [user, written.get("choices", [{"message": None}])[0]["message"]]},
        RESPONSES.name: {"input": [user, *written.get("output", [])]},
        MESSAGES.name: {"messages": [user, {"role": "assistant", "content": written.get("content")}]},
    }[dialect.name]
    sent = parse(json.dumps({"model": "policy", **body}), DEEPEST_BODY)
    assert dialect.read(sent).messages[1]["tool_calls"][0]["function"]["arguments"] == arguments


def test_random_arguments_come_back_equal() -> None:
    rng = random.Random(0)

    def value(depth: int = 0) -> Any:
        kinds = [
            lambda: rng.choice([None, True, False, 0, -3, 1e-9, 2**60, 0.1 + 0.2]),
            lambda: "".join(rng.choice(' "\\\n\t{}é😀\u2028\x00<|end|>') for _ in range(rng.randrange(6))),
            lambda: [value(depth + 1) for _ in range(rng.randrange(3))],
            lambda: {str(rng.random()): value(depth + 1) for _ in range(rng.randrange(3))},
        ]
        return rng.choice(kinds[:2] if depth > 3 else kinds)()

    for _ in range(300):
        arguments = {"x": value()}
        answer, user = said("", ("f", arguments)), {"role": "user", "content": "hi"}
        message = _sent(CHAT.write(answer, ChatRequest("policy", [])))["choices"][0]["message"]
        echo = CHAT.read({"model": "policy", "messages": [user, message]}).messages[1]
        assert echo["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize("status", [400, 401, 404, 500])
def test_errors_have_the_form_of_the_dialect(status: int) -> None:
    pytest.importorskip("anthropic", reason=CLIENTS)
    pytest.importorskip("openai", reason=CLIENTS)
    from anthropic.types import ErrorResponse
    from openai.types.shared import ErrorObject

    refusal = Refusal("no", status, "a_code")
    for dialect in (CHAT, RESPONSES):
        assert ErrorObject.model_validate(_sent(dialect.error(refusal))["error"], strict=True).code == "a_code"
    assert ErrorResponse.model_validate(_sent(MESSAGES.error(refusal))).error.message == "no"
