"""The calculator task: rules, splits, and what the scripted policies reach."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from agile_environments.calculator import (
    LEVELS,
    Calculator,
    call,
    careless_policy,
    demonstrations,
    expert_policy,
    preferences,
    random_policy,
)
from agile_trainers.embedded import make_word_tokenizer
from agile_trainers.envs import check_environment, make_environment_factory, play
from agile_trainers.envs.tools.toolbox import ToolCall, parse_tool_calls


def test_an_episode_by_hand() -> None:
    task = Calculator()
    system, user = task.reset(options={"question": "3 + 4", "answer": "7"})[0]
    assert "calculate" in system["content"] and user["content"] == "Compute 3 + 4"  # type: ignore[index]
    assert task.step(call("3 + 4"))[:2] == ("<tool_response>\n7\n</tool_response>", 0.0)
    assert task.step("<tool_call> 3 + 4 </tool_call>")[1] == -0.2
    assert task.step("7")[:3] == ("correct", 1.0, True)


def test_calls_are_read_back_through_a_tokenizer_of_words() -> None:
    tokenizer = make_word_tokenizer(call("3 + 14").split())
    decoded = str(tokenizer.decode(tokenizer.encode(call("3 + 14"))))
    assert parse_tool_calls(decoded) == [ToolCall("calculate", {"expression": " 3 + 14 "})]


BOUNDS = {"easy": (-19, 40), "normal": (-9800, 9900), "hard": (-998 * 1998, 1998 * 1998)}
"""Smallest and largest value of each level's expressions, worked out by hand."""


@pytest.mark.parametrize("level", LEVELS)
def test_success_rates_are_the_exact_probabilities(level: str) -> None:
    """A guess hits one value of the level's range; the careless policy calls (.4) and believes (.9) or guesses."""
    guess = 1 / (BOUNDS[level][1] - BOUNDS[level][0] + 1)
    task, episodes = Calculator(level), 600
    for policy, exact in ((random_policy, guess), (careless_policy, 0.36 + 0.64 * guess), (expert_policy, 1.0)):
        rate = sum(play(task, policy, seed).success for seed in range(episodes)) / episodes
        assert abs(rate - exact) <= 3 * math.sqrt(exact * (1 - exact) / episodes) + 1e-9, policy.__name__


@pytest.mark.parametrize("level", LEVELS)
def test_values_and_guesses_fill_the_range(level: str) -> None:
    task, rng, (low, high) = Calculator(level), random.Random(0), BOUNDS[level]
    assert task.rows is not None
    rows = [task.rows.row("train", index) for index in range(300)]
    assert low <= min(int(row["answer"]) for row in rows) < max(int(row["answer"]) for row in rows) <= high
    guesses = [int(random_policy([{"role": "user", "content": f"Compute {row['question']}"}], rng)) for row in rows]
    assert low <= min(guesses) < low + 0.1 * (high - low) and high - 0.1 * (high - low) < max(guesses) <= high
    assert len({row["question"] for row in rows}) > 200


def test_train_and_test_expressions_never_mix() -> None:
    """All 800 expressions of the easy level, about a fifth of them held out."""
    asked: list[set[Any]] = []
    for split in ("train", "test"):
        rows = Calculator(split=split).rows
        assert rows is not None
        asked.append({rows.row(split, index)["question"] for index in range(1500)})
    assert asked[0].isdisjoint(asked[1])
    assert 0.15 < len(asked[1]) / (len(asked[0]) + len(asked[1])) < 0.25


def test_demonstrations_and_preferences() -> None:
    rows = demonstrations(40, seed=5)
    assert rows == demonstrations(40, seed=5) and rows != demonstrations(40, seed=6)
    for row in rows:
        roles = [message["role"] for message in row["messages"]]
        assert roles in (["system", "user", "assistant"], ["system", "user", "assistant", "user", "assistant"])
    pairs = preferences(30)
    assert len(pairs) == 30 and pairs == preferences(30)
    later = 0
    for pair in pairs:
        (chosen,), (rejected,) = pair["chosen"], pair["rejected"]
        asked = pair["prompt"][-1]["content"]
        later += "<tool_response>" in asked
        assert ("<tool_call>" in chosen["content"]) == ("<tool_response>" not in asked)
        assert "<tool_call>" not in rejected["content"] and rejected != chosen
    assert 0 < later < 30


def test_the_checker_finds_nothing() -> None:
    factory = make_environment_factory("agile:calculator", level="hard", split="test")
    actions = [call("1 + 1"), "<tool_call>", "3"]
    assert not check_environment(factory, episodes=4, max_turns=4, actions=actions).findings
    with pytest.raises(ValueError, match=r"'heavy'.*easy, normal, hard"):
        Calculator("heavy")
    with pytest.raises(ValueError, match=r"Expected a question that says 'Compute \.\.\.'"):
        expert_policy([{"role": "user", "content": "hello"}], random.Random(0))
