"""A client's request and its answer, in the form that all dialects share, and the exchange that finds its episode."""

from __future__ import annotations

import json
import secrets
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from threading import Lock
from typing import Any, Generic, Literal, Protocol, TypeVar

from agile_trainers.envs.agent import Agent, Endpoint
from agile_trainers.envs.checker import LARGEST_REWARD, EnvironmentProtocolError, validate_context
from agile_trainers.rollout.environment_pool import Outcome
from agile_trainers.types import Message

POLICY = "policy"
"""Name of the model that is trained."""
FROZEN = "policy-frozen"
"""Name of the same weights for answers that are not trained, such as a judge's."""

_LONGEST_SETTING = 1000
"""Characters that are kept of a setting."""
_LONGEST_NAME = 1000
"""Characters of names and ids in messages, which templates may leave out of the prompt, and records hold."""


class Refusal(Exception):
    """A request that is not answered. No client should send it again as it is.

    Args:
        message: What was wrong, what was expected, and how to fix it.
        status: The HTTP status.
        code: A word for programs, such as ``"context_length_exceeded"``.
    """

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code


def wrong_key(kind: str) -> Refusal:
    """The refusal of a key that is none of this kind, ``"api_key"`` or ``"reward_key"``."""
    hint = ", which a program does not get: what `score` returns is its reward" if kind == "reward_key" else ""
    return Refusal(f"The key is of no episode of this rollout; expected model.{kind}{hint}.", 401, "invalid_api_key")


def over() -> Refusal:
    """The refusal of a request after the end of its episode."""
    return Refusal("The episode is over: its agent has returned, or a limit ended it.", code="episode_over")


def rewarded_too_early() -> Refusal:
    """The refusal of a reward before the first answer."""
    return Refusal("A call is rewarded after its answer, and this episode has none yet.", 404)


@dataclass
class ChatRequest:
    """A request, whatever its dialect.

    ``messages`` have the form of Chat Completions with three differences: ``content`` is always text (parts are lines, null
    is empty), the arguments of a tool call are a parsed JSON object where they are one (else the text as sent), and the role
    ``developer`` is ``system``. Keys: ``role``, ``content``, and if given ``name``, ``tool_calls`` (of an assistant),
    ``tool_call_id`` (of a tool's result). A tool call is ``{"id", "type": "function", "function": {"name", "arguments"}}``.
    """

    model: str
    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    """``{"type": "function", "function": {"name", "description", "parameters"}}`` each, as chat templates take them."""
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    stream: bool = False
    stream_usage: bool = False
    """True if a stream ends with the usage (``stream_options.include_usage``)."""
    calls_tools: bool = True
    """False with ``tool_choice="none"``: calls in the answer stay text."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Settings that the run decides or that have no effect: ``temperature``, ``top_p``, ``top_k``, ``seed``, penalties,
    ``logit_bias``, reasoning effort, ``parallel_tool_calls``. As sent, but for a value whose JSON has more than 1,000
    characters: it is the beginning of that, as a text."""
    constraints: dict[str, Any] = field(default_factory=dict)
    """Settings that ask for another distribution, like ``sampling``: ``tool_choice`` other than auto and none,
    ``response_format`` other than text, and their like in other dialects."""
    previous: str | None = None
    """Id of the answer that the messages follow, without the conversation before it (``previous_response_id``)."""
    instructed: bool = False
    """True if the first message is ``instructions`` for this answer alone; an answer that follows it does not get them."""
    body: bytes = b""
    """The body as received; the server sets it."""
    digest: bytes = b""
    """Digest of the body, to know a repeated request by."""

    def __post_init__(self) -> None:
        # Both are kept with the episode, and the first are recorded with each call.
        self.sampling, self.constraints = _shortened(self.sampling), _shortened(self.constraints)


def _shortened(settings: dict[str, Any]) -> dict[str, Any]:
    texts = {name: json.dumps(value, default=str) for name, value in settings.items()}
    return {
        name: value if len(texts[name]) <= _LONGEST_SETTING else f"{texts[name][:_LONGEST_SETTING]}..."
        for name, value in settings.items()
    }


