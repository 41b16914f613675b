"""Plays episodes with a scripted policy instead of the model, through the rollout engine."""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import repeat
from typing import Any

from transformers import PreTrainedTokenizerBase

from agile_trainers.envs.agent import Agent, Model, Task, agent_of
from agile_trainers.envs.base import Environment, EnvironmentFactory, Observation, as_messages
from agile_trainers.envs.checker import validate_context, validate_reset, validate_result, validate_step
from agile_trainers.envs.context import Context, History, Question, full
from agile_trainers.envs.scripted_policies import ScriptedPolicy
from agile_trainers.rollout.agents.episode import cut_at_stop, tool_calls
from agile_trainers.rollout.agents.requests import (
    POLICY,
    Answer,
    Asked,
    CalledTool,
    ChatRequest,
    Choice,
    EpisodeExchange,
    Received,
    Refusal,
    Ticket,
    as_message,
    check_name_lengths,
    check_request,
    refuse_request,
    rewarded_too_early,
)
from agile_trainers.rollout.agents.server import AgentServer
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.environment_pool import Outcome
from agile_trainers.rollout.generators.base import GenerationRequest
from agile_trainers.rollout.generators.scripted import ScriptedGenerator
from agile_trainers.rollout.spec import EpisodeSpec
from agile_trainers.types import Message, Trajectory, common_prefix

Hear = Callable[[str | None, Observation, float | None], None]
"""Callback with an exchange: action (None at the start), observation, and reward (None at the start). A question of the
history comes as the message that asks it, with None for action and reward."""


class RecordingEnvironment:
    """Wraps an environment and records its conversation.

    ``reset`` and ``step`` behave like the environment's, and are ``async`` if those are.

    Args:
        environment: The environment.
        hear: Called with every exchange.
    """

    def __init__(self, environment: Environment, hear: Hear = lambda action, observation, reward: None):
        self.environment = environment
        self.messages: list[Message] = []
        self.reset = _tapped(environment.reset, self._on_reset)
        self.step = _tapped(environment.step, self._on_step)
        self.end = getattr(environment, "end", None)
        self.close = getattr(environment, "close", lambda: None)
        self._hear = hear

    @property
    def context(self) -> Callable[[list[Message]], Any] | None:
        """The environment's own, if it defines one; read only where it is asked for."""
        own = getattr(self.environment, "context", None)
        return _tapped(own, self._on_context) if callable(own) else None

    def _on_context(self, result: Any, messages: list[Message]) -> None:
        if isinstance(result, Question):
            self._hear(None, validate_context(result, "context()")[-1:], None)

    def _on_reset(self, result: Any, **_: Any) -> None:
        observation, _ = validate_reset(result)
        self.messages = as_messages(observation)
        self._hear(None, observation, None)

    def _on_step(self, result: Any, action: str) -> None:
        observation, reward, *_ = validate_step(result)
        self.messages += [{"role": "assistant", "content": action}, *as_messages(observation)]
        self._hear(action, observation, reward)


def play_scripted(
    make_engine: Callable[[EnvironmentFactory], RolloutEngine],
    factory: EnvironmentFactory,
    choose: Callable[[Environment], ScriptedPolicy],
    specs: Sequence[EpisodeSpec],
    tokenizer: PreTrainedTokenizerBase,
    hear: Hear = lambda action, observation, reward: None,
) -> list[Trajectory]:
    """Play episodes one after the other with a scripted policy in place of the model; its answers are tokenized and
    limited.

    Args:
        make_engine: Makes the engine for a factory.
        factory: Makes environments.
        choose: Returns the policy for an environment instance.
        specs: The episodes.
        tokenizer: Tokenizes the answers; its end-of-turn token is added.
        hear: Called with every exchange.

    Returns:
        One trajectory per spec.

    Raises:
        BaseException: Any exception of the policy.
    """
    recorded: list[RecordingEnvironment] = []

    def recording() -> Environment:
        recorded.append(RecordingEnvironment(factory(), hear))
        return recorded[-1]

    engine = make_engine(recording)
    engine.histories = {name: _asking(history, hear) for name, history in engine.histories.items()}

    def said(request: GenerationRequest) -> str:
        playing = recorded[-1]  # one episode at a time: the instance made last is the one that plays
        return choose(playing.environment)(playing.messages, random.Random(request.uniforms(1)[0]))

    return _played(engine, said, specs, tokenizer)


def answer_calls(
    engine: RolloutEngine,
    answer: Callable[[str], str],
    specs: Sequence[EpisodeSpec],
    tokenizer: PreTrainedTokenizerBase,
) -> list[Trajectory]:
    """Play episodes of an agent, one after the other, and let a function answer its calls instead of the model.

    Args:
        engine: Plays the agent; its pool is closed afterwards.
        answer: Called with the text of a prompt from the place on where it parts from all earlier ones and their answers.
        specs: The episodes.
        tokenizer: Writes prompts as text and tokenizes the answers; its end-of-turn token is added.

    Returns:
        One trajectory per spec.

    Raises:
        BaseException: Any exception of ``answer``.
    """
    read: list[list[int]] = []

    def said(request: GenerationRequest) -> str:
        shared = max((common_prefix(ids, request.token_ids) for ids in read), default=0)
        text = answer(tokenizer.decode(request.token_ids[shared:]))
        read.append([*request.token_ids, *answer_ids(text, engine, tokenizer)])
        return text

    return _played(engine, said, specs, tokenizer)


