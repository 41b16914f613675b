"""An endpoint with a scripted model for real clients, and what they send back of its answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from answering import KEY, Answering, said

from agile_trainers.envs.agent import Model
from agile_trainers.rollout.agents.requests import Answer, ChatRequest, Refusal
from agile_trainers.rollout.agents.server import AgentServer
from agile_trainers.types import Message

TOWNS = ("Köln", "Ulm")
SCHEMA = {
    "type": "object",
    "properties": {"town": {"type": "string", "description": "The town."}},
    "required": ["town"],
    "additionalProperties": False,
}
DESCRIPTION = "Tell the weather in a town."
QUESTION = "How is the weather in Köln and Ulm?"


def weather(town: str) -> str:
    """Tell the weather in a town.

    Args:
        town: The town.
    """
    return f"rain in {town}"


def model(request: ChatRequest) -> Answer:
    """Call the first tool for each town, with a text beside the second call, and then say what the results are."""
    results = [message for message in request.messages if message["role"] == "tool"]
    if request.tools and len(results) < len(TOWNS):
        text = "And the other one: " if results else ""
        return said(text, (request.tools[0]["function"]["name"], {"town": TOWNS[len(results)]}), number=len(results))
    return said("; ".join(str(message["content"]) for message in results) or "Hello there, you!", n=request.n)


class Weather:
    """The endpoint, entered as a context."""

    def __init__(self, reply: Callable[[ChatRequest], Answer | None] = model) -> None:
        self._reply = reply
        self._conversations: dict[str | None, list[Message]] = {None: []}
        self.exchange = Answering(self._answer)
        self._server = AgentServer(self.exchange)

    def _answer(self, request: ChatRequest) -> Answer | None:
        """Answer as an episode does: ids differ, what is not enforced is refused, and a conversation can be gone on from."""
        if request.constraints:
            raise Refusal(f"{request.constraints} asks for another distribution.")
        own, new = request.messages[: request.instructed], request.messages[request.instructed :]
        request.messages = [*own, *self._conversations[request.previous], *new]
        answer = self._reply(request)
        if answer is not None:
            answer = replace(answer, id=f"a{len(self._conversations)}")
            calls = [
                {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
                for call in answer.choices[0].tool_calls
            ]
            said = {"role": "assistant", "content": answer.choices[0].text, "tool_calls": calls}
            self._conversations[answer.id] = [*request.messages[request.instructed :], said]
        return answer

    def __enter__(self) -> Weather:
        self.exchange.__enter__()
        self._server.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.__exit__(*error)
        self.exchange.__exit__(*error)

    @property
    def model(self) -> Model:
        """What an agent gets of the endpoint."""
        return Model(self._server.base_url, KEY)

    @property
    def base_url(self) -> str:
        return self._server.base_url

    @property
    def key(self) -> str:
        return KEY

    @property
    def requests(self) -> list[ChatRequest]:
        return [ticket.request for ticket in self.exchange.asked]

    def echoes(self) -> list[str]:
        """What clients changed of the answers that they sent back, ``[]`` if nothing.

        Each answer is expected, unchanged and in order, in every later request; a call's id is part of it.
        """
        changed = []
        for number, request in enumerate(self.requests):
            sent = [message for message in request.messages if message["role"] == "assistant"]
            answers = [ticket.answer.result().choices[0] for ticket in self.exchange.asked[:number]]
            if len(sent) != len(answers):
                changed.append(f"request {number} has {len(sent)} of {len(answers)} answers")
            for place, (message, choice) in enumerate(zip(sent, answers)):
                if message["content"] != choice.text:
                    changed.append(f"text {place} of request {number}: {choice.text!r} became {message['content']!r}")
                calls = [
                    (call["id"], call["function"]["name"], call["function"]["arguments"])
                    for call in message.get("tool_calls", ())
                ]
                ours = [(call.id, call.name, call.arguments) for call in choice.tool_calls]
                if calls != ours:
                    changed.append(f"calls {place} of request {number}: {ours} became {calls}")
        return changed
