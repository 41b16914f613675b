"""Plays agents with a function in place of the model, for baselines, demonstrations and tests."""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from agile_trainers.envs.agent import Agent, Endpoint, Model, Task, agent_of
from agile_trainers.envs.base import EnvironmentFactory
from agile_trainers.envs.checker import validate_result
from agile_trainers.envs.scripted_policies import ScriptedPolicy
from agile_trainers.rollout.agents.replies import as_message, cut_at_stop, tool_calls
from agile_trainers.rollout.agents.requests import Answer, CalledTool, ChatRequest, Choice, Refusal, Ticket
from agile_trainers.rollout.agents.server import AgentServer


@dataclass
class PlayedAgent:
    """An episode of an agent, played by a function."""

    calls: list[dict[str, Any]] = field(default_factory=list)
    """In the order of arrival: ``messages`` up to the answer, and ``tools`` where the agent sent some."""
    reward: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)
    """With ``success``, if the agent reports it."""

    @property
    def success(self) -> bool:
        """``info["success"]``, False if the agent does not report it."""
        return bool(self.info.get("success", False))


def play_agent(
    agent: EnvironmentFactory | Agent, policy: ScriptedPolicy, seeds: Iterable[int], row: dict[str, Any] | None = None
) -> list[PlayedAgent]:
    """Let an agent play episodes, one after the other, in which a function answers its requests.

    Args:
        agent: The agent, or what :func:`~agile_trainers.envs.registry.make_environment_factory` makes of its id.
        policy: Gives the answers, with tool calls as ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.
        seeds: Of the episodes; the policy's random generator is seeded with them, too.
        row: The dataset row of all episodes.

    Returns:
        An episode per seed.

    Raises:
        Exception: Any exception of the agent.
        ValueError: If it is no agent.
        EnvironmentProtocolError: If the agent returns no reward.
    """
    found = agent_of(agent)
    if found is None:
        raise ValueError(
            f"{agent!r} is no agent. Episodes of other environments are played by agile_trainers.envs.play."
        )
    play = partial(asyncio.run, _play(found, policy, seeds, row))
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return play()
    with ThreadPoolExecutor(1) as thread:  # a notebook's loop is running in this one
        return thread.submit(play).result()


def demonstrate_agent(
    agent: EnvironmentFactory | Agent, policy: ScriptedPolicy, seeds: Iterable[int]
) -> list[dict[str, Any]]:
    """Play an episode per seed, as rows for TRL's ``SFTTrainer``.

    Returns:
        Rows ``{"messages": [...], "tools": "<JSON>"}``: each conversation that the agent had, up to its last answer. A row
        of a conversation without tools has None for them.
    """
    rows = []
    for episode in play_agent(agent, policy, seeds):
        calls = episode.calls
        for place, call in enumerate(calls):
            if not any(_goes_on(later, call) for later in calls[place + 1 :]):
                rows.append({**call, "tools": json.dumps(call["tools"]) if call["tools"] else None})
    return rows


def _goes_on(later: dict[str, Any], call: dict[str, Any]) -> bool:
    said = call["messages"]
    return bool(later["tools"] == call["tools"] and later["messages"][: len(said)] == said)


async def _play(
    agent: Agent, policy: ScriptedPolicy, seeds: Iterable[int], row: dict[str, Any] | None
) -> list[PlayedAgent]:
    exchange = _Played(agent, policy)
    environment = agent()
    episodes = []
    with AgentServer(exchange) as server:
        for seed in seeds:
            key, episode = exchange.admit(seed)
            result = await environment.play(Model(server.base_url, key), Task(row, seed))
            episode.reward, episode.info = validate_result(result)
            episodes.append(episode)
    return episodes


class _Played:
    """Answers requests with a policy, in the server's thread."""

    def __init__(self, agent: Agent, policy: ScriptedPolicy) -> None:
        self._agent, self._policy = agent, policy
        self._episodes: dict[str, tuple[PlayedAgent, random.Random]] = {}

    def admit(self, seed: int) -> tuple[str, PlayedAgent]:
        key, episode = f"sk-{secrets.token_urlsafe(32)}", PlayedAgent()
        self._episodes[key] = episode, random.Random(f"player {seed}")
        return key, episode

    def models(self, key: str) -> Mapping[str, Endpoint]:
        if key not in self._episodes:
            raise Refusal("The key is of no episode; expected model.api_key.", 401, "invalid_api_key")
        return self._agent.models

    def ask(self, key: str, ticket: Ticket) -> None:
        episode, rng = self._episodes[key]
        try:
            choices = tuple(self._choice(ticket.request, episode, rng) for _ in range(ticket.request.n))
        except Exception as error:
            ticket.answer.set_exception(Refusal(f"The policy failed: {type(error).__name__}: {error}"))
            return
        ticket.answer.set_result(Answer(secrets.token_hex(12), ticket.request.model, int(time.time()), choices))

    def _choice(self, request: ChatRequest, episode: PlayedAgent, rng: random.Random) -> Choice:
        text, stop = cut_at_stop(self._policy(request.messages, rng), request.stop)
        calls: tuple[CalledTool, ...] = ()
        if request.tools and request.calls_tools:
            text, calls = tool_calls(text, len(episode.calls).to_bytes(4))
        choice = Choice(text, calls, "tool_calls" if calls else "stop", stop=stop)
        episode.calls.append({"messages": [*request.messages, as_message(choice)], "tools": request.tools})
        return choice

    def delivered(self, key: str, ticket: Ticket) -> None: ...

    def abandoned(self, key: str, ticket: Ticket) -> None: ...

    def reward(self, key: str, value: Any, call: str | None) -> None: ...