def _played(
    engine: RolloutEngine,
    answer: Callable[[GenerationRequest], str],
    specs: Sequence[EpisodeSpec],
    tokenizer: PreTrainedTokenizerBase,
) -> list[Trajectory]:
    """Play episodes one after the other with answers that are texts, and close the pool."""
    generator = ScriptedGenerator(lambda request: answer_ids(answer(request), engine, tokenizer))
    try:
        return [trajectory for spec in specs for trajectory in engine.run([spec], generator)]
    finally:
        engine.pool.close()


def answer_ids(answer: str, engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokenize an answer that was not sampled, with the token that ends it."""
    ends = engine.chat.eos_token_ids
    end = tokenizer.eos_token_id if tokenizer.eos_token_id in ends else next(iter(ends), None)
    ids: list[int] = tokenizer.encode(answer, add_special_tokens=False)
    return ids if end is None else [*ids, end]


def _asking(history: History, hear: Hear) -> History:
    """Wrap a history so that the policy hears its questions, which the environment does not ask."""
    if history is full:
        return history

    def asked(messages: Context) -> list[Message]:
        shown = history(messages)
        if isinstance(shown, Question) and shown:
            hear(None, list(shown[-1:]), None)
        return shown

    asked.__name__ = getattr(history, "__name__", None) or repr(history)
    return asked


def _tapped(method: Callable[..., Any], tap: Callable[..., None]) -> Callable[..., Any]:
    """Wrap a method so that its results and arguments also go to ``tap``. Protocol errors are left to the engine."""

    def tapped(result: Any, *given: Any, **named: Any) -> Any:
        with suppress(ValueError):
            tap(result, *given, **named)
        return result

    async def awaited(*given: Any, **named: Any) -> Any:
        return tapped(await method(*given, **named), *given, **named)

    def called(*given: Any, **named: Any) -> Any:
        return tapped(method(*given, **named), *given, **named)

    return wraps(method)(awaited if inspect.iscoroutinefunction(method) else called)


@dataclass
class PlayedAgent:
    """An episode of an agent, played by a function."""

    calls: list[dict[str, Any]] = field(default_factory=list)
    """The calls of the policy, as they arrived: ``messages`` up to the answer, and ``tools`` where the agent sent some."""
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

    What training refuses, whatever the model and its limits are, is refused here too, and rewards of calls
    (``model.reward``) count. The function also answers requests to ``policy-frozen``, such as those to a
    judge, which are no calls of the policy.

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
    environment = agent()
    episodes: list[_Played] = []
    exchange: EpisodeExchange[_Played] = EpisodeExchange(lambda outcome: episodes[outcome.episode].take(outcome))
    with AgentServer(exchange) as server:
        for index, seed in enumerate(seeds):
            episodes.append(one := _Played(index, agent, policy, seed))
            api_key, reward_key = exchange.admit(one)
            model = Model(server.base_url, api_key, POLICY, reward_key)
            result = await environment.play(model, Task(row, seed))
            exchange.dismiss(one)
            reward, one.played.info = validate_result(result)
            one.played.reward += reward
    return [one.played for one in episodes]


class _Played:
    """An episode whose requests a policy answers, in the server's thread."""

    def __init__(self, index: int, agent: Agent, policy: ScriptedPolicy, seed: int) -> None:
        self.index, self.agent = index, agent
        self.played = PlayedAgent()
        self.posted: deque[tuple[float, Any]] = deque()
        self._policy, self._rng = policy, random.Random(f"player {seed}")
        self._received: Received[Asked] = Received()

    def take(self, outcome: Outcome) -> None:
        """Take what the server has for the episode."""
        match outcome.method:
            case "call":
                self._ask(outcome.value)
            case "delivered":
                self._received.delivered(outcome.value)
            case "abandoned":
                self._received.abandoned(outcome.value)
            case "reward":
                self.played.reward += self.posted.popleft()[0]

    def sample_of(self, call: str | None) -> None:
        """Refuse a reward that names no answer."""
        if call is not None:
            self._received.rewarded(call)
        elif not self.played.calls:
            raise rewarded_too_early()

    def _ask(self, ticket: Ticket) -> None:
        request = ticket.request
        try:
            if self._received.repeated(ticket) is not None:
                return
            check_request(request, self.agent)
            check_name_lengths(request.messages)
            self._received.conversation(request)
            choices = tuple(map(self._choice, repeat(request), range(request.n)))
        except Refusal as refusal:
            refuse_request(ticket, refusal)
            return
        except Exception as error:
            refuse_request(ticket, Refusal(f"The policy failed: {type(error).__name__}: {error}"))
            return
        identity = secrets.token_hex(12)
        self._received.add(identity, asked := Asked(request, [ticket]), ticket.marks)
        asked.send(Answer(identity, request.model, int(time.time()), choices))

    def _choice(self, request: ChatRequest, place: int) -> Choice:
        text, stop = cut_at_stop(self._policy(request.messages, self._rng), request.stop)
        calls: tuple[CalledTool, ...] = ()
        if request.tools and request.calls_tools:
            text, calls = tool_calls(text, f"{len(self._received.by_id)} {place}".encode())
        choice = Choice(text, calls, "tool_calls" if calls else "stop", stop=stop)
        if request.model == POLICY:
            self.played.calls.append({"messages": [*request.messages, as_message(choice)], "tools": request.tools})
        return choice
