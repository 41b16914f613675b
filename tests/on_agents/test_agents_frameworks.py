"""Frameworks of agents against the endpoint: an agent with one tool calls it twice and then answers.

Each test says whether the framework sends our answers back as they were delivered. ``docs/agent_clients.md`` has the table.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langgraph", reason="the clients of agents are not installed; make test-agents installs them")

import framework_agents as play
import litellm
import smolagents
from answering import said
from served_agents import QUESTION, TOWNS, Weather

from agile_trainers.rollout.agents.requests import Answer, ChatRequest, Refusal

RESULT = "rain in Köln; rain in Ulm"
streams = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@streams
@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_openai_agents(weather: Weather, kind: str, stream: bool) -> None:
    assert asyncio.run(play.openai_agents(weather.model, kind, stream)) == RESULT
    assert len(weather.requests) == 3 and weather.echoes() == []


def test_openai_agents_that_send_the_last_id_alone(weather: Weather) -> None:
    assert asyncio.run(play.openai_agents(weather.model, auto_previous_response_id=True)) == RESULT
    assert [request.previous for request in weather.requests] == [None, "a1", "a2"]
    assert weather.echoes() == []
    assert [message["role"] for message in weather.requests[2].messages] == [
        "system", "user", "assistant", "tool", "assistant", "tool",
    ]  # fmt: skip


@streams
@pytest.mark.parametrize(
    "settings",
    [{}, {"use_responses_api": True}, {"use_responses_api": True, "use_previous_response_id": True}],
    ids=["chat", "responses", "previous"],
)
def test_langgraph(weather: Weather, settings: dict[str, Any], stream: bool) -> None:
    assert play.langgraph(weather.model, stream, **settings) == RESULT
    assert len(weather.requests) == 3 and weather.echoes() == []
    assert bool(weather.requests[1].previous) == bool(settings.get("use_previous_response_id"))


@pytest.mark.parametrize("kind", ["chat", "responses", "messages"])
def test_pydantic_ai(weather: Weather, kind: str) -> None:
    assert asyncio.run(play.pydantic(weather.model, kind)) == RESULT
    assert len(weather.requests) == 3 and weather.echoes() == []


def test_pydantic_ai_takes_the_first_text_of_a_stream_for_the_result(weather: Weather) -> None:
    async def go() -> str:
        async with play.pydantic_agent(weather.model).run_stream(QUESTION) as run:
            return await run.get_output()

    assert asyncio.run(go()) == "And the other one: "
    assert len(weather.requests) == 2 and weather.echoes() == []


@streams
@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_litellm(weather: Weather, provider: str, stream: bool) -> None:
    assert play.by_litellm(weather.model, provider, stream) == RESULT
    assert len(weather.requests) == 3 and weather.echoes() == []


def test_litellm_knows_a_full_context() -> None:
    """By the first words of the message. Agents that summarize, or do not ask again, wait for this error."""

    def reply(request: ChatRequest) -> Answer:
        raise Refusal("This model's maximum context length is 40 tokens, ...", code="context_length_exceeded")

    with Weather(reply) as weather, pytest.raises(litellm.ContextWindowExceededError):
        play.by_litellm(weather.model)


@pytest.mark.parametrize("config", ["mini.yaml", "mini_textbased.yaml"])
def test_mini_swe_agent(config: str, tmp_path: Path) -> None:
    commands = [f"echo {TOWNS[0]}", f"echo {TOWNS[1]}", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo rain"]

    def reply(request: ChatRequest) -> Answer:
        number = sum(message["role"] == "assistant" for message in request.messages)
        if request.tools:
            return said("", ("bash", {"command": commands[number]}), number=number)
        return said(f"THOUGHT: I look.\n\n```mswea_bash_command\n{commands[number]}\n```")

    with Weather(reply) as weather:
        assert play.mini_swe_agent(weather.model, tmp_path, config).strip() == "rain"
        assert len(weather.requests) == 3 and weather.echoes() == []
        results = [request.messages[-1]["content"] for request in weather.requests[1:]]
        assert all(town[-2:] in result for town, result in zip(TOWNS, results, strict=True))  # JSON escapes the umlaut


# ---------------------------------------------------------------------------------------------------------- smolagents


def _tool_reply(request: ChatRequest) -> Answer:
    number = sum(message["role"] == "assistant" for message in request.messages)
    call = ("weather", {"town": TOWNS[number]}) if number < len(TOWNS) else ("final_answer", {"answer": "rain"})
    return said("", call, number=number)


def _code_reply(request: ChatRequest) -> Answer:
    """Code up to a stop string, as the endpoint delivers it."""
    assert "</code>" in request.stop
    number = sum(message["role"] == "assistant" for message in request.messages)
    code = f"print(weather(town={TOWNS[number]!r}))" if number < len(TOWNS) else "final_answer('rain')"
    return said(f"Thought: I look.\n<code>\n{code}\n")


@streams
def test_smolagents_rewrites_each_of_its_tool_calls_as_text(stream: bool) -> None:
    with Weather(_tool_reply) as weather:
        assert play.smol_tools(weather.model, stream, tool_choice="auto") == "rain"
        assert len(weather.requests) == 3
        changed = weather.echoes()
        assert len(changed) == 2 * (1 + 2)  # the text and the calls of every answer in every later request
        assert all("Calling tools:" in change or "became []" in change for change in changed)


def test_smolagents_asks_for_a_call_unless_told_otherwise() -> None:
    with Weather(_tool_reply) as weather:
        with pytest.raises(smolagents.AgentError, match="asks for another distribution"):
            play.smol_tools(weather.model)
        assert weather.requests[0].constraints == {"tool_choice": "required"}


@streams
def test_smolagents_rewrites_each_piece_of_its_code(stream: bool) -> None:
    with Weather(_code_reply) as weather:
        assert play.smol_code(weather.model, stream) == "rain"
        assert len(weather.requests) == 3
        changed = weather.echoes()
        assert len(changed) == 1 + 2 and all("</code>" in change and "Calling tools:" in change for change in changed)
