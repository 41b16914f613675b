"""Mastermind: marks, codes, and what the scripted policies reach."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from typing import Any

import pytest

from agile_environments.mastermind import (
    LEVELS,
    Mastermind,
    careless_policy,
    codes,
    demonstrations,
    expert_policy,
    possible,
    preferences,
    random_legal_policy,
    random_policy,
    score,
)
from agile_trainers.envs import check_environment, make_environment_factory, play

CARELESS_SUCCESS = {"easy": 0.710, "normal": 0.872, "hard": 0.691}
"""What README.md says, over 10,000 games."""


def game(secret: str, **kwargs: Any) -> Mastermind:
    environment = Mastermind(**kwargs)
    environment.reset(options={"secret": secret})
    return environment


@pytest.mark.parametrize(
    ("guess", "secret", "marks"),
    [
        ("123", "123", (3, 0)),
        ("123", "231", (0, 3)),
        ("112", "121", (1, 2)),
        ("111", "123", (1, 0)),
        ("331", "123", (0, 2)),
        ("1122", "2211", (0, 4)),
        ("1222", "2111", (0, 2)),
        ("456", "123", (0, 0)),
    ],
)
def test_marks_by_hand(guess: str, secret: str, marks: tuple[int, int]) -> None:
    assert score(guess, secret) == score(secret, guess) == marks


def test_a_game_by_hand() -> None:
    environment = Mastermind()
    prompt, info = environment.reset(options={"secret": "253"})
    assert prompt == ("Find the code: 3 digits of 1 to 6, which may repeat. You have 7 guesses. Answer with 3 digits.")
    assert info == {"secret": "253", "anchor": ""}
    hint = "1 in the right place, 1 in the wrong place"
    assert environment.step("2 3 4") == (hint, 0.0, False, False, {"success": False, "anchor": "234:1,1"})
    assert environment.step("112")[4]["anchor"] == "112:0,1 234:1,1"
    for invalid in ("", "12", "1234", "127", "one", "1,2,3", "-12"):
        environment.reset(options={"secret": "253"})
        assert environment.step(invalid) == ("invalid", -0.2, False, False, {"success": False, "anchor": ""})
    assert environment.step(" 2 5 3\n") == ("correct", 1.0, True, False, {"success": True, "anchor": "253"})


def test_the_order_of_guesses_does_not_change_the_anchor() -> None:
    one, other = game("11", level="easy"), game("11", level="easy")
    assert [one.step(guess)[4]["anchor"] for guess in ("12", "34")][-1] == (
        [other.step(guess)[4]["anchor"] for guess in ("34", "12")][-1]
    )


def test_running_out_of_guesses_terminates() -> None:
    environment = game("111", max_turns=2)
    assert environment.step("112")[2:4] == (False, False)
    assert environment.step("x")[1:4] == (-0.2, True, False)


@pytest.mark.parametrize("level", LEVELS)
def test_seeds_in_a_row_hold_every_code_once(level: str) -> None:
    length, highest, _ = LEVELS[level]
    every = codes(length, highest)
    assert len(every) == highest**length
    secrets = [Mastermind(level).reset(seed=seed)[1]["secret"] for seed in range(7, 7 + len(every))]
    assert sorted(secrets) == sorted(every)


@pytest.mark.parametrize("level", LEVELS)
def test_success_of_the_scripted_policies(level: str) -> None:
    environment, (length, highest, guesses) = Mastermind(level), LEVELS[level]
    count, games = highest**length, 400
    exact = float(1 - Fraction(count - 1, count) ** guesses)
    for policy, expected in ((random_policy, exact), (careless_policy, CARELESS_SUCCESS[level])):
        rate = sum(play(environment, policy, seed).success for seed in range(games)) / games
        assert abs(rate - expected) <= 3.5 * math.sqrt(expected * (1 - expected) / games), policy.__name__
    assert all(play(environment, expert_policy, seed).success for seed in range(min(count, 60)))


def test_the_expert_finds_every_code_of_the_small_levels() -> None:
    for level in ("easy", "normal"):
        length, highest, _ = LEVELS[level]
        assert all(play(Mastermind(level), expert_policy, seed).success for seed in range(highest**length))


def test_legal_play_agrees_with_every_clue() -> None:
    environment = Mastermind("normal")
    for seed in range(20):
        episode, secret = play(environment, random_legal_policy, seed), environment.secret
        guesses = [answer["content"].replace(" ", "") for answer in episode.messages[1::2]]
        for index, guess in enumerate(guesses):
            assert all(score(earlier, guess) == score(earlier, secret) for earlier in guesses[:index])
    assert possible(2, 4, (("12", (2, 0)),)) == ("12",)


def test_bad_options_and_arguments() -> None:
    for secret in ("12", "127", 123):
        with pytest.raises(ValueError, match=r"secret.* 3 .* 6"):
            game(secret)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"code.*secret"):
        Mastermind().reset(options={"code": "123"})
    with pytest.raises(ValueError, match=r"'heavy'.*easy, normal, hard"):
        Mastermind("heavy")
    with pytest.raises(ValueError, match=r"max_turns.*0"):
        Mastermind(max_turns=0)
    with pytest.raises(ValueError, match="digits of 1 to"):
        random_policy([{"role": "user", "content": "hello"}], random.Random(0))


def test_the_checker_finds_nothing() -> None:
    factory = make_environment_factory("agile:mastermind", level="hard")
    assert not check_environment(factory, episodes=3, max_turns=6, actions=["1 1 2 2", "x", "3456"]).findings


def test_demonstrations_and_preferences() -> None:
    rows = demonstrations(6, seed=3)
    assert rows == demonstrations(6, seed=3) and rows != demonstrations(6, seed=4)
    for seed, row in enumerate(rows, start=3):
        environment = Mastermind()
        environment.reset(seed=seed)
        steps = [environment.step(message["content"]) for message in row["messages"][1::2]]
        assert steps[-1][2] and all(step[1] >= 0 for step in steps)
    for pair in preferences(6):
        (chosen,), (rejected,) = pair["chosen"], pair["rejected"]
        assert chosen["content"] == expert_policy(pair["prompt"], random.Random(0)) != rejected["content"]
