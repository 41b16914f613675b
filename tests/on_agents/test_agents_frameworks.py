"""Frameworks of agents against the endpoint: an agent with one tool calls it twice and then answers.

Each test says whether the framework sends our answers back as they were delivered. ``docs/agent_clients.md`` has the table.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langgraph", reason="the clients of agents are not installed; make test-agents installs them")

import agents
import litellm
import minisweagent
import pydantic_ai
import smolagents
import yaml
from answering import said
from anthropic import AsyncAnthropic
from langchain_core.tools import tool as langchain_tool
from langchain_openai import ChatOpenAI
from langgraph.graph import MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel
from openai import AsyncOpenAI
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from served_agents import DESCRIPTION, QUESTION, SCHEMA, TOWNS, Weather
from served_agents import weather as tell

from agile_trainers.rollout.agents.requests import Answer, ChatRequest, Refusal

RESULT = "rain in Köln; rain in Ulm"
streams = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


# ------------------------------------------------------------------------------------------------------- openai-agents


async def _openai_agent(weather: Weather, kind: Any, stream: bool, **settings: Any) -> str:
    async with AsyncOpenAI(base_url=weather.base_url, api_key=weather.key) as client:
        model = kind(model="policy", openai_client=client)
        agent = agents.Agent(name="a", instructions="Be short.", tools=[agents.function_tool(tell)], model=model)
        if not stream:
            return (await agents.Runner.run(agent, QUESTION, **settings)).final_output
        run = agents.Runner.run_streamed(agent, QUESTION, **settings)
        async for _ in run.stream_events():
            pass
        return run.final_output


@streams
@pytest.mark.parametrize(
    "kind", [agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel], ids=["chat", "responses"]
)
def test_openai_agents(weather: Weather, kind: Any, stream: bool) -> None:
    assert asyncio.run(_openai_agent(weather, kind, stream)) == RESULT
    assert len(weather.requests) == 3 and weather.echoes() == []


def test_openai_agents_that_send_the_last_id_alone(weather: Weather) -> None:
    got = asyncio.run(_openai_agent(weather, agents.OpenAIResponsesModel, False, auto_previous_response_id=True))
    assert got == RESULT and [request.previous for request in weather.requests] == [None, "a1", "a2"]
    assert weather.echoes() == []
    assert [message["role"] for message in weather.requests[2].messages] == [
        "system", "user", "assistant", "tool", "assistant", "tool",
    ]  # fmt: skip


# ----------------------------------------------------------------------------------------- langgraph, langchain-openai


@streams
@pytest.mark.parametrize(
    "settings",
    [{}, {"use_responses_api": True}, {"use_responses_api": True, "use_previous_response_id": True}],
    ids=["chat", "responses", "previous"],
)
def test_langgraph(weather: Weather, settings: dict[str, Any], stream: bool) -> None:
    tools = [langchain_tool(tell)]
    model = ChatOpenAI(model="policy", base_url=weather.base_url, api_key=weather.key, streaming=stream, **settings)
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": model.bind_tools(tools).invoke(state["messages"])})
    graph.add_node("tools", ToolNode(tools))
    graph.set_entry_point("model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    got = graph.compile().invoke({"messages": [("system", "Be short."), ("user", QUESTION)]})
    assert got["messages"][-1].text == RESULT
    assert len(weather.requests) == 3 and weather.echoes() == []
    assert bool(weather.requests[1].previous) == bool(settings.get("use_previous_response_id"))


# --------------------------------------------------------------------------------------------------------- pydantic-ai


@pytest.mark.parametrize("kind", ["chat", "responses", "messages"])
def test_pydantic_ai(weather: Weather, kind: str) -> None:
    async def go() -> str:
        model: Any
        if kind == "messages":
            client = AsyncAnthropic(base_url=weather.base_url.removesuffix("/v1"), api_key=weather.key)
            model = AnthropicModel("policy", provider=AnthropicProvider(anthropic_client=client))
        else:
            provider = OpenAIProvider(base_url=weather.base_url, api_key=weather.key)
            model = (OpenAIChatModel if kind == "chat" else OpenAIResponsesModel)("policy", provider=provider)
        return (await pydantic_ai.Agent(model, instructions="Be short.", tools=[tell]).run(QUESTION)).output

    assert asyncio.run(go()) == RESULT
    assert len(weather.requests) == 3 and weather.echoes() == []


def test_pydantic_ai_takes_the_first_text_of_a_stream_for_the_result(weather: Weather) -> None:
    async def go() -> str:
        model = OpenAIChatModel("policy", provider=OpenAIProvider(base_url=weather.base_url, api_key=weather.key))
        async with pydantic_ai.Agent(model, tools=[tell]).run_stream(QUESTION) as run:
            return await run.get_output()

    assert asyncio.run(go()) == "And the other one: "
    assert len(weather.requests) == 2 and weather.echoes() == []


# ------------------------------------------------------------------------------------------------------------- litellm


@streams
@pytest.mark.parametrize("name", ["openai/policy", "anthropic/policy"])
def test_litellm(weather: Weather, name: str, stream: bool) -> None:
    base_url = weather.base_url if name.startswith("openai") else weather.base_url.removesuffix("/v1")
    tool = {"type": "function", "function": {"name": "weather", "description": DESCRIPTION, "parameters": SCHEMA}}
    messages: list[Any] = [{"role": "system", "content": "Be short."}, {"role": "user", "content": QUESTION}]
    while True:
        got: Any = litellm.completion(
            name, messages, api_base=base_url, api_key=weather.key, tools=[tool], stream=stream
        )  # fmt: skip
        if stream:
            got = litellm.stream_chunk_builder(list(got), messages=messages)
        message = got.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            result = tell(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert message.content == RESULT
    assert len(weather.requests) == 3 and weather.echoes() == []


def test_litellm_knows_a_full_context() -> None:
    """By the first words of the message. Agents that summarize, or do not ask again, wait for this error."""

    def reply(request: ChatRequest) -> Answer:
        raise Refusal(
            "This model's maximum context length is 40 tokens (max_model_length), ...", code="context_length_exceeded"
        )

    with Weather(reply) as weather, pytest.raises(litellm.ContextWindowExceededError):
        user = {"role": "user", "content": QUESTION}
        litellm.completion("openai/policy", [user], api_base=weather.base_url, api_key=weather.key)


# ------------------------------------------------------------------------------------------------------ mini-swe-agent


@pytest.mark.parametrize(
    ("model", "config"),
    [(LitellmModel, "mini.yaml"), (LitellmTextbasedModel, "mini_textbased.yaml")],
    ids=["tools", "text"],
)
def test_mini_swe_agent(model: Any, config: str, tmp_path: Path) -> None:
    commands = [f"echo {TOWNS[0]}", f"echo {TOWNS[1]}", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo rain"]

    def reply(request: ChatRequest) -> Answer:
        number = sum(message["role"] == "assistant" for message in request.messages)
        if request.tools:
            return said("", ("bash", {"command": commands[number]}), number=number)
        return said(f"THOUGHT: I look.\n\n```mswea_bash_command\n{commands[number]}\n```")

    settings = yaml.safe_load((Path(minisweagent.__file__).parent / "config" / config).read_text(encoding="utf-8"))
    settings["agent"].pop("mode")
    options = settings["model"]
    with Weather(reply) as weather:
        options["model_kwargs"] |= {"api_base": weather.base_url, "api_key": weather.key}
        served = model(model_name="openai/policy", **{**options, "cost_tracking": "ignore_errors"})
        got = DefaultAgent(served, LocalEnvironment(cwd=str(tmp_path)), **settings["agent"]).run("Look at the weather.")
        assert got["exit_status"] == "Submitted" and got["submission"].strip() == "rain"
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
        model = smolagents.OpenAIModel("policy", api_base=weather.base_url, api_key=weather.key, tool_choice="auto")
        agent = smolagents.ToolCallingAgent(
            [smolagents.tool(tell)], model, verbosity_level=0, stream_outputs=stream
        )  # fmt: skip
        assert agent.run(QUESTION) == "rain"
        assert len(weather.requests) == 3
        changed = weather.echoes()
        assert len(changed) == 2 * (1 + 2)  # the text and the calls of every answer in every later request
        assert all("Calling tools:" in change or "became []" in change for change in changed)


def test_smolagents_asks_for_a_call_unless_told_otherwise() -> None:
    with Weather(_tool_reply) as weather:
        model = smolagents.OpenAIModel("policy", api_base=weather.base_url, api_key=weather.key)
        with pytest.raises(smolagents.AgentError, match="asks for another distribution"):
            smolagents.ToolCallingAgent([smolagents.tool(tell)], model, verbosity_level=0).run(QUESTION)
        assert weather.requests[0].constraints == {"tool_choice": "required"}


@streams
def test_smolagents_rewrites_each_piece_of_its_code(stream: bool) -> None:
    with Weather(_code_reply) as weather:
        model = smolagents.OpenAIModel("policy", api_base=weather.base_url, api_key=weather.key)
        agent = smolagents.CodeAgent([smolagents.tool(tell)], model, verbosity_level=0, stream_outputs=stream)
        assert agent.run(QUESTION) == "rain"
        assert len(weather.requests) == 3
        changed = weather.echoes()
        assert len(changed) == 1 + 2 and all("</code>" in change and "Calling tools:" in change for change in changed)
