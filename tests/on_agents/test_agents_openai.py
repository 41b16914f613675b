"""The openai package against the endpoint, in both of its dialects, blocking and in an event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from operator import attrgetter
from typing import Any

import pytest

pytest.importorskip("langgraph", reason="the clients of agents are not installed; make test-agents installs them")

import openai
from answering import said
from served_agents import DESCRIPTION, QUESTION, SCHEMA, Weather
from served_agents import weather as tell

CHAT_TOOL = {"type": "function", "function": {"name": "weather", "description": DESCRIPTION, "parameters": SCHEMA}}
RESPONSES_TOOL = {
    "type": "function",
    "name": "weather",
    "description": DESCRIPTION,
    "parameters": SCHEMA,
    "strict": True,
}
USER = {"role": "user", "content": QUESTION}
both = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def ask(weather: Weather, asynchronous: bool, resource: str, **settings: Any) -> Any:
    """Ask once: the answer, or the list of a stream's events."""
    options: dict[str, Any] = {"base_url": weather.base_url, "api_key": weather.key}
    if not asynchronous:
        with openai.OpenAI(**options) as client:
            got = attrgetter(resource)(client).create(model="policy", **settings)
            return list(got) if settings.get("stream") else got

    async def go() -> Any:
        async with openai.AsyncOpenAI(**options) as client:
            got = await attrgetter(resource)(client).create(model="policy", **settings)
            return [event async for event in got] if settings.get("stream") else got

    return asyncio.run(go())


@both
def test_chat_plain_with_n_and_logprobs(weather: Weather, asynchronous: bool) -> None:
    got = ask(
        weather, asynchronous, "chat.completions", messages=[USER], n=3, logprobs=True, top_logprobs=2, temperature=0.5
    )
    assert [choice.message.content for choice in got.choices] == ["Hello there, you!"] * 3
    assert [token.token for token in got.choices[2].logprobs.content] == ["Hello", "there,", "you!"]
    assert [token.logprob for token in got.choices[2].logprobs.content] == [0.0, -0.5, -1.0]
    assert got.usage.completion_tokens == 9 and got.id == "chatcmpl-a1"
    [request] = weather.requests
    assert (request.n, request.logprobs, request.sampling) == (3, True, {"temperature": 0.5})
    assert weather.exchange.asked[0].marks.client.startswith(("OpenAI/Python", "AsyncOpenAI/Python"))


@both
def test_chat_stream(weather: Weather, asynchronous: bool) -> None:
    chunks = ask(
        weather, asynchronous, "chat.completions", messages=[USER], n=2, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    for index in (0, 1):
        mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.delta.content or "" for choice in mine) == "Hello there, you!"
        assert mine[-1].finish_reason == "stop"
    assert chunks[-1].usage.total_tokens == 13


@both
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_chat_tools(weather: Weather, asynchronous: bool, stream: bool) -> None:
    messages: list[Any] = [USER]
    while True:
        got = ask(weather, asynchronous, "chat.completions", messages=messages, tools=[CHAT_TOOL], stream=stream)
        if stream:
            state = openai.lib.streaming.chat.ChatCompletionStreamState()
            for chunk in got:
                state.handle_chunk(chunk)
            got = state.current_completion_snapshot
        message = got.choices[0].message
        if not message.tool_calls:
            break
        # As the package's documentation sends it back, but for fields of streams that OpenAI itself refuses.
        messages.append(message.to_dict() if not stream else _without_index(message.to_dict()))
        [call] = message.tool_calls
        result = tell(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert message.content == "rain in Köln; rain in Ulm"
    assert len(weather.requests) == 3 and weather.echoes() == []
    assert weather.requests[0].tools == [CHAT_TOOL]


def _without_index(message: dict[str, Any]) -> dict[str, Any]:
    for call in message["tool_calls"]:
        del call["index"]
    return message


@both
def test_responses_plain_and_stream(weather: Weather, asynchronous: bool) -> None:
    got = ask(weather, asynchronous, "responses", input=QUESTION, include=["message.output_text.logprobs"])
    assert got.output_text == "Hello there, you!" and got.status == "completed" and got.usage.output_tokens == 3
    assert [token.logprob for token in got.output[0].content[0].logprobs] == [0.0, -0.5, -1.0]
    events = ask(weather, asynchronous, "responses", input=QUESTION, stream=True)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hello there, you!"
    assert events[-1].response.output_text == "Hello there, you!"


@both
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_responses_tools(weather: Weather, asynchronous: bool, stream: bool) -> None:
    items: list[Any] = [USER]
    while True:
        got = ask(
            weather,
            asynchronous,
            "responses",
            input=items,
            instructions="Be short.",
            tools=[RESPONSES_TOOL],
            stream=stream,
        )
        response = got[-1].response if stream else got
        items += response.output
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            break
        for call in calls:
            result = tell(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    assert response.output_text == "rain in Köln; rain in Ulm"
    assert len(weather.requests) == 3 and weather.echoes() == []
    assert weather.requests[2].messages[0] == {"role": "system", "content": "Be short."}


@both
def test_responses_that_follow_another(weather: Weather, asynchronous: bool) -> None:
    first = ask(weather, asynchronous, "responses", input=QUESTION, instructions="Be short.")
    ask(weather, asynchronous, "responses", input="And now?", previous_response_id=first.id, instructions="Be long.")
    assert weather.requests[1].previous == first.id.removeprefix("resp_")
    contents = [message["content"] for message in weather.requests[1].messages]
    assert contents == ["Be long.", QUESTION, first.output_text, "And now?"]


@both
def test_a_refusal_is_not_sent_again(weather: Weather, asynchronous: bool) -> None:
    with pytest.raises(openai.BadRequestError, match=r"`n` is 0; expected 1 or more"):
        ask(weather, asynchronous, "chat.completions", messages=[USER], n=0)
    with pytest.raises(openai.BadRequestError, match=r"`input.0..content.0.`: An image of 1 bytes cannot be read"):
        image = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
        ask(weather, asynchronous, "responses", input=[{"role": "user", "content": [image]}])
    with (
        openai.OpenAI(base_url=weather.base_url, api_key="another") as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.chat.completions.create(model="policy", messages=[USER])
    assert weather.requests == []


@both
def test_a_client_that_gives_up_asks_again_with_its_mark(asynchronous: bool) -> None:
    asked = threading.Event()

    def slow_at_first(request: Any) -> Any:
        if asked.is_set():
            return said("there")
        asked.set()
        return None

    with Weather(slow_at_first) as weather:
        got = ask(weather, asynchronous, "chat.completions", messages=[USER], timeout=1.0)
        assert got.choices[0].message.content == "there"
        first, *_, last = tickets = weather.exchange.asked
        assert [ticket.marks.retries for ticket in tickets] == list(range(len(tickets)))
        assert first.request.body == last.request.body
        weather.exchange.wait_for(ends=len(tickets))
        assert weather.exchange.ends[0] == ("abandoned", first) and ("delivered", last) in weather.exchange.ends


def test_models(weather: Weather) -> None:
    with openai.OpenAI(base_url=weather.base_url, api_key=weather.key) as client:
        assert [model.id for model in client.models.list()] == ["policy", "policy-frozen"]
