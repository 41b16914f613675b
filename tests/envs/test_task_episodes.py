"""Episodes of the ready tasks stay what they are: seeds, texts, rewards and ends, held by digests of whole episodes."""

import hashlib
import importlib
import json
from typing import Any

import pytest

from agile_environments import TASKS
from agile_trainers.envs.agent import is_agent
from agile_trainers.envs.registry import make_environment_factory
from agile_trainers.envs.scripted_policies import play
from agile_trainers.evaluation.scripted_policies import play_agent

POLICIES = ("random_policy", "random_legal_policy", "careless_policy", "expert_policy")
EPISODES = {
    "archive": "7c2b8da4ca751a70",
    "calculator": "e7f0d8045d093764",
    "colours": "c81cbf813d01ceeb",
    "countdown": "80a4283cead7f703",
    "courier": "920b21eb14a88fc1",
    "grid_navigation": "4bad66af99a3e3c2",
    "guess_number": "50286eadb21dec04",
    "mastermind": "ae83ecd5c6627cdc",
    "math": "ac1d6196112e680b",
    "search_qa": "340aa191afc194ad",
    "wordle": "803156308e84d53f",
}
"""Digest of every level, policy and seed of a task, and of the rows that it makes for SFT and DPO."""


def digest(task: str) -> str:
    module = importlib.import_module(f"agile_environments.{task}")
    played: list[Any] = []
    for level in module.LEVELS:
        factory = make_environment_factory(f"agile:{task}", level=level)
        if is_agent(factory):
            for policy in POLICIES:
                if hasattr(module, policy):
                    episodes = play_agent(factory, getattr(module, policy), range(3))
                    played += [[one.calls, one.reward, one.info] for one in episodes]
            continue
        environment = factory()
        for seed in range(3):
            _, info = environment.reset(seed=seed)
            played.append([level, seed, info])
            for policy in POLICIES:
                if hasattr(module, policy):
                    episode = play(environment, getattr(module, policy), seed, max_turns=8)
                    # The list of tools is written by transformers, the rest by the task.
                    messages = [message for message in episode.messages if message["role"] != "system"]
                    played.append([messages, episode.rewards, episode.final_observation, episode.info])
            for answer in ("", "nonsense"):
                environment.reset(seed=seed)
                played.append(environment.step(answer))
    if hasattr(module, "demonstrations"):
        rows = [*module.demonstrations(4, seed=2), *module.preferences(3, seed=1)]
        played.append([[m for m in messages if m["role"] != "system"] for row in rows for messages in row.values()])
    return hashlib.sha256(json.dumps(played, default=str).encode()).hexdigest()[:16]


@pytest.mark.parametrize("task", TASKS)
def test_episodes_are_unchanged(task: str) -> None:
    assert digest(task) == EPISODES[task]


@pytest.mark.parametrize("task", ["colours", "courier", "grid_navigation", "guess_number", "mastermind", "wordle"])
def test_games_declare_the_range_of_their_returns(task: str) -> None:
    """Both ends are reached: by nonsense at every turn, and by a win without it."""
    module = importlib.import_module(f"agile_environments.{task}")
    for level in module.LEVELS:
        environment = make_environment_factory(f"agile:{task}", level=level)()
        low, high = environment.return_range
        worst = play(environment, lambda messages, rng: "nonsense", 0, max_turns=100)
        best = max(sum(play(environment, module.expert_policy, seed, max_turns=100).rewards) for seed in range(5))
        assert sum(worst.rewards) == pytest.approx(low) and len(worst.rewards) == environment.max_turns
        assert best == high == 1.0
