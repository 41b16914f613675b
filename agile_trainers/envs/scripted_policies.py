"""Plays environments with functions instead of a model, for baselines, demonstrations and tests."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from agile_trainers.envs.agent import AgentEnvironment
from agile_trainers.envs.base import Environment, Observation, as_messages, bound
from agile_trainers.envs.checker import validate_end, validate_reset, validate_step
from agile_trainers.imports import unbound
from agile_trainers.types import Message

ScriptedPolicy = Callable[[list[Message], random.Random], str]
"""Function from a conversation that ends with an observation, and a random generator, to an answer."""


@dataclass
class Episode:
    """A played episode."""

    messages: list[Message] = field(default_factory=list)
    """The conversation, up to the policy's last answer."""
    rewards: list[float] = field(default_factory=list)
    """Reward of each turn."""
    info: dict[str, Any] = field(default_factory=dict)
    """Info of the last step."""
    final_observation: Observation = ""
    """The observation after the last answer."""

    @property
    def episode_return(self) -> float:
        """Undiscounted sum of the rewards."""
        return sum(self.rewards)

    @property
    def success(self) -> bool:
        """``info["success"]``, False if the environment does not report it."""
        return bool(self.info.get("success", False))


def play(
    environment: Environment,
    policy: ScriptedPolicy,
    seed: int,
    *,
    options: dict[str, Any] | None = None,
    max_turns: int | None = None,
    player: str | None = None,
) -> Episode:
    """Play one episode of an environment that is not async.

    Args:
        environment: The instance to play on.
        policy: Gives the answers.
        seed: Seed of the environment and of the policy's separate random generator.
        options: The dataset row passed to ``reset``.
        max_turns: Stop after this many turns, and tell the environment's ``end``, whose reward the last turn gets. Default:
            play until the environment ends the episode.
        player: Seed of the policy's generator. Default: ``seed``.

    Raises:
        EnvironmentProtocolError: If the environment breaks the protocol.
    """
    rng = random.Random(f"player {seed if player is None else player}")
    observation, _ = validate_reset(bound(environment, "reset", seed, deepcopy(options))())
    episode = Episode(messages=as_messages(observation))
    while True:
        answer = policy(episode.messages, rng)
        episode.messages.append({"role": "assistant", "content": answer})
        observation, reward, terminated, truncated, episode.info = validate_step(bound(environment, "step", answer)())
        episode.rewards.append(reward)
        over = terminated or truncated
        if not over and len(episode.rewards) == max_turns:
            over = True
            ended = bound(environment, "end", "max_turns")()
            episode.rewards[-1] += validate_end(asyncio.run(ended) if inspect.iscoroutine(ended) else ended) or 0.0
        if over:
            episode.final_observation = observation
            return episode
        episode.messages += as_messages(observation)


def known_policies(environment: Environment) -> dict[str, ScriptedPolicy]:
    """Return the scripted policies that an environment provides.

    They come from its method ``scripted_policies()`` or from ``random_policy`` and ``expert_policy`` in its module, as in
    the ready tasks; an agent's module is that of its function. Those of the module take precedence.

    Args:
        environment: The instance to play on; some policies read its state.

    Returns:
        Policies by name: ``random`` plays in the right format and ignores the state, ``expert`` plays as well as possible.
        Empty if there are none.
    """
    made = unbound(environment.solve if isinstance(environment, AgentEnvironment) else type(environment))
    module = sys.modules.get(getattr(made, "__module__", ""))
    own = getattr(environment, "scripted_policies", None)
    policies = own() if own is not None else {}
    named = {name: getattr(module, f"{name}_policy", policies.get(name)) for name in ("random", "expert")}
    return {name: policy for name, policy in {**policies, **named}.items() if policy is not None}


def demonstrate(
    environment: Environment, policy: ScriptedPolicy, seeds: Iterable[int]
) -> list[dict[str, list[Message]]]:
    """Play one conversation per seed, as rows ``{"messages": [...]}`` for TRL's ``SFTTrainer``."""
    return [{"messages": play(environment, policy, seed).messages} for seed in seeds]


def compare(
    environment: Environment, better: ScriptedPolicy, worse: ScriptedPolicy, seeds: Iterable[int]
) -> list[dict[str, list[Message]]]:
    """Make preference pairs of two policies' answers for TRL's ``DPOTrainer``.

    Both policies play the same episode. The pair is their answers at the first turn where they differ, after the same
    conversation. A seed gives no pair if they never differ, or if the better policy gets no higher return.

    Returns:
        Rows ``{"prompt": [...], "chosen": [answer], "rejected": [answer]}`` of messages.
    """
    return list(_pairs(environment, better, worse, seeds))


def _pairs(
    environment: Environment, better: ScriptedPolicy, worse: ScriptedPolicy, seeds: Iterable[int]
) -> Iterator[dict[str, list[Message]]]:
    for seed in seeds:
        chosen, rejected = play(environment, better, seed), play(environment, worse, seed)
        pairs = enumerate(zip(chosen.messages, rejected.messages))
        index = next((index for index, (good, bad) in pairs if good != bad), None)
        if index is not None and chosen.episode_return > rejected.episode_return:
            good, bad = chosen.messages[index], rejected.messages[index]
            yield {"prompt": chosen.messages[:index], "chosen": [good], "rejected": [bad]}


def compare_until(
    count: int, environment: Environment, better: ScriptedPolicy, worse: ScriptedPolicy, first_seed: int
) -> list[dict[str, list[Message]]]:
    """Make ``count`` pairs with :func:`compare` from consecutive seeds, skipping seeds that give none.

    Args:
        count: Number of pairs. The function does not return if no seed gives any.
        environment: The instance to play on.
        better: The policy whose answers are chosen.
        worse: The policy whose answers are rejected.
        first_seed: Seed of the first episode.
    """
    seeds = itertools.count(first_seed)
    return list(itertools.islice(_pairs(environment, better, worse, seeds), count))
