"""Wordle: marks, words, and what the scripted policies reach."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from typing import Any

import pytest

from agile_environments.wordle import (
    LEVELS,
    Wordle,
    careless_policy,
    demonstrations,
    expert_policy,
    possible,
    preferences,
    random_legal_policy,
    random_policy,
    score,
    words,
)
from agile_environments.wordle.words import WORDS
from agile_trainers.envs import check_environment, make_environment_factory, play

CARELESS_SUCCESS = {"easy": 0.840, "normal": 0.882, "hard": 0.601}
"""What README.md says, over 10,000 games."""
EXPERT_MISSES = {"easy": 0, "normal": 0, "hard": 1}
"""Words the expert does not find in time."""


def game(secret: str, **kwargs: Any) -> Wordle:
    environment = Wordle(**kwargs)
    environment.reset(options={"secret": secret})
    return environment


def test_the_list() -> None:
    assert list(WORDS) == sorted(set(WORDS)) and {len(word) for word in WORDS} == {5} and len(WORDS) == 332
    assert all(word.isascii() and word.isalpha() and word.islower() for word in WORDS)
    assert len(set(words(20))) == 20 and words(len(WORDS)) == WORDS


@pytest.mark.parametrize(
    ("guess", "secret", "marks"),
    [
        ("crane", "crane", "+++++"),
        ("crane", "sugar", "-??--"),
        ("sweet", "sleep", "+-++-"),
        ("eerie", "zebra", "-+?--"),
        ("geese", "sheep", "-?+?-"),
        ("allow", "label", "???--"),
        ("jelly", "level", "-+??-"),
        ("aabbb", "cccaa", "??---"),
        ("aaabb", "caccc", "-+---"),
    ],
)
def test_marks_by_hand(guess: str, secret: str, marks: str) -> None:
    assert score(guess, secret) == marks


def test_a_game_by_hand() -> None:
    environment = Wordle()
    prompt, info = environment.reset(options={"secret": "sugar"})
    assert prompt == (
        "Find the word of five letters. You have 6 guesses. Each letter is answered with + (in its place), ? (elsewhere in "
        "the word) or - (not in the word). Answer with one word."
    )
    assert info == {"secret": "sugar", "anchor": ""}
    hint = ("- ? ? - -", 0.0, False, False, {"success": False, "anchor": "crane-??--"})
    assert environment.step("crane") == hint
    assert environment.step("about")[4]["anchor"] == "about?--?- crane-??--"
    for invalid in ("", "suga", "sugars", "su gar", "sug4r", "zucht\u00fc"):
        environment.reset(options={"secret": "sugar"})
        assert environment.step(invalid) == ("invalid", -0.2, False, False, {"success": False, "anchor": ""})
    assert environment.step("xxxxx")[1] == 0.0, "any five letters are a guess"
    assert environment.step(" Sugar\n") == ("correct", 1.0, True, False, {"success": True, "anchor": "sugar"})


def test_running_out_of_guesses_terminates_and_the_easy_prompt_names_the_words() -> None:
    environment = game("sugar", max_turns=2)
    assert environment.step("crane")[2:4] == (False, False)
    assert environment.step("x")[1:4] == (-0.2, True, False)
    prompt = Wordle("easy").reset(seed=0)[0]
    assert all(word in prompt for word in words(20))


@pytest.mark.parametrize("level", LEVELS)
def test_seeds_in_a_row_hold_every_word_once(level: str) -> None:
    environment = Wordle(level)
    secrets = [environment.reset(seed=seed)[1]["secret"] for seed in range(5, 5 + LEVELS[level][0])]
    assert sorted(secrets) == list(environment.words)


@pytest.mark.parametrize("level", LEVELS)
def test_success_of_the_scripted_policies(level: str) -> None:
    environment, (count, guesses), games = Wordle(level), LEVELS[level], 996
    exact = float(1 - Fraction(count - 1, count) ** guesses)
    for policy, expected in ((random_policy, exact), (careless_policy, CARELESS_SUCCESS[level])):
        rate = sum(play(environment, policy, seed).success for seed in range(games)) / games
        assert abs(rate - expected) <= 3.5 * math.sqrt(expected * (1 - expected) / games), policy.__name__
    missed = sum(not play(environment, expert_policy, seed).success for seed in range(count))
    assert missed == EXPERT_MISSES[level]


def test_legal_play_agrees_with_every_clue() -> None:
    environment = Wordle()
    for seed in range(20):
        episode, secret = play(environment, random_legal_policy, seed), environment.secret
        guesses = [answer["content"] for answer in episode.messages[1::2]]
        for index, guess in enumerate(guesses):
            assert all(score(earlier, guess) == score(earlier, secret) for earlier in guesses[:index])
    assert "sugar" in possible(len(WORDS), (("crane", "-??--"),))


def test_bad_options_and_arguments() -> None:
    for secret in ("crate", "Sugar", 5):
        with pytest.raises(ValueError, match=r"secret.*332"):
            game(secret)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"word.*secret"):
        Wordle().reset(options={"word": "sugar"})
    with pytest.raises(ValueError, match=r"'heavy'.*easy, normal, hard"):
        Wordle("heavy")
    with pytest.raises(ValueError, match=r"max_turns.*0"):
        Wordle(max_turns=0)
    with pytest.raises(ValueError, match="word of five letters"):
        random_policy([{"role": "user", "content": "hello"}], random.Random(0))


def test_the_checker_finds_nothing() -> None:
    factory = make_environment_factory("agile:wordle", level="hard")
    assert not check_environment(factory, episodes=3, max_turns=4, actions=["crane", "x", "sugar"]).findings


def test_demonstrations_and_preferences() -> None:
    rows = demonstrations(6, seed=3)
    assert rows == demonstrations(6, seed=3) and rows != demonstrations(6, seed=4)
    for seed, row in enumerate(rows, start=3):
        environment = Wordle()
        environment.reset(seed=seed)
        steps = [environment.step(message["content"]) for message in row["messages"][1::2]]
        assert steps[-1][2] and all(step[1] >= 0 for step in steps)
    for pair in preferences(6):
        (chosen,), (rejected,) = pair["chosen"], pair["rejected"]
        assert chosen["content"] == expert_policy(pair["prompt"], random.Random(0)) != rejected["content"]
