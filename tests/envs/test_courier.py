"""Courier: its rules, what the model sees of a game, and that no way of answering makes up for useless notes."""

from __future__ import annotations

import inspect
import itertools
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from agile_environments.courier import (
    LEVELS,
    WORDS,
    Courier,
    careless_policy,
    demonstrations,
    expert_policy,
    preferences,
    random_policy,
)
from agile_trainers.embedded import make_tokenizer, make_word_tokenizer, words_of
from agile_trainers.envs import check_environment, play
from agile_trainers.rollout.chat.renderer import ChatRenderer
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.environment_pool import EnvironmentPool
from agile_trainers.rollout.generators.scripted import ScriptedGenerator
from agile_trainers.rollout.spec import EpisodeSpec, Limits
from agile_trainers.types import StopReason, Trajectory

TOKENIZER = make_word_tokenizer(words_of(demonstrations(16, level="hard"), "over", "yes"))
NOTES = (*WORDS, "Your", "")
"""What is noted down in the enumeration: every word, another, and nothing."""


def through_the_engine(
    word: str, said: list[str], level: str = "easy", tokenizer: PreTrainedTokenizerBase = TOKENIZER, **options: Any
) -> Trajectory:
    """A game with these answers and notes, in the order in which the model is asked."""
    answers = iter(said)

    def answer(_: Any) -> list[int]:
        return [*tokenizer.encode(next(answers), add_special_tokens=False), tokenizer.eos_token_id]

    pool = EnvironmentPool(lambda: Courier(level, **options))
    engine = RolloutEngine(pool, ChatRenderer(tokenizer), Limits(20, 8, 500))
    (game,) = engine.run([EpisodeSpec(0, (0,), {"word": word})], ScriptedGenerator(answer))
    return game


def test_a_game_by_hand() -> None:
    game = Courier("normal")
    assert game.reset(seed=1) == ("You carry a word to the king : owl", {"word": "owl"})
    assert game.step("yes") == ("You walk on over hills and through woods", 0.0, False, False, {"success": False})
    assert game.step("owl") == ("The king asks you for it", 0.0, False, False, {"success": False})
    assert game.step(" owl\n") == ("over", 1.0, True, False, {"success": True})


@pytest.mark.parametrize(("answer", "reward"), [("owl", 1.0), ("fox", 0.0), ("owl fox", -0.2), ("", -0.2)])
def test_the_last_answer_alone_is_rewarded(answer: str, reward: float) -> None:
    game = Courier("easy")
    game.reset(options={"word": "owl"})
    assert game.step(answer)[1:4] == (0.0, False, False)
    assert game.step(answer) == ("over", reward, True, False, {"success": reward == 1.0})


def test_seeds_hold_every_word_once_and_a_row_overrides_them() -> None:
    game = Courier()
    assert sorted(game.reset(seed=seed)[1]["word"] for seed in range(80, 88)) == sorted(WORDS)
    assert game.reset(seed=3, options={"word": "yak"})[1] == {"word": "yak"}
    assert game.reset()[1]["word"] in WORDS


def test_bad_options_and_arguments() -> None:
    with pytest.raises(ValueError, match=r"word must be one of fox.*'wolf'"):
        Courier().reset(options={"word": "wolf"})
    with pytest.raises(ValueError, match=r"max_turns must be at least 2, got 1"):
        Courier(max_turns=1)
    with pytest.raises(ValueError, match=r"memory must be at least 1, got 0"):
        Courier(memory=0)
    with pytest.raises(ValueError, match=r"'far'.*easy, normal, hard"):
        Courier("far")


def test_the_checker_finds_nothing() -> None:
    assert not check_environment(Courier, episodes=8, max_turns=3, actions=[*WORDS, "x"]).findings


def test_a_game_as_the_model_sees_it() -> None:
    """The first conversation ends with the request for a note; of it, only the note is in the second."""
    game = through_the_engine("elk", ["yes", "elk", "elk"])
    assert [turn.question for turn in game.turns] == [False, True, False]
    assert [turn.messages for turn in game.turns[1:]] == [
        [
            {"role": "user", "content": "You carry a word to the king : elk"},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "The king asks you for it\n\nWrite a note"},
        ],
        [{"role": "user", "content": "Your note :\nelk\n\nThe king asks you for it"}],
    ]
    assert game.rewards == [0.0, 0.0, 1.0] and game.success and game.stop_reason is StopReason.TERMINATED


@pytest.mark.parametrize("tokenizer", [TOKENIZER, make_tokenizer()], ids=["words", "pieces"])
@pytest.mark.parametrize("level", LEVELS)
def test_every_second_turn_is_a_note_whatever_is_said(level: str, tokenizer: PreTrainedTokenizerBase) -> None:
    for said in ("", "fox", "fox owl"):
        game = through_the_engine("bee", [said] * 20, level, tokenizer)
        asked = [turn.question for turn in game.turns]
        # The first prompt may already exceed the memory; the note is then asked for before the first answer, too.
        asked = asked[1:] if asked[0] else asked
        assert asked == [place % 2 == 1 for place in range(2 * LEVELS[level][0] - 1)]
        assert all(turn.question == (place % 2 == 0) for place, turn in enumerate(reversed(game.turns[:-1])))


