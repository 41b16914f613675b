"""The policies that come with an environment."""

from __future__ import annotations

from statistics import fmean

import pytest
from installed import needs

from agile_environments import TASKS
from agile_environments.probes import PROBES
from agile_trainers.envs import ReasoningEnvironment, known_policies, make_environment_factory, play
from agile_trainers.envs.agent import Agent, is_agent

STEPPED = [name for name in TASKS if not is_agent(make_environment_factory(f"agile:{name}"))]
"""The ready tasks without the agents, whose policies `test_archive.py` compares."""


@pytest.mark.parametrize("name", [*STEPPED, *(f"probe/{name}" for name in PROBES), "reasoning_gym"])
def test_the_expert_does_better_than_the_random_policy(name: str) -> None:
    if name == "reasoning_gym":
        needs("reasoning_gym")
    environment = make_environment_factory("reasoning_gym:chain_sum" if name == "reasoning_gym" else f"agile:{name}")()
    policies = known_policies(environment)
    returns = {
        key: fmean(play(environment, policies[key], seed).episode_return for seed in range(8)) for key in policies
    }
    assert returns.keys() == {"random", "expert"}
    # In the probe of equal rewards, length is all that answers differ in.
    assert returns["expert"] > returns["random"] or name == "probe/equal_reward"
    if not name.startswith("probe"):
        assert all(play(environment, policies["expert"], seed).success for seed in range(8))


def test_gem_games_have_a_random_policy_only() -> None:
    needs("gem")
    environment = make_environment_factory("gem:game:GuessTheNumber-v0-easy")()
    policies = known_policies(environment)
    assert list(policies) == ["random"]
    assert play(environment, policies["random"], 0).messages[-1]["content"].startswith("\\boxed{")


def test_rows_given_by_the_data_set_alone_leave_only_the_expert() -> None:
    environment = ReasoningEnvironment(None)
    policies = known_policies(environment)
    assert list(policies) == ["expert"]
    assert play(environment, policies["expert"], 0, options={"question": "2 + 2", "answer": "4"}).success


def test_the_policies_of_an_agent_are_in_the_module_of_its_function() -> None:
    policies = known_policies(make_environment_factory("agile:archive", level="easy")())
    assert {name: policy.__name__ for name, policy in policies.items()} == {
        "random": "random_policy", "expert": "expert_policy"
    }  # fmt: skip
    assert known_policies(Agent.command(["true"], score=lambda task, finished: 1.0)()) == {}


def test_an_environment_without_policies_has_none() -> None:
    class Plain:
        reset = step = None

    assert known_policies(Plain()) == {}  # type: ignore[arg-type]
