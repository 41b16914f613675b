"""Episodes of the ready tasks stay what they are: seeds, texts, rewards and ends, held by digests of whole episodes."""

import hashlib
import importlib
import json
from typing import Any

import pytest

from agile_environments import TASKS
from agile_trainers.envs.players import play
from agile_trainers.envs.registry import make_environment_factory

PLAYERS = ("random_player", "random_legal_player", "careless_player", "expert_player")
EPISODES = {
    "calculator": "e7f0d8045d093764",
    "countdown": "80a4283cead7f703",
    "grid_navigation": "4bad66af99a3e3c2",
    "guess_number": "50286eadb21dec04",
    "mastermind": "ae83ecd5c6627cdc",
    "math": "ac1d6196112e680b",
    "search_qa": "340aa191afc194ad",
    "wordle": "803156308e84d53f",
}
"""Digest of every level, player and seed of a task, and of the rows that it makes for SFT and DPO."""


def digest(task: str) -> str:
    module = importlib.import_module(f"agile_environments.{task}")
    played: list[Any] = []
    for level in module.LEVELS:
        environment = make_environment_factory(f"agile:{task}", level=level)()
        for seed in range(3):
            _, info = environment.reset(seed=seed)
            played.append([level, seed, info])
            for player in PLAYERS:
                if hasattr(module, player):
                    episode = play(environment, getattr(module, player), seed, max_turns=8)
                    # The list of tools is written by transformers, the rest by the task.
                    messages = [message for message in episode.messages if message["role"] != "system"]
                    played.append([messages, episode.rewards, episode.final_observation, episode.info])
            for answer in ("", "nonsense"):
                environment.reset(seed=seed)
                played.append(environment.step(answer))
    rows = [*module.demonstrations(4, seed=2), *module.preferences(3, seed=1)]
    played.append([[m for m in messages if m["role"] != "system"] for row in rows for messages in row.values()])
    return hashlib.sha256(json.dumps(played).encode()).hexdigest()[:16]


@pytest.mark.parametrize("task", TASKS)
def test_episodes_are_unchanged(task: str) -> None:
    assert digest(task) == EPISODES[task]
