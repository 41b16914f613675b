"""Scripted play: a function plays an environment instead of a model. For baselines, demonstrations and tests."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from agile_trainers.envs.base import Environment, Observation, as_messages, bound_reset, bound_step
from agile_trainers.envs.checker import validate_reset, validate_step
from agile_trainers.types import Message

Player = Callable[[list[Message], random.Random], str]
"""Answers a conversation that ends with an observation. The random numbers it may use come from the second argument."""


@dataclass
class Episode:
    """A played episode."""

    messages: list[Message] = field(default_factory=list)
    """The conversation; it ends with the player's last answer, as a demonstration does."""
    rewards: list[float] = field(default_factory=list)
    """Reward of each turn."""
    info: dict[str, Any] = field(default_factory=dict)
    """Info of the last step."""
    final_observation: Observation = ""
    """What the environment said to the last answer."""

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
    player: Player,
    seed: int,
    *,
    options: dict[str, Any] | None = None,
    max_turns: int | None = None,
) -> Episode:
    """Play one episode of an environment that is not async.

    Args:
        environment: The instance to play on.
        player: Gives the answers.
        seed: Seeds the environment and, separately, the player's random numbers.
        options: The dataset row to reset with.
        max_turns: Stop after that many turns. Default: play until the environment ends the episode.

    Raises:
        EnvironmentProtocolError: If the environment breaks the protocol.
    """
    rng = random.Random(f"player {seed}")
    observation, _ = validate_reset(bound_reset(environment, seed, options)())
    episode = Episode(messages=as_messages(observation))
    while True:
        answer = player(episode.messages, rng)
        episode.messages.append({"role": "assistant", "content": answer})
        observation, reward, terminated, truncated, episode.info = validate_step(bound_step(environment, answer)())
        episode.rewards.append(reward)
        if terminated or truncated or len(episode.rewards) == max_turns:
            episode.final_observation = observation
            return episode
        episode.messages += as_messages(observation)


def known_players(environment: Environment) -> dict[str, Player]:
    """The players that come with an environment.

    Its method ``players()`` gives them by name, or its module defines ``random_player`` and ``expert_player``, as those of
    the ready tasks do. What the module defines goes first.

    Args:
        environment: The instance that they are to play on; some look at its state.

    Returns:
        Players by name: ``random`` plays in the right format and without regard to the state, ``expert`` as well as it
        can be done. Empty if none is known.
    """
    players = environment.players() if hasattr(environment, "players") else {}
    module = sys.modules[type(environment).__module__]
    named = {name: getattr(module, f"{name}_player", players.get(name)) for name in ("random", "expert")}
    return {name: player for name, player in {**players, **named}.items() if player is not None}


def demonstrate(environment: Environment, player: Player, seeds: Iterable[int]) -> list[dict[str, list[Message]]]:
    """One conversation per seed, ``{"messages": [...]}`` each: the rows TRL's ``SFTTrainer`` trains on."""
    return [{"messages": play(environment, player, seed).messages} for seed in seeds]


def compare(
    environment: Environment, better: Player, worse: Player, seeds: Iterable[int]
) -> list[dict[str, list[Message]]]:
    """Preference pairs, as TRL's ``DPOTrainer`` takes them: what one player did where the other went wrong.

    Both players play the same episode. The pair is their answers at the first turn where they part, after the same
    conversation. Seeds with which they never part, or the better player gets no higher return, give no pair.

    Returns:
        Rows ``{"prompt": [...], "chosen": [answer], "rejected": [answer]}`` of messages.
    """
    rows = []
    for seed in seeds:
        chosen, rejected = play(environment, better, seed), play(environment, worse, seed)
        pairs = enumerate(zip(chosen.messages, rejected.messages))
        index = next((index for index, (good, bad) in pairs if good != bad), None)
        if index is not None and chosen.episode_return > rejected.episode_return:
            good, bad = chosen.messages[index], rejected.messages[index]
            rows.append({"prompt": chosen.messages[:index], "chosen": [good], "rejected": [bad]})
    return rows


def compare_until(
    count: int, environment: Environment, better: Player, worse: Player, first_seed: int
) -> list[dict[str, list[Message]]]:
    """As many pairs of :func:`compare`, from one seed after the other; seeds that give none are passed over.

    Args:
        count: Number of pairs. It does not end if no seed gives any.
        environment: The instance to play on.
        better: The player whose answers are chosen.
        worse: The player whose answers are rejected.
        first_seed: Seed of the first episode.
    """
    pairs: list[dict[str, list[Message]]] = []
    for seed in itertools.count(first_seed):
        if len(pairs) >= count:
            break
        pairs += compare(environment, better, worse, [seed])
    return pairs
