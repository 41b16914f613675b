"""Clients of an agent's episode without a network: they send requests and keep what they were told."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from agile_trainers.envs.agent import Agent
from agile_trainers.rollout.agents.episode import AgentEpisode
from agile_trainers.rollout.agents.requests import POLICY, Answer, CalledTool, ChatRequest, Choice, Marks, Ticket
from agile_trainers.rollout.chat.renderer import ChatRenderer
from agile_trainers.rollout.generators.base import FinishReason, GenerationOutput, GenerationRequest
from agile_trainers.rollout.spec import EpisodeSpec, Limits
from agile_trainers.types import Message

Sampled = tuple[list[int], FinishReason]


class Client:
    """Plays one episode against the calls' bookkeeping; ``sample`` answers what is to be sampled."""

    def __init__(
        self,
        chat: ChatRenderer,
        sample: Callable[[GenerationRequest], Sampled],
        *,
        agent: Agent | None = None,
        limits: Limits | None = None,
        stream: tuple[int, ...] = (1, 2),
    ) -> None:
        limits = limits or Limits(max_turns=100, max_new_tokens=64, max_model_length=10_000)
        self.episode = AgentEpisode(0, EpisodeSpec(1, stream), limits, chat, agent or Agent(lambda model, task: 0.0))
        self.requests: list[GenerationRequest] = []
        self.sampled: list[list[int]] = []
        """Ids of each request that was sampled."""
        self._sample = sample

    def send(self, messages: list[Message], *, marks: Marks | None = None, **fields: Any) -> Ticket:
        """Send a request without waiting for its answer."""
        messages = json.loads(json.dumps(messages))
        body = json.dumps([messages, fields], default=str).encode()
        ticket = Ticket(ChatRequest(fields.pop("model", POLICY), messages, **fields, body=body), marks or Marks())
        self.requests += self.episode.ask(ticket)
        return ticket

    def answer(self, *numbers: int) -> None:
        """Answer requests that are to be sampled, all by default."""
        for request in [self.requests[number] for number in numbers] or self.requests[len(self.sampled) :]:
            ids, reason = self._sample(request)
            self.sampled.append(ids)
            output = GenerationOutput(0, ids, [-0.5] * len(ids), reason, request.call, read=len(request.token_ids))
            self.episode.answered(output)

    def ask(self, messages: list[Message], **fields: Any) -> Answer:
        """Send a request and get its answer."""
        ticket = self.send(messages, **fields)
        self.answer()
        answer = ticket.answer.result(timeout=0)
        self.episode.delivered(ticket)
        return answer


def echo(choice: Choice, arguments: Callable[[CalledTool], Any] = lambda call: call.arguments) -> Message:
    """Return the message that a client sends back of an answer."""
    message: Message = {"role": "assistant", "content": choice.text}
    if choice.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments(call)}}
            for call in choice.tool_calls
        ]
    return message


def tool(name: str) -> dict[str, Any]:
    """Return a tool's schema."""
    return {
        "type": "function",
        "function": {"name": name, "description": f"It is {name}.", "parameters": {"type": "object", "properties": {}}},
    }