def check_request(request: ChatRequest, agent: Agent) -> None:
    """Refuse a request for a model that there is not, or for another distribution.

    Args:
        request: The request.
        agent: Its agent, for what it declares.

    Raises:
        Refusal: The refusal.
    """
    if request.model not in (POLICY, FROZEN):
        known = ", ".join(map(repr, (POLICY, FROZEN, *agent.models)))
        raise Refusal(
            f"There is no model {request.model!r:.100}; expected one of {known}. Use model.name, or map the name to "
            "another endpoint with Agent(..., models=...).",
            404,
            "model_not_found",
        )
    if unenforced := sorted(set(request.constraints) - agent.not_enforced):
        name = unenforced[0]
        value = json.dumps(request.constraints[name], sort_keys=True, default=str)
        raise Refusal(
            f"{name}={value:.200} asks for another distribution than the trained one. Leave it out, or declare "
            f"Agent(..., not_enforced=[{name!r}]) if the agent can do without its being enforced."
        )
    if request.n < 1 or (request.max_tokens is not None and request.max_tokens < 1):
        raise Refusal(f"n={request.n} and max_tokens={request.max_tokens}: both must be at least 1.")


def check_name_lengths(messages: list[Message]) -> None:
    """Refuse names and ids in messages that are too long.

    Raises:
        Refusal: The refusal.
    """
    for message in messages:
        calls = message.get("tool_calls") or ()
        names = [message.get("name"), message.get("tool_call_id"), *(call.get("id") for call in calls)]
        if name := next((one for one in names if one is not None and len(one) > _LONGEST_NAME), None):
            raise Refusal(
                f"A name or the id of a tool call has {len(name):,} characters ({name[:40]!r}...); expected at most "
                f"{_LONGEST_NAME:,}."
            )


@dataclass(frozen=True)
class Marks:
    """The headers of a request that count."""

    key: str | None = None
    """``Idempotency-Key``."""
    retries: int = 0
    """``x-stainless-retry-count``: how often the client has sent it before."""
    occurrence: str | None = None
    """``x-occurrence``: tells equal requests apart that are in flight together."""
    client: str = ""
    """``User-Agent``."""


@dataclass(frozen=True)
class CalledTool:
    """A tool call in an answer."""

    id: str
    name: str
    arguments: dict[str, Any]

    @property
    def text(self) -> str:
        """The arguments as JSON."""
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True)
class SampledToken:
    """A token of an answer."""

    text: str
    logprob: float
    part: bytes | None = None
    """Its bytes, where these are a part of a character alone, which is no text."""


@dataclass(frozen=True)
class Choice:
    """One sampled answer as the client gets it."""

    text: str
    """The content; empty if there are only tool calls."""
    tool_calls: tuple[CalledTool, ...] = ()
    finish_reason: Literal["stop", "length", "tool_calls"] = "stop"
    tokens: tuple[SampledToken, ...] = ()
    """The sampled tokens, if log-probs were asked for."""
    stop: str | None = None
    """The string of the request's ``stop`` that ended it."""


