"""A player in the model's seat: it answers an environment through the rollout engine, token by token."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any

from transformers import PreTrainedTokenizerBase

from agile_trainers.envs.base import Environment, EnvironmentFactory, Observation, as_messages
from agile_trainers.envs.checker import validate_reset, validate_step
from agile_trainers.envs.players import Player
from agile_trainers.rollout.engine import EpisodeSpec, RolloutEngine
from agile_trainers.rollout.generators.base import GenerationRequest
from agile_trainers.rollout.generators.scripted import ScriptedGenerator
from agile_trainers.types import Message, Trajectory

Hear = Callable[[str | None, Observation, float | None], None]
"""Told what the environment got (None at the start), what it said to it, and the reward (None at the start)."""


class Overheard:
    """An environment that keeps the conversation it is part of.

    ``reset`` and ``step`` do what the environment's do, and are ``async`` if those are.

    Args:
        environment: The environment.
        hear: Called with every exchange, as it happens.
    """

    def __init__(self, environment: Environment, hear: Hear = lambda action, observation, reward: None):
        self.environment = environment
        self.messages: list[Message] = []
        self.reset = _tapped(environment.reset, self._on_reset)
        self.step = _tapped(environment.step, self._on_step)
        self.close = getattr(environment, "close", lambda: None)
        self._hear = hear

    def _on_reset(self, result: Any, **_: Any) -> None:
        observation, _ = validate_reset(result)
        self.messages = as_messages(observation)
        self._hear(None, observation, None)

    def _on_step(self, result: Any, action: str) -> None:
        observation, reward, *_ = validate_step(result)
        self.messages += [{"role": "assistant", "content": action}, *as_messages(observation)]
        self._hear(action, observation, reward)


def play_in_seat(
    make_engine: Callable[[EnvironmentFactory], RolloutEngine],
    factory: EnvironmentFactory,
    choose: Callable[[Environment], Player],
    specs: Sequence[EpisodeSpec],
    tokenizer: PreTrainedTokenizerBase,
    hear: Hear = lambda action, observation, reward: None,
) -> list[Trajectory]:
    """Play episodes, one after the other, as a model would: what a player says is tokenized, and cut at the limits.

    Args:
        make_engine: Makes the engine, on the factory it is given.
        factory: Makes environments.
        choose: The player for an environment instance.
        specs: The episodes.
        tokenizer: Turns answers into token ids; its end-of-turn token is added.
        hear: Called with every exchange, as it happens.

    Returns:
        One trajectory per spec.

    Raises:
        BaseException: What the player raises.
    """
    seats: list[Overheard] = []

    def seated() -> Environment:
        seats.append(Overheard(factory(), hear))
        return seats[-1]

    engine = make_engine(seated)
    ends = engine.chat.eos_token_ids
    end = tokenizer.eos_token_id if tokenizer.eos_token_id in ends else next(iter(ends), None)

    def script(request: GenerationRequest) -> list[int]:
        seat = seats[-1]  # one episode at a time: the instance that was made last is the one that plays
        answer = choose(seat.environment)(seat.messages, random.Random(request.uniforms(1)[0]))
        ids = tokenizer.encode(answer, add_special_tokens=False)
        return ids if end is None else [*ids, end]

    generator = ScriptedGenerator(script)
    try:
        return [trajectory for spec in specs for trajectory in engine.run([spec], generator)]
    finally:
        engine.pool.close()


def _tapped(method: Callable[..., Any], tap: Callable[..., None]) -> Callable[..., Any]:
    """The method, with its signature; each result and the arguments go to ``tap`` too, unless it breaks the protocol,
    which is for the engine to say."""
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
