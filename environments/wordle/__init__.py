"""Wordle: find a word from the right letters of each guess. See README.md for results of good play."""

from __future__ import annotations

import random
import re
from collections import Counter
from functools import cache, lru_cache
from typing import Any

from agile_environments.wordle.words import WORDS
from agile_trainers.envs.base import ResetResult
from agile_trainers.envs.task import INVALID, WON, GameTask, demonstrations_of, draw, preferences_of
from agile_trainers.types import Message

LEVELS = {"easy": (20, 4), "normal": (len(WORDS), 6), "hard": (len(WORDS), 4)}
"""Level to number of candidate words and number of guesses."""
_NAMED = 20
"""Maximum number of words that the prompt lists."""

Clues = tuple[tuple[str, str], ...]
"""Guesses, each with its marks."""


class Wordle(GameTask):
    """A game of finding a word of five letters.

    An answer is any five letters alone. Each letter of a guess is marked ``+`` (in its place), ``?`` (elsewhere in the
    word) or ``-`` (not in the word, or not that often). Reward: 1 for the word, -0.2 for an answer that is not five letters,
    0 otherwise. ``info["anchor"]`` holds the sorted clues so far.

    Args:
        level: ``easy`` (one of 20 words that the prompt names, 4 guesses), ``normal`` (any word of the list, 6 guesses)
            or ``hard`` (any word of the list, 4 guesses).
        max_turns: Number of guesses. Default: the level's.

    Raises:
        ValueError: If the level is unknown or ``max_turns`` is not positive.
    """

    name, levels, options = "agile:wordle", LEVELS, ("secret",)

    def __init__(self, level: str = "normal", max_turns: int | None = None):
        super().__init__(level, max_turns)
        self.words = words(LEVELS[level][0])

    def start(self, seed: int | None, options: dict[str, Any]) -> ResetResult:
        """Choose the word.

        Args:
            seed: The word is ``words[seed % len(words)]``, so that as many consecutive seeds as there are words give every
                word once. None draws one.
            options: ``{"secret": str}`` sets the secret instead of the seed: one of the level's words.

        Raises:
            ValueError: If the secret is not a word of the level.
        """
        self.secret = options.get("secret", self.words[draw(seed, len(self.words))])
        if self.secret not in self.words:
            raise ValueError(f"secret must be one of the level's {len(self.words)} words, got {self.secret!r}.")
        self._clues: list[str] = []
        named = f" It is one of {', '.join(self.words)}." if len(self.words) <= _NAMED else ""
        prompt = (
            f"Find the word of five letters.{named} You have {self.max_turns} guesses. Each letter is answered with + (in "
            "its place), ? (elsewhere in the word) or - (not in the word). Answer with one word."
        )
        return prompt, {"secret": self.secret, "anchor": ""}

    def answer(self, text: str) -> tuple[str, float, dict[str, Any]]:
        """Take a guess."""
        guess = text.lower()
        if guess == self.secret:
            return "correct", WON, {"success": True, "anchor": self.secret}
        if not re.fullmatch("[a-z]{5}", guess):
            return "invalid", INVALID, {"success": False, "anchor": self._anchor()}
        marks = score(guess, self.secret)
        self._clues.append(guess + marks)
        return " ".join(marks), 0.0, {"success": False, "anchor": self._anchor()}

    def _anchor(self) -> str:
        return " ".join(sorted(set(self._clues)))


@cache
def words(count: int) -> tuple[str, ...]:
    """Return ``count`` words, spread over the alphabet."""
    return tuple(WORDS[index * len(WORDS) // count] for index in range(count))


@cache
def score(guess: str, secret: str) -> str:
    """Mark a guess. A repeated letter is marked at most as often as it occurs in the secret, first in its place."""
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
    """Return the words that agree with every clue."""
    if not clues:
        return words(count)
    *earlier, (guess, marks) = clues
    return tuple(word for word in possible(count, tuple(earlier)) if score(guess, word) == marks)


@lru_cache(maxsize=10_000)
def best_guess(count: int, clues: Clues) -> str:
    """Return the possible word that leaves the fewest possible words on average."""
    left = possible(count, clues)
    return min(left, key=lambda guess: sum(n * n for n in Counter(score(guess, word) for word in left).values()))


def random_policy(messages: list[Message], rng: random.Random) -> str:
    """Guess a random word of the level."""
    return rng.choice(words(_read(messages)[0]))


def random_legal_policy(messages: list[Message], rng: random.Random) -> str:
    """Guess a random word that the clues allow."""
    return rng.choice(possible(*_read(messages)))


def careless_policy(messages: list[Message], rng: random.Random) -> str:
    """Guess a random word that the clues allow in half of the turns, and any word of the level otherwise."""
    return (random_legal_policy if rng.random() < 0.5 else random_policy)(messages, rng)


def expert_policy(messages: list[Message], rng: random.Random) -> str:
    """Guess the allowed word that leaves the fewest possible words on average."""
    return best_guess(*_read(messages))


demonstrations = demonstrations_of(Wordle, careless_policy)
"""Careless play teaches the words and the meaning of the marks; reinforcement learning can then use them always."""
preferences = preferences_of(Wordle, expert_policy, random_policy)


def _read(messages: list[Message]) -> tuple[int, Clues]:
    """Read the number of candidate words, and the clues so far."""
    prompt = messages[0]["content"]
    if "word of five letters" not in prompt:
        raise ValueError(f"Expected a prompt that asks for a word of five letters, got {prompt!r}.")
    clues = []
    for answer, hint in zip(messages[1::2], messages[2::2]):
        marks = hint["content"].replace(" ", "")
        if re.fullmatch("[-+?]{5}", marks):
            clues.append((answer["content"].strip().lower(), marks))
    return LEVELS["easy" if "It is one of" in prompt else "normal"][0], tuple(clues)
