"""Countdown: puzzles, what counts as a solution, and what the scripted policies reach."""

from __future__ import annotations

import random
import re
from fractions import Fraction

import pytest

from agile_environments.countdown import (
    LEVELS,
    Countdown,
    demonstrations,
    expert_policy,
    preferences,
    random_policy,
    reward,
    solve,
)
from agile_trainers.envs import check_environment, make_environment_factory, play
from agile_trainers.envs.questions.answers import exact_value

PUZZLE = "Use each of the numbers 3, 5 and 5 exactly once, with + - * / and brackets, to make 30. Answer ..."
RANDOM_SUCCESS = {"easy": 0.056, "normal": 0.042, "hard": 0.010}
"""What README.md says, over 10,000 puzzles."""


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("(3 * 5) * (5 / 5)", 0.0),  # a 5 too many
        ("5 * (3 + 3)", 0.0),  # not the numbers
        ("3 * 5 + 5", 0.1),
        ("5 * 5 + 3", 0.1),
        ("(3 + 5) * 5 = 40", 0.1),
        ("5 / (5 - 5)", 0.0),
        ("3 + 5", 0.0),
        ("-3 + 5 + 5", 0.0),
        ("", 0.0),
        ("thirty", 0.0),
        ("__import__('os')", 0.0),
        ("3 ** 5 * 5", 0.0),
        ("3.0 + 5 + 5", 0.0),
        ("(" * 150, 0.0),
        ("3 + 5 + 5" + " " * 1000, 0.1),
        ("3" * 5000, 0.0),
    ],
)
def test_rewards_by_hand(completion: str, expected: float) -> None:
    assert reward(completion, None, PUZZLE) == expected


def test_solutions_in_any_form_count() -> None:
    puzzle = PUZZLE.replace("make 30", "make 20")
    for solution in ("3 * 5 + 5", "5 + 5 * 3", "<answer>(5*3)+5 = 20</answer>", "so \\boxed{5 + (3 \u00d7 5)}"):
        assert reward(solution, None, puzzle) == 1.0
    assert reward("5 / 5 / 3", None, PUZZLE) == 0.1
    assert exact_value("1 / 3 + 2") == (Fraction(7, 3), [1, 3, 2])


def test_solving_tries_everything_and_stays_exact() -> None:
    assert solve([1, 1], 5) is None
    expression = solve([3, 3, 8, 8], 24)  # 8 / (3 - 8 / 3), which needs a fraction on the way
    assert (
        expression is not None
        and exact_value(expression)[0] == 24
        and sorted(exact_value(expression)[1]) == [3, 3, 8, 8]
    )


@pytest.mark.parametrize("level", LEVELS)
def test_puzzles_follow_their_level_and_have_the_solution_they_name(level: str) -> None:
    environment, (count, highest, target) = Countdown(level), LEVELS[level]
    for seed in range(100):
        row = environment.row("train", seed)
        assert len(row["numbers"]) == count and max(row["numbers"]) <= highest and 1 <= row["target"] <= target
        assert row["numbers"] == sorted(row["numbers"]), "an order of its own would make the same puzzle another one"
        assert reward(row["answer"], None, row["question"]) == 1.0
        stated = [int(number) for number in re.findall(r"\d+", row["question"])]
        assert stated[: count + 1] == [*row["numbers"], row["target"]]


@pytest.mark.parametrize("level", LEVELS)
def test_success_of_the_scripted_policies(level: str) -> None:
    environment = Countdown(level)
    assert all(play(environment, expert_policy, seed).success for seed in range(40))
    rate = sum(play(environment, random_policy, seed).success for seed in range(1500)) / 1500
    expected = RANDOM_SUCCESS[level]
    assert abs(rate - expected) < 4 * (expected / 1500) ** 0.5
    assert all(play(environment, random_policy, seed).rewards[0] >= 0.0 for seed in range(20))


def test_train_and_test_share_no_puzzle() -> None:
    asked = {
        split: {Countdown("easy", split=split).reset(seed=n)[0] for n in range(300)} for split in ("train", "test")
    }
    assert len(asked["test"]) > 50 and not asked["train"] & asked["test"]


def test_demonstrations_and_preferences() -> None:
    for row in demonstrations(6, seed=2, environment=Countdown("easy")):
        assert reward(row["messages"][1]["content"], None, row["messages"][0]["content"]) == 1.0
    for pair in preferences(6, environment=Countdown("hard")):
        question = pair["prompt"][0]["content"]
        scores = [reward(pair[name][0]["content"], None, question) for name in ("chosen", "rejected")]
        assert scores[0] == 1.0 and scores[1] < 1.0


def test_the_checker_finds_nothing_and_wrong_arguments_are_named() -> None:
    factory = make_environment_factory("agile:countdown", level="hard", few_shot=2)
    assert not check_environment(factory, episodes=3, actions=["1 + 2"]).findings
    assert [message["role"] for message in factory().reset(seed=5)[0]] == ["user", "assistant"] * 2 + ["user"]
    for kwargs, message in (
        ({"level": "heavy"}, "'heavy'.*easy, normal, hard"),
        ({"split": "dev"}, "no split 'dev'"),
    ):
        with pytest.raises(ValueError, match=message):
            Countdown(**kwargs)
    with pytest.raises(ValueError, match="Expected a puzzle"):
        random_policy([{"role": "user", "content": "hello"}], random.Random(0))
