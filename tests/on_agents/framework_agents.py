"""One agent in every client library: it has a tool, asks about the weather, and returns the model's last text."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import agents
import litellm
import minisweagent
import pydantic_ai
import smolagents
import yaml
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
from served_agents import DESCRIPTION, QUESTION, SCHEMA
from served_agents import weather as tell

SYSTEM, USER = {"role": "system", "content": "Be short."}, {"role": "user", "content": QUESTION}
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "description": DESCRIPTION, "parameters": SCHEMA}}
RESPONSES_TOOL = {
    "type": "function",
    "name": "weather",
    "description": DESCRIPTION,
    "parameters": SCHEMA,
    "strict": True,
}
MESSAGES_TOOL = {"name": "weather", "description": DESCRIPTION, "input_schema": SCHEMA}


class Endpoint(Protocol):
    """What an agent gets of its endpoint."""

    base_url: str
    anthropic_base_url: str
    api_key: str
    name: str


async def openai_chat(model: Endpoint, stream: bool = False, **settings: Any) -> str:
    """Chat Completions by the openai package alone."""
    messages: list[Any] = [SYSTEM, USER]
    async with AsyncOpenAI(base_url=model.base_url, api_key=model.api_key) as client:
        while True:
            asked: dict[str, Any] = {"model": model.name, "messages": messages, "tools": [CHAT_TOOL], **settings}
            if stream:
                async with client.chat.completions.stream(**asked) as events:
                    async for _ in events:
                        pass
                    message = (await events.get_final_completion()).choices[0].message
            else:
                message = (await client.chat.completions.create(**asked)).choices[0].message
            calls = [call.to_dict() for call in message.tool_calls or ()]
            for call in calls:  # what the sum of a stream has in addition, which OpenAI itself refuses
                call.pop("index", None)
                call["function"].pop("parsed_arguments", None)  # type: ignore[attr-defined]
            messages.append(
                {"role": "assistant", "content": message.content, **({"tool_calls": calls} if calls else {})}
            )
            if not message.tool_calls:
                return message.content or ""
            for call in message.tool_calls:
                result = tell(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def openai_responses(model: Endpoint, stream: bool = False) -> str:
    """Responses by the openai package alone."""
    items: list[Any] = [USER]
    async with AsyncOpenAI(base_url=model.base_url, api_key=model.api_key) as client:
        while True:
            asked: dict[str, Any] = {"model": model.name, "input": items, "instructions": "Be short."}
            if stream:
                async with client.responses.stream(**asked, tools=[RESPONSES_TOOL]) as events:
                    response = await events.get_final_response()
            else:
                response = await client.responses.create(**asked, tools=[RESPONSES_TOOL])
            items += [item.to_dict() for item in response.output]
            calls = [item for item in response.output if item.type == "function_call"]
            for item in items:
                item.pop("parsed_arguments", None)
                for part in item["content"] if isinstance(item.get("content"), list) else ():
                    part.pop("parsed", None)
            if not calls:
                return response.output_text
            for call in calls:
                result = tell(**json.loads(call.arguments))
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


async def anthropic_messages(model: Endpoint, stream: bool = False) -> str:
    """Messages by the anthropic package alone."""
    messages: list[Any] = [USER]
    async with AsyncAnthropic(base_url=model.anthropic_base_url, api_key=model.api_key) as client:
        while True:
            asked: dict[str, Any] = {
                "model": model.name,
                "max_tokens": 1000,
                "messages": messages,
                "system": "Be short.",
            }
            if stream:
                async with client.messages.stream(**asked, tools=[MESSAGES_TOOL]) as events:
                    message = await events.get_final_message()
            else:
                message = await client.messages.create(**asked, tools=[MESSAGES_TOOL])
            messages.append({"role": "assistant", "content": message.content})
            calls = [block for block in message.content if block.type == "tool_use"]
            if not calls:
                return message.content[0].text
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": tell(**call.input)} for call in calls]
            messages.append({"role": "user", "content": results})


async def openai_agents(model: Endpoint, kind: str = "responses", stream: bool = False, **settings: Any) -> str:
    """OpenAI's Agents SDK."""
    async with AsyncOpenAI(base_url=model.base_url, api_key=model.api_key) as client:
        made = agents.OpenAIResponsesModel if kind == "responses" else agents.OpenAIChatCompletionsModel
        agent = agents.Agent(
            name="a", instructions="Be short.", tools=[agents.function_tool(tell)],
            model=made(model=model.name, openai_client=client),
        )  # fmt: skip
        if not stream:
            return (await agents.Runner.run(agent, QUESTION, **settings)).final_output
        run = agents.Runner.run_streamed(agent, QUESTION, **settings)
        async for _ in run.stream_events():
            pass
        return run.final_output