def as_message(choice: Choice) -> Message:
    """Return the message that a client has of an answer."""
    message: Message = {"role": "assistant", "content": choice.text}
    if choice.tool_calls:
        message["tool_calls"] = [
            {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
            for one in choice.tool_calls
        ]
    return message


@dataclass(frozen=True)
class Answer:
    """The answer to a request."""

    id: str
    """Letters and digits; dialects put their prefix before it."""
    model: str
    created: int
    """Seconds since the epoch."""
    choices: tuple[Choice, ...]
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(eq=False)
class Ticket:
    """A request that the server is holding open."""

    request: ChatRequest
    marks: Marks = Marks()
    answer: Future[Answer] = field(default_factory=Future)
    """Set from another thread to the answer or a :class:`Refusal`."""


@dataclass(eq=False)
class Asked:
    """A request and the tickets of all that wait for its answer: of the first time it was sent, and of repetitions."""

    request: ChatRequest
    waiting: list[Ticket]
    answer: Answer | None = None
    delivered: bool = False
    abandoned: bool = False

    @property
    def trained(self) -> bool:
        """True if its answers are the policy's."""
        return self.request.model == POLICY

    def send(self, answer: Answer) -> None:
        """Send an answer to all that wait for it."""
        self.answer = answer
        for ticket in self.waiting:
            _send(ticket, answer)


_Asked = TypeVar("_Asked", bound=Asked)


class Received(Generic[_Asked]):
    """The requests of one episode that were not refused. Other threads read them."""

    def __init__(self) -> None:
        self.by_id: dict[str, _Asked] = {}
        """Requests by the answer's id."""
        self._by_key: dict[str, _Asked] = {}
        self._by_digest: defaultdict[bytes, list[_Asked]] = defaultdict(list)

    def repeated(self, ticket: Ticket) -> _Asked | None:
        """Return the request that another one repeats, whose answer that also gets; None if it repeats none."""
        request = ticket.request
        request.digest = sha256(request.body).digest()
        request.body = b""  # megabytes, for as long as the episode
        earlier = self._earlier(ticket.marks, request.digest)
        if earlier is not None:
            earlier.waiting.append(ticket)
            if earlier.answer is not None:
                _send(ticket, earlier.answer)
        return earlier

    def _earlier(self, marks: Marks, digest: bytes) -> _Asked | None:
        """Return the request that this one repeats: by its key, or an equal one if the client says or hung up."""
        if marks.key is not None and (known := self._by_key.get(marks.key)) is not None:
            if known.request.digest != digest:
                raise Refusal("The Idempotency-Key was used for another request. Give every request a key of its own.")
            return known
        equal = self._by_digest.get(digest, [])
        if marks.retries > 0:
            undelivered = [one for one in equal if not one.delivered]
            return undelivered[0] if undelivered else equal[-1] if equal else None
        return next((one for one in equal if one.abandoned and not one.delivered and not one.waiting), None)

    def add(self, identity: str, asked: _Asked, marks: Marks) -> None:
        """Keep a request that repeats none.

        Args:
            identity: Its answer's id.
            asked: The request.
            marks: Its headers.
        """
        self.by_id[identity] = asked
        self._by_digest[asked.request.digest].append(asked)
        if marks.key is not None:
            self._by_key[marks.key] = asked

    def delivered(self, ticket: Ticket) -> None:
        """Note that a client got its answer."""
        for asked in self.by_id.values():
            if ticket in asked.waiting:
                asked.delivered = True
                asked.waiting.remove(ticket)

    def abandoned(self, ticket: Ticket) -> list[_Asked]:
        """Note that a client hung up: its answer waits for the next equal request. Return what it had asked."""
        left = [asked for asked in self.by_id.values() if ticket in asked.waiting]
        for asked in left:
            asked.waiting.remove(ticket)
            asked.abandoned = not asked.delivered and not asked.waiting
        return left

    def conversation(self, request: ChatRequest) -> list[Message]:
        """Return the whole conversation that a request asks to be answered, as plain data.

        Raises:
            Refusal: If it goes on from an answer that there is not, or is none that can be answered.
        """
        own = request.messages[: request.instructed]
        before: list[Message] = []
        if request.previous is not None:
            asked = self._find(request.previous)
            if asked is None or asked.answer is None:
                raise Refusal(f"No answer of this episode has the id {request.previous!r:.100}.", 404)
            before = [*asked.request.messages[asked.request.instructed :], as_message(asked.answer.choices[0])]
        try:
            messages = validate_context([*own, *before, *request.messages[request.instructed :]], "the request")
        except EnvironmentProtocolError as error:
            raise Refusal(str(error)) from error
        request.messages = messages
        return messages

    def rewarded(self, call: str) -> tuple[_Asked, int]:
        """Return the request whose answer a reward names, and which of its choices.

        Args:
            call: The answer's id with its dialect's prefix, of several choices with ``:index`` after it.

        Raises:
            Refusal: If there is none, or there are several.
        """
        name, _, place = call.partition(":")
        asked = self._find(name)
        if asked is None or (place and place not in map(str, range(asked.request.n))):
            raise Refusal(f"No answer of this episode has the id {call!r:.100}; expected `response.id`.", 404)
        if not asked.trained:
            raise Refusal(
                f"The answer {call!r:.100} is of {FROZEN!r}, which is not trained; expected one of {POLICY!r}."
            )
        if asked.request.n > 1 and not place:
            raise Refusal(f"The answer {call!r:.100} has {asked.request.n} choices. Reward one as '{call:.100}:0'.")
        return asked, int(place or 0)

    def _find(self, name: str) -> _Asked | None:
        """Return the request whose answer has an id, which a dialect has put its prefix before."""
        return self.by_id.get(name.replace("-", "_").rpartition("_")[2])


def _send(ticket: Ticket, answer: Answer) -> None:
    with suppress(InvalidStateError):
        ticket.answer.set_result(answer)


def refuse_request(ticket: Ticket, refusal: Refusal) -> None:
    """Answer a request with a refusal, unless it has an answer."""
    with suppress(InvalidStateError):
        ticket.answer.set_exception(refusal)


class _Episode(Protocol):
    index: int
    agent: Agent
    posted: deque[tuple[float, Any]]
    """Rewards that have been posted, in order: an outcome ``"reward"`` for each."""

    def sample_of(self, call: str | None) -> Any:
        """Return the answer that a reward names.

        Raises:
            Refusal: If there is none.
        """


_E = TypeVar("_E", bound=_Episode)


class EpisodeExchange(Generic[_E]):
    """Finds the episode of a key, for the server's thread. Its methods return at once.

    Args:
        post: Takes what comes in for an episode.
    """

    def __init__(self, post: Callable[[Outcome], None]) -> None:
        self._post = post
        self._lock = Lock()
        """Held between an episode's end and its last reward: none that is taken comes too late."""
        self._episodes: dict[str, _E] = {}
        self.keys: dict[_E, tuple[str, str]] = {}
        """Episodes under way to their keys."""
        number = secrets.token_urlsafe(8)
        self._first = {"api_key": f"sk-{number}-", "reward_key": f"rk-{number}-"}
        """The first characters of all keys of a kind, by which those of episodes that have ended are known."""

    def admit(self, episode: _E) -> tuple[str, str]:
        """Make an episode's keys, of its requests and of its rewards."""
        api_key, reward_key = (first + secrets.token_urlsafe(32) for first in self._first.values())
        self._episodes[api_key] = self._episodes[reward_key] = episode
        self.keys[episode] = api_key, reward_key
        return api_key, reward_key

    def dismiss(self, episode: _E) -> None:
        """Take no more requests and rewards of an episode."""
        with self._lock:
            for key in self.keys.pop(episode):
                del self._episodes[key]

    def close(self) -> None:
        """Take no more requests."""
        self._episodes.clear()

    def ask(self, key: str, ticket: Ticket) -> None:
        """Take a request of the episode with this key; a refusal arrives in ``ticket.answer`` too."""
        try:
            self._post(Outcome(self._find(key).index, "call", ticket))
        except Refusal as refusal:
            refuse_request(ticket, refusal)

    def delivered(self, key: str, ticket: Ticket) -> None:
        """Note that the client got the whole answer."""
        self._note(key, "delivered", ticket)

    def abandoned(self, key: str, ticket: Ticket) -> None:
        """Note that the client hung up before it got the whole answer."""
        self._note(key, "abandoned", ticket)

    def reward(self, key: str, value: Any, call: str | None) -> None:
        """Take a reward of one call, by the answer's id as the client saw it, with its dialect's prefix.

        ``key`` is ``model.reward_key``: with the key of requests, code that the model has written could reward itself.

        Raises:
            Refusal: If the episode is over or unknown, or the value is not a finite number.
        """
        with self._lock:
            episode = self._find(key, "reward_key")
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST_REWARD:
                raise Refusal(f"The reward is {value!r:.100}; expected a finite number.")
            if call is not None and not isinstance(call, str):
                raise Refusal(
                    f"The call is {call!r:.100}; expected the answer's id, `response.id`, or none for the last answer."
                )
            # Found at once: the last answer may be another one later.
            episode.posted.append((float(value), episode.sample_of(call)))
            self._post(Outcome(episode.index, "reward"))

    def models(self, key: str) -> Mapping[str, Endpoint]:
        """Return the endpoints that answer for further names of models, which the agent with this key may use.

        Raises:
            Refusal: If there is no episode with this key.
        """
        return self._find(key).agent.models

    def _note(self, key: str, what: str, ticket: Ticket) -> None:
        if (episode := self._episodes.get(key)) is not None:
            self._post(Outcome(episode.index, what, ticket))

    def _find(self, key: str, kind: str = "api_key") -> _E:
        if not key.startswith(self._first[kind]):
            raise wrong_key(kind)
        episode = self._episodes.get(key)
        if episode is None:
            raise over()
        return episode