def test_with_memory_enough_nothing_is_forgotten() -> None:
    game = through_the_engine("bee", ["yes", "yes", "bee"], "normal", memory=200)
    assert game.paths is None and not any(turn.question for turn in game.turns) and game.success


def test_without_a_note_that_depends_on_the_word_every_way_of_answering_is_chance() -> None:
    """All games of one note: every word, every note, every answer.

    What the last answer is sampled after depends on the note alone. Of the eight words, each pair of a note and an answer
    wins with exactly one. So whatever the odds of notes and of answers after them: if the notes do not depend on the word,
    the odds of winning are a mean of eighths. Notes that tell the words apart win every game.
    """
    seen: dict[str, set[tuple[int, ...]]] = {}
    won: dict[tuple[str, str], int] = {}
    for word, note in itertools.product(WORDS, NOTES):
        seen.setdefault(note, set()).add(tuple(through_the_engine(word, ["yes", note, ""]).prompt_of(2)))
        for answer in WORDS:
            game = Courier("easy")
            game.reset(options={"word": word})
            game.step("yes")
            won[note, answer] = won.get((note, answer), 0) + game.step(answer)[4]["success"]
    assert all(len(prompts) == 1 for prompts in seen.values())
    assert len(set.union(*seen.values())) == len(NOTES)
    assert {*won.values()} == {1}
    rng = random.Random(0)
    for _ in range(20):  # any policy whose notes ignore the word, exactly
        odds = [Fraction(rng.randrange(1, 9)) for _ in NOTES]
        rules = {note: [Fraction(rng.randrange(9)) + 1 for _ in WORDS] for note in NOTES}
        success = sum(
            weight / sum(odds) * chance / sum(rules[note]) * Fraction(won[note, answer], len(WORDS))
            for note, weight in zip(NOTES, odds, strict=True)
            for answer, chance in zip(WORDS, rules[note], strict=True)
        )
        assert success == Fraction(1, len(WORDS))
    assert all(through_the_engine(word, ["yes", word, word]).success for word in WORDS)


@pytest.mark.parametrize("level", LEVELS)
def test_success_of_the_policies(level: str) -> None:
    game, seeds = Courier(level), range(2000)
    assert all(play(game, expert_policy, seed).success for seed in range(8))
    rate = sum(play(game, random_policy, seed).success for seed in seeds) / len(seeds)
    assert abs(rate - 1 / 8) < 3 * (7 / 64 / len(seeds)) ** 0.5


def test_demonstrations_are_what_the_model_sees_of_careless_games() -> None:
    """Useless first notes, every one of which is then trusted: one game in eight is won by luck."""
    rows = demonstrations(800, seed=8)
    assert rows == demonstrations(800, seed=8) and len(rows) == 1600
    won = 0
    for number, (before, after) in enumerate(zip(rows[::2], rows[1::2], strict=True)):
        word, note = WORDS[(8 + number) % 8], before["messages"][-1]["content"]
        assert before["messages"][0]["content"].endswith(word) and before["messages"][2]["content"].endswith("note")
        said = [message["content"] for message in after["messages"]]
        assert said == [f"Your note :\n{note}\n\nThe king asks you for it", note]
        won += note == word
    assert abs(won / 800 - 1 / 8) < 3 * (7 / 64 / 800) ** 0.5
    game = through_the_engine("fox", ["yes", "cat", "cat"])
    assert game.turns[1].messages is not None and game.turns[2].messages is not None
    paths = [[message["content"] for message in turn.messages or []] for turn in game.turns[1:]]
    shown = demonstrations(
        1,
        policy=lambda messages, rng: (
            "yes" if len(messages) == 1 and messages[0]["content"].startswith("You carry") else "cat"
        ),
    )
    assert [[message["content"] for message in row["messages"][:-1]] for row in shown] == paths


def test_preferences_are_the_word_against_another() -> None:
    pairs = preferences(16, seed=3)
    for number, pair in enumerate(pairs):
        (chosen,), (rejected,) = pair["chosen"], pair["rejected"]
        assert chosen["content"] == WORDS[(3 + number) % 8] != rejected["content"] in WORDS
        assert pair["prompt"][-1]["content"].endswith("Write a note")


def test_the_careless_policy_trusts_its_notes_and_wastes_the_first() -> None:
    note = [{"role": "user", "content": "Your note :\nowl\n\nThe king asks you for it"}]
    assert {careless_policy(note, random.Random(seed)) for seed in range(50)} == {"owl"}
    first = [{"role": "user", "content": "You carry a word to the king : owl"}]
    assert {careless_policy(first, random.Random(seed)) for seed in range(200)} == {*WORDS}


def test_the_tutorial_shows_how_it_forgets() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "tutorial" / "summary.md"
    own = inspect.getsource(Courier.context).replace("{_NOTE}", "Your note :").replace("{_ASK}", "Write a note")
    assert f"{own}```" in page.read_text(encoding="utf-8")