def langgraph(model: Endpoint, stream: bool = False, **settings: Any) -> str:
    """A graph of LangGraph with langchain-openai."""
    tools = [langchain_tool(tell)]
    made = ChatOpenAI(
        model=model.name, base_url=model.base_url, api_key=model.api_key, streaming=stream, **settings
    ).bind_tools(tools)  # fmt: skip
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": made.invoke(state["messages"])})
    graph.add_node("tools", ToolNode(tools))
    graph.set_entry_point("model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    got = graph.compile().invoke({"messages": [("system", "Be short."), ("user", QUESTION)]})
    return got["messages"][-1].text


def pydantic_agent(model: Endpoint, kind: str = "chat") -> pydantic_ai.Agent[None, str]:
    """An agent of Pydantic AI."""
    made: Any
    if kind == "messages":
        client = AsyncAnthropic(base_url=model.anthropic_base_url, api_key=model.api_key)
        made = AnthropicModel(model.name, provider=AnthropicProvider(anthropic_client=client))
    else:
        provider = OpenAIProvider(base_url=model.base_url, api_key=model.api_key)
        made = (OpenAIChatModel if kind == "chat" else OpenAIResponsesModel)(model.name, provider=provider)
    return pydantic_ai.Agent(made, instructions="Be short.", tools=[tell])


async def pydantic(model: Endpoint, kind: str = "chat") -> str:
    """Pydantic AI."""
    return (await pydantic_agent(model, kind).run(QUESTION)).output


def by_litellm(model: Endpoint, provider: str = "openai", stream: bool = False) -> str:
    """Litellm alone."""
    base_url = model.base_url if provider == "openai" else model.anthropic_base_url
    messages: list[Any] = [SYSTEM, USER]
    while True:
        got: Any = litellm.completion(
            f"{provider}/{model.name}",
            messages,
            api_base=base_url,
            api_key=model.api_key,
            tools=[CHAT_TOOL],
            stream=stream,
        )
        if stream:
            got = litellm.stream_chunk_builder(list(got), messages=messages)
        message = got.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            result = tell(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def mini_swe_agent(
    model: Endpoint, folder: Path, config: str = "mini.yaml", prompts: dict[str, str] | None = None
) -> str:
    """mini-swe-agent with one of its own configurations, whose commands run in a folder; ``prompts`` are its templates."""
    settings = yaml.safe_load((Path(minisweagent.__file__).parent / "config" / config).read_text(encoding="utf-8"))
    settings["agent"].pop("mode")
    options = {**settings["model"], "cost_tracking": "ignore_errors", "model_name": f"openai/{model.name}"}
    options["model_kwargs"] |= {"api_base": model.base_url, "api_key": model.api_key}
    made: Callable[..., Any] = LitellmTextbasedModel if "text" in config else LitellmModel
    agent = DefaultAgent(made(**options), LocalEnvironment(cwd=str(folder)), **{**settings["agent"], **(prompts or {})})
    return agent.run("Look at the weather.")["submission"]


def smolagent(
    kind: type[smolagents.MultiStepAgent],
    model: Endpoint,
    stream: bool = False,
    system: str | None = None,
    **settings: Any,
) -> str:
    """An agent of smolagents, with its own long system prompt or another one."""
    made = smolagents.OpenAIModel(model.name, api_base=model.base_url, api_key=model.api_key, **settings)
    agent = kind([smolagents.tool(tell)], made, verbosity_level=0, stream_outputs=stream)
    if system is not None:
        agent.prompt_templates["system_prompt"] = system
    return str(agent.run(QUESTION))


smol_tools = partial(smolagent, smolagents.ToolCallingAgent)
smol_code = partial(smolagent, smolagents.CodeAgent)
