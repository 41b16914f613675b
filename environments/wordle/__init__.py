"""Wordle: find a word from which letters of each guess were right. See README.md for what good play reaches."""

from __future__ import annotations

import random
import re
from collections import Counter
from functools import cache, lru_cache
from typing import Any

from agile_environments.wordle.words import WORDS
from agile_trainers.envs.answers import read_answer
from agile_trainers.envs.base import ResetResult, StepResult, read_options
from agile_trainers.envs.play import Player, compare_until, demonstrate
from agile_trainers.types import Message

LEVELS = {"easy": (20, 4), "normal": (len(WORDS), 6), "hard": (len(WORDS), 4)}
"""Each level's number of words the secret is one of, and number of guesses."""
_NAMED = 20
"""Up to that many words are named in the prompt."""

Clues = tuple[tuple[str, str], ...]
"""Guesses, each with its marks."""


class Wordle:
    """Find a word of five letters.

    An answer is a word and nothing else; any five letters will do. Each letter of a guess is answered with ``+`` (in its
    place), ``?`` (elsewhere in the word) or ``-`` (not in the word, or not that often). Reward: 1 for the word, -0.2 for an
    answer that is not five letters, 0 otherwise; every answer uses up a guess. When the guesses are used up the game is
    over: that is one of its rules, so the episode counts as terminated, not truncated. ``info["success"]`` says whether
    the word has been found; ``info["anchor"]`` holds the clues so far, in no order.

    Args:
        level: ``easy`` (one of 20 words that the prompt names, 4 guesses), ``normal`` (any word of the list, 6 guesses)
            or ``hard`` (any word of the list, 4 guesses).
        max_turns: Number of guesses, instead of the level's.

    Raises:
        ValueError: If the level is unknown or ``max_turns`` is not positive.
    """

    def __init__(self, level: str = "normal", max_turns: int | None = None):
        if level not in LEVELS:
            raise ValueError(f"Unknown level {level!r}; choose one of {', '.join(LEVELS)}.")
        count, guesses = LEVELS[level]
        self.words = words(count)
        self.max_turns = guesses if max_turns is None else max_turns
        if self.max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, got {max_turns}.")

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Start a game.

        Args:
            seed: Chooses the secret, ``words[seed % len(words)]``, so that as many seeds in a row as there are words hold
                every one once. None draws one.
            options: ``{"secret": str}`` sets the secret, whatever the seed: one of the level's words.

        Raises:
            ValueError: If there is another option, or the secret is not a word of the level.
        """
        drawn = random.SystemRandom().choice(self.words) if seed is None else self.words[seed % len(self.words)]
        self.secret = read_options(options, ("secret",), "agile:wordle").get("secret", drawn)
        if self.secret not in self.words:
            raise ValueError(f"secret must be one of the level's {len(self.words)} words, got {self.secret!r}.")
        self._clues: list[str] = []
        self._guesses = 0
        named = f" It is one of {', '.join(self.words)}." if len(self.words) <= _NAMED else ""
        prompt = (
            f"Find the word of five letters.{named} You have {self.max_turns} guesses. Each letter is answered with + (in "
            "its place), ? (elsewhere in the word) or - (not in the word). Answer with one word."
        )
        return prompt, {"secret": self.secret, "anchor": ""}

    def step(self, action: str) -> StepResult:
        """Take a guess."""
        guess = read_answer(action).lower()
        self._guesses += 1
        over = self._guesses == self.max_turns
        if guess == self.secret:
            return "correct", 1.0, True, False, {"success": True, "anchor": self.secret}
        if not re.fullmatch("[a-z]{5}", guess):
            return "invalid", -0.2, over, False, {"success": False, "anchor": self._anchor()}
        marks = score(guess, self.secret)
        self._clues.append(guess + marks)
        return " ".join(marks), 0.0, over, False, {"success": False, "anchor": self._anchor()}

    def _anchor(self) -> str:
        return " ".join(sorted(set(self._clues)))


@cache
def words(count: int) -> tuple[str, ...]:
    """That many words, spread over the alphabet."""
    return tuple(WORDS[index * len(WORDS) // count] for index in range(count))


@cache
def score(guess: str, secret: str) -> str:
    """The marks of a guess. A letter that it holds more often than the secret is marked so often, first in its place."""
    left = Counter(b for a, b in zip(guess, secret) if a != b)
    marks = []
    for a, b in zip(guess, secret):
        if a == b:
            marks.append("+")
        else:
            marks.append("?" if left[a] > 0 else "-")
            left[a] -= 1
    return "".join(marks)


@lru_cache(maxsize=10_000)
def possible(count: int, clues: Clues) -> tuple[str, ...]:
    """The words that agree with every clue."""
    if not clues:
        return words(count)
    *earlier, (guess, marks) = clues
    return tuple(word for word in possible(count, tuple(earlier)) if score(guess, word) == marks)


@lru_cache(maxsize=10_000)
def best_guess(count: int, clues: Clues) -> str:
    """The possible word that leaves the fewest possible words on average."""
    left = possible(count, clues)
    return min(left, key=lambda guess: sum(n * n for n in Counter(score(guess, word) for word in left).values()))


def random_player(messages: list[Message], rng: random.Random) -> str:
    """Any word of the level, clues ignored."""
    return rng.choice(words(_read(messages)[0]))


def random_legal_player(messages: list[Message], rng: random.Random) -> str:
    """Any word that the clues still allow."""
    return rng.choice(possible(*_read(messages)))


def careless_player(messages: list[Message], rng: random.Random) -> str:
    """What the clues still allow half of the time, any word of the level otherwise."""
    return (random_legal_player if rng.random() < 0.5 else random_player)(messages, rng)


def expert_player(messages: list[Message], rng: random.Random) -> str:
    """The word that the clues allow and that narrows it down furthest on average."""
    return best_guess(*_read(messages))


def demonstrations(
    count: int, seed: int = 0, player: Player = careless_player, environment: Wordle | None = None
) -> list[dict[str, list[Message]]]:
    """Games as training data for TRL's ``SFTTrainer``.

    Args:
        count: Number of games; a multiple of the number of words shows each equally often.
        seed: Their seeds are ``seed`` to ``seed + count - 1``.
        player: Who plays. The default teaches the words and what the marks mean, and leaves ignoring them to be unlearned.
        environment: What to play. Default: the normal level.

    Returns:
        ``count`` rows ``{"messages": [...]}``, each ending with the player's last guess.
    """
    return demonstrate(environment or Wordle(), player, range(seed, seed + count))


def preferences(count: int, seed: int = 0, environment: Wordle | None = None) -> list[dict[str, list[Message]]]:
    """Pairs for TRL's ``DPOTrainer``: the expert's guess, against the first other one of a lost game.

    Args:
        count: Number of pairs.
        seed: Seed of the first game; games that random guesses won, or the expert lost, are passed over.
        environment: What to play. Default: the normal level.

    Returns:
        ``count`` rows ``{"prompt", "chosen", "rejected"}`` of messages.
    """
    return compare_until(count, environment or Wordle(), expert_player, random_player, seed)


def _read(messages: list[Message]) -> tuple[int, Clues]:
    """How many words the secret is one of, and the clues so far."""
    prompt = messages[0]["content"]
    if "word of five letters" not in prompt:
        raise ValueError(f"Expected a prompt that asks for a word of five letters, got {prompt!r}.")
    clues = []
    for answer, hint in zip(messages[1::2], messages[2::2]):
        marks = hint["content"].replace(" ", "")
        if re.fullmatch("[-+?]{5}", marks):
            clues.append((answer["content"].strip().lower(), marks))
    return LEVELS["easy" if "It is one of" in prompt else "normal"][0], tuple(clues)
