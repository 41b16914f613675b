"""Plays episodes with a scripted policy instead of the model, through the rollout engine."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any

from transformers import PreTrainedTokenizerBase

from agile_trainers.envs.base import Environment, EnvironmentFactory, Observation, as_messages
from agile_trainers.envs.checker import validate_context, validate_reset, validate_step
from agile_trainers.envs.context import Context, History, Question, full
from agile_trainers.envs.scripted_policies import ScriptedPolicy
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
        read.append([*request.token_ids, *_tokens_of(text, engine, tokenizer)])
        return text

    return _played(engine, said, specs, tokenizer)


def _played(
    engine: RolloutEngine,
    answer: Callable[[GenerationRequest], str],
    specs: Sequence[EpisodeSpec],
    tokenizer: PreTrainedTokenizerBase,
) -> list[Trajectory]:
    """Play episodes one after the other with answers that are texts, and close the pool."""
    generator = ScriptedGenerator(lambda request: _tokens_of(answer(request), engine, tokenizer))
    try:
        return [trajectory for spec in specs for trajectory in engine.run([spec], generator)]
    finally:
        engine.pool.close()


def _tokens_of(answer: str, engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase) -> list[int]:
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
    if inspect.iscoroutinefunction(method):

        @wraps(method)
        async def awaited(*given: Any, **named: Any) -> Any:
            result = await method(*given, **named)
            with suppress(ValueError):
                tap(result, *given, **named)
            return result

        return awaited

    @wraps(method)
    def called(*given: Any, **named: Any) -> Any:
        result = method(*given, **named)
        with suppress(ValueError):
            tap(result, *given, **named)
        return result

    return called
