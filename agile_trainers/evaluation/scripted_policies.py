"""Plays episodes with a scripted policy instead of the model, through the rollout engine."""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

from transformers import PreTrainedTokenizerBase

from agile_trainers.envs.agent import Agent, Endpoint, Model, Task, agent_of
from agile_trainers.envs.base import Environment, EnvironmentFactory, Observation, as_messages
from agile_trainers.envs.checker import validate_context, validate_reset, validate_result, validate_step
from agile_trainers.envs.context import Context, History, Question, full
from agile_trainers.envs.scripted_policies import ScriptedPolicy
from agile_trainers.rollout.agents.episode import as_message, cut_at_stop, tool_calls
from agile_trainers.rollout.agents.requests import (
    POLICY,
    Answer,
    CalledTool,
    ChatRequest,
    Choice,
    Refusal,
    Ticket,
    check_request,
    wrong_key,
)
from agile_trainers.rollout.agents.server import AgentServer
from agile_trainers.rollout.engine import RolloutEngine
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

    What training refuses is refused here too. The function also answers requests to ``policy-frozen``, such as those to a
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
    exchange = _Played(agent, policy)
    environment = agent()
    episodes = []
    with AgentServer(exchange) as server:
        for seed in seeds:
            model, episode = exchange.admit(server.base_url, seed)
            result = await environment.play(model, Task(row, seed))
            episode.reward, episode.info = validate_result(result)
            episodes.append(episode)
    return episodes


class _Played:
    """Answers requests with a policy, in the server's thread."""

    def __init__(self, agent: Agent, policy: ScriptedPolicy) -> None:
        self._agent, self._policy = agent, policy
        self._episodes: dict[str, tuple[PlayedAgent, random.Random]] = {}
        self._reward_keys = set[str]()
        self._said: dict[tuple[str, str], list[Message]] = {}
        """Conversations up to an answer, without its instructions, by the episode's key and the answer's id."""

    def admit(self, base_url: str, seed: int) -> tuple[Model, PlayedAgent]:
        api_key, reward_key = (f"{kind}-{secrets.token_urlsafe(32)}" for kind in ("sk", "rk"))
        self._episodes[api_key] = episode, _ = PlayedAgent(), random.Random(f"player {seed}")
        self._reward_keys.add(reward_key)
        return Model(base_url, api_key, POLICY, reward_key), episode

    def models(self, key: str) -> Mapping[str, Endpoint]:
        if key not in self._episodes:
            raise wrong_key("api_key")
        return self._agent.models

    def ask(self, key: str, ticket: Ticket) -> None:
        request = ticket.request
        episode, rng = self._episodes[key]
        try:
            check_request(request, self._agent)
            self._prepend(key, request)
            choices = tuple(self._choice(request, episode, rng, place) for place in range(request.n))
        except Refusal as refusal:
            ticket.answer.set_exception(refusal)
            return
        except Exception as error:
            ticket.answer.set_exception(Refusal(f"The policy failed: {type(error).__name__}: {error}"))
            return
        identity = secrets.token_hex(12)
        self._said[key, identity] = [*request.messages[request.instructed :], as_message(choices[0])]
        ticket.answer.set_result(Answer(identity, request.model, int(time.time()), choices))

    def _prepend(self, key: str, request: ChatRequest) -> None:
        """Put the conversation before a request that goes on from an answer, after its instructions."""
        if request.previous is not None:
            before = self._said.get((key, request.previous.replace("-", "_").rpartition("_")[2]))
            if before is None:
                raise Refusal(f"No answer of this episode has the id {request.previous!r:.100}.", 404)
            request.messages[request.instructed : request.instructed] = before

    def _choice(self, request: ChatRequest, episode: PlayedAgent, rng: random.Random, place: int) -> Choice:
        text, stop = cut_at_stop(self._policy(request.messages, rng), request.stop)
        calls: tuple[CalledTool, ...] = ()
        if request.tools and request.calls_tools:
            text, calls = tool_calls(text, f"{len(self._said)} {place}".encode())
        choice = Choice(text, calls, "tool_calls" if calls else "stop", stop=stop)
        if request.model == POLICY:
            episode.calls.append({"messages": [*request.messages, as_message(choice)], "tools": request.tools})
        return choice

    def delivered(self, key: str, ticket: Ticket) -> None: ...

    def abandoned(self, key: str, ticket: Ticket) -> None: ...

    def reward(self, key: str, value: Any, call: str | None) -> None:
        if key not in self._reward_keys:
            raise wrong_key("reward_key")
