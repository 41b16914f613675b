"""Guess a number: rules, secrets, and what the scripted policies reach."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from functools import cache
from typing import Any

import pytest

from agile_environments.guess_number import (
    LEVELS,
    GuessNumber,
    demonstrations,
    halving_policy,
    preferences,
    random_legal_policy,
    random_policy,
)
from agile_trainers.envs import check_environment, play


def game(secret: int, **kwargs: Any) -> GuessNumber:
    environment = GuessNumber(**kwargs)
    environment.reset(options={"secret": secret})
    return environment


@cache
def found(numbers: int, guesses: int) -> Fraction:
    """Expected count, among that many equally possible secrets, of those that uniform legal guesses find."""
    if numbers == 0 or guesses == 0:
        return Fraction(0)
    splits = range(numbers)
    return sum((1 + found(k, guesses - 1) + found(numbers - 1 - k, guesses - 1) for k in splits), Fraction(0)) / numbers


def test_a_game_by_hand() -> None:
    environment = game(7)
    assert environment.step("6") == ("higher", 0.0, False, False, {"success": False})
    assert environment.step(" 9\n") == ("lower", 0.0, False, False, {"success": False})
    assert environment.step("seven") == ("invalid", -0.2, False, False, {"success": False})
    assert environment.step("7") == ("correct", 1.0, True, False, {"success": True})


def test_running_out_of_guesses_terminates() -> None:
    environment = game(7, max_turns=2)
    assert environment.step("1")[2:4] == (False, False)
    assert environment.step("2") == ("higher", 0.0, True, False, {"success": False})


@pytest.mark.parametrize("action", ["", "seven", "0", "13", "-7", "7 8.", "7 7", "7.0", "\u0667", "9" * 5000])
def test_invalid_moves(action: str) -> None:
    assert game(7).step(action) == ("invalid", -0.2, False, False, {"success": False})


def test_the_prompt_names_range_and_guesses() -> None:
    observation, info = GuessNumber("hard").reset(seed=30)
    assert observation == "Guess the number between 1 and 24. You have 5 guesses. Answer with one number."
    assert info == {"secret": 7}
    assert "You have 1 guess." in GuessNumber(max_turns=1).reset(seed=0)[0]


def test_seeds_hold_every_secret_once_and_a_row_overrides_them() -> None:
    environment = GuessNumber()
    secrets = [environment.reset(seed=seed)[1]["secret"] for seed in range(100, 112)]
    assert sorted(secrets) == list(range(1, 13))
    assert {environment.reset(seed=seed, options={"secret": 5})[1]["secret"] for seed in range(12)} == {5}
    assert environment.reset(seed=3, options={"secret": None})[1]["secret"] == 4
    assert 1 <= environment.reset()[1]["secret"] <= 12


def test_bad_options_and_arguments() -> None:
    environment = GuessNumber()
    for secret in (0, 13, 2.5, "3"):
        with pytest.raises(ValueError, match=r"secret.* 1 .* 12"):
            environment.reset(options={"secret": secret})
    with pytest.raises(ValueError, match=r"agile:guess_number.*number.*secret"):
        environment.reset(options={"number": 3})
    with pytest.raises(ValueError, match=r"'heavy'.*easy, normal, hard"):
        GuessNumber("heavy")
    with pytest.raises(ValueError, match=r"max_turns.*0"):
        GuessNumber(max_turns=0)


def test_the_checker_finds_nothing() -> None:
    actions = ["6", "x", "3", "9"]
    assert not check_environment(GuessNumber, episodes=5, max_turns=4, actions=actions).findings


@pytest.mark.parametrize("level", LEVELS)
def test_success_rates_are_the_exact_probabilities(level: str) -> None:
    high, guesses = LEVELS[level]
    environment, games = GuessNumber(level), 3000
    exact = {
        random_policy: float(1 - Fraction(high - 1, high) ** guesses),
        random_legal_policy: float(found(high, guesses) / high),
    }
    for policy, probability in exact.items():
        rate = sum(play(environment, policy, seed).success for seed in range(games)) / games
        # seeds go through the secrets in turn, which only lowers the variance
        assert abs(rate - probability) <= 3 * math.sqrt(probability * (1 - probability) / games), policy.__name__


def test_the_readme_gives_the_exact_probabilities_of_the_normal_level() -> None:
    assert float(1 - Fraction(11, 12) ** 4) == pytest.approx(0.294, abs=5e-4)
    assert float(found(12, 4) / 12) == pytest.approx(0.691, abs=5e-4)


def test_halving_wins_every_game_and_legal_play_obeys_every_hint() -> None:
    for level, (high, _) in LEVELS.items():
        environment = GuessNumber(level)
        assert all(play(environment, halving_policy, seed).success for seed in range(high))
        for seed in range(5 * high):
            episode = play(environment, random_legal_policy, seed)
            low, top = 1, high
            for answer, hint in zip(episode.messages[1::2], episode.messages[2::2]):
                guess = int(answer["content"])
                assert low <= guess <= top
                low, top = (guess + 1, top) if hint["content"] == "higher" else (low, guess - 1)


def test_policies_ignore_invalid_moves_and_refuse_other_prompts() -> None:
    talk = [
        {"role": "user", "content": GuessNumber().reset(seed=0)[0]},
        {"role": "assistant", "content": "13"},
        {"role": "user", "content": "invalid"},
        {"role": "assistant", "content": "8"},
        {"role": "user", "content": "lower"},
    ]
    assert halving_policy(talk, random.Random(0)) == "4"  # the middle of 1 to 7
    with pytest.raises(ValueError, match="between"):
        halving_policy([{"role": "user", "content": "hello"}], random.Random(0))


def test_demonstrations_are_conversations_that_end_with_a_guess() -> None:
    rows = demonstrations(24, seed=5)
    assert rows == demonstrations(24, seed=5) and rows != demonstrations(24, seed=6)
    wins = 0
    for index, row in enumerate(rows):
        messages = row["messages"]
        assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2)
        environment = game((5 + index) % 12 + 1)
        for answer in messages[1::2]:
            wins += environment.step(answer["content"])[1] == 1.0
    assert wins == sum(play(GuessNumber(), random_legal_policy, seed).success for seed in range(5, 29))
    easy = demonstrations(6, policy=halving_policy, environment=GuessNumber("easy"))
    assert all("between 1 and 6" in row["messages"][0]["content"] for row in easy)


def test_preferences_are_the_best_guess_against_another() -> None:
    pairs = preferences(8, seed=1)
    assert pairs == preferences(8, seed=1) and len(pairs) == 8
    for pair in pairs:
        (chosen,), (rejected,) = pair["chosen"], pair["rejected"]
        assert chosen["content"] == halving_policy(pair["prompt"], random.Random(0)) != rejected["content"]


def test_separators_around_a_number_are_no_error() -> None:
    """Python strips the control characters 28 to 31 from text, but ``int`` does not."""
    environment = GuessNumber()
    environment.reset(options={"secret": 9})
    assert environment.step("\x1d9\x1f")[1] == 1.0
