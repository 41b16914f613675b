"""The anthropic package against the endpoint, blocking and in an event loop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("langgraph", reason="the clients of agents are not installed; make test-agents installs them")

import anthropic
from served_agents import DESCRIPTION, QUESTION, SCHEMA, Weather
from served_agents import weather as tell

TOOL = {"name": "weather", "description": DESCRIPTION, "input_schema": SCHEMA}
USER = {"role": "user", "content": QUESTION}
both = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def ask(weather: Weather, asynchronous: bool, stream: bool = False, **settings: Any) -> Any:
    """Ask once, and return the message; of a stream what its events add up to."""
    options: dict[str, Any] = {"base_url": weather.base_url.removesuffix("/v1"), "api_key": weather.key}
    settings = {"model": "policy", "max_tokens": 100, **settings}
    if not asynchronous:
        with anthropic.Anthropic(**options) as client:
            if not stream:
                return client.messages.create(**settings)
            with client.messages.stream(**settings) as events:
                return events.get_final_message()

    async def go() -> Any:
        async with anthropic.AsyncAnthropic(**options) as client:
            if not stream:
                return await client.messages.create(**settings)
            async with client.messages.stream(**settings) as events:
                return await events.get_final_message()

    return asyncio.run(go())


@both
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_messages(weather: Weather, asynchronous: bool, stream: bool) -> None:
    settings: dict[str, Any] = {"system": "Be short.", "stop_sequences": ["END"], "extra_body": {"temperature": 0.5}}
    got = ask(weather, asynchronous, stream, messages=[USER], **settings)
    assert [block.text for block in got.content] == ["Hello there, you!"]
    assert (got.id, got.stop_reason, got.usage.input_tokens, got.usage.output_tokens) == ("msg_a1", "end_turn", 7, 3)
    [request] = weather.requests
    assert request.messages[0] == {"role": "system", "content": "Be short."}
    assert (request.max_tokens, request.stop, request.sampling) == (100, ("END",), {"temperature": 0.5})


@both
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_messages_with_tools(weather: Weather, asynchronous: bool, stream: bool) -> None:
    messages: list[Any] = [USER]
    while True:
        got = ask(weather, asynchronous, stream, messages=messages, tools=[TOOL])
        messages.append({"role": "assistant", "content": got.content})
        calls = [block for block in got.content if block.type == "tool_use"]
        if not calls:
            break
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": tell(**call.input)} for call in calls]
        messages.append({"role": "user", "content": results})
    assert got.content[0].text == "rain in Köln; rain in Ulm" and got.stop_reason == "end_turn"
    assert len(weather.requests) == 3 and weather.echoes() == []
    assert weather.requests[0].tools[0]["function"]["parameters"] == SCHEMA


def test_a_base_url_with_v1(weather: Weather) -> None:
    with anthropic.Anthropic(base_url=weather.base_url, api_key=weather.key) as client:
        got = client.messages.create(model="policy", max_tokens=9, messages=[USER])
    assert got.content[0].text == "Hello there, you!"


@both
def test_a_refusal_is_not_sent_again(weather: Weather, asynchronous: bool) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"`tool_choice.type` is 'maybe'"):
        ask(weather, asynchronous, messages=[USER], tools=[TOOL], tool_choice={"type": "maybe"})
    with (
        anthropic.Anthropic(base_url=weather.base_url, api_key="x") as client,
        pytest.raises(anthropic.AuthenticationError),
    ):
        client.messages.create(model="policy", max_tokens=9, messages=[USER])
    assert weather.requests == []
