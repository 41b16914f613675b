"""Mastermind: find a code from the number of right digits of each guess. See README.md for results of good play."""

from __future__ import annotations

import random
import re
from collections import Counter
from functools import cache, lru_cache
from itertools import product
from typing import Any

from agile_trainers.envs.base import ResetResult
from agile_trainers.envs.task import INVALID, WON, GameTask, demonstrations_of, draw, preferences_of
from agile_trainers.types import Message

LEVELS = {"easy": (2, 4, 4), "normal": (3, 6, 7), "hard": (4, 6, 6)}
"""Level to length of the code, highest digit, and number of guesses."""

Clues = tuple[tuple[str, tuple[int, int]], ...]
"""Guesses, each with the numbers of its digits in the right and in the wrong place."""


class Mastermind(GameTask):
    """A game of finding a code of digits.

    An answer is a code alone, with or without blanks: ``1 2 3``. Reward: 1 for the right code, -0.2 for an answer that is
    not a code, 0 otherwise. ``info["anchor"]`` holds the sorted clues so far.

    Args:
        level: ``easy`` (2 digits of 1 to 4, 4 guesses), ``normal`` (3 of 1 to 6, 7 guesses) or ``hard`` (4 of 1 to 6, 6
            guesses).
        max_turns: Number of guesses. Default: the level's.

    Raises:
        ValueError: If the level is unknown or ``max_turns`` is not positive.
    """

    name, levels, options = "agile:mastermind", LEVELS, ("secret",)

    def __init__(self, level: str = "normal", max_turns: int | None = None):
        super().__init__(level, max_turns)
        self.length, self.highest, _ = LEVELS[level]

    def start(self, seed: int | None, options: dict[str, Any]) -> ResetResult:
        """Choose the code.

        Args:
            seed: Determines the code. As many consecutive seeds as there are codes give every code once. None draws one.
            options: ``{"secret": str}`` sets the code instead of the seed.

        Raises:
            ValueError: If the secret is not a code of the level.
        """
        every = codes(self.length, self.highest)
        # Codes of neighbouring seeds differ in more than the last digit.
        self.secret = options.get("secret", every[draw(seed, len(every)) * 89 % len(every)])
        if self.secret not in every:
            raise ValueError(f"secret must be {self.length} digits of 1 to {self.highest}, got {self.secret!r}.")
        self._clues: list[str] = []
        prompt = (
            f"Find the code: {self.length} digits of 1 to {self.highest}, which may repeat. You have {self.max_turns} "
            f"guesses. Answer with {self.length} digits."
        )
        return prompt, {"secret": self.secret, "anchor": ""}

    def answer(self, text: str) -> tuple[str, float, dict[str, Any]]:
        """Take a guess."""
        guess = "".join(text.split())
        if guess == self.secret:
            return "correct", WON, {"success": True, "anchor": self.secret}
        if guess not in codes(self.length, self.highest):
            return "invalid", INVALID, {"success": False, "anchor": self._anchor()}
        right, misplaced = score(guess, self.secret)
        self._clues.append(f"{guess}:{right},{misplaced}")
        hint = f"{right} in the right place, {misplaced} in the wrong place"
        return hint, 0.0, {"success": False, "anchor": self._anchor()}

    def _anchor(self) -> str:
        return " ".join(sorted(set(self._clues)))


@cache
def codes(length: int, highest: int) -> tuple[str, ...]:
    """Return all codes, in ascending order."""
    digits = map(str, range(1, highest + 1))
    return tuple("".join(code) for code in product(digits, repeat=length))


def score(guess: str, secret: str) -> tuple[int, int]:
    """Count the digits of a guess in the right place, and its other digits that occur elsewhere in the secret."""
    right = sum(a == b for a, b in zip(guess, secret))
    return right, sum(min(guess.count(digit), secret.count(digit)) for digit in set(guess)) - right


@lru_cache(maxsize=10_000)
def possible(length: int, highest: int, clues: Clues) -> tuple[str, ...]:
    """Return the codes that agree with every clue, in ascending order."""
    if not clues:
        return codes(length, highest)
    *earlier, (guess, marks) = clues
    return tuple(code for code in possible(length, highest, tuple(earlier)) if score(guess, code) == marks)


@lru_cache(maxsize=10_000)
def best_guess(length: int, highest: int, clues: Clues) -> str:
    """Return the possible code that leaves the fewest possible codes in the worst case; the first guess is fixed."""
    if not clues:
        return "".join(str(1 + index * 2 // length) for index in range(length))  # 12, 112, 1122
    left = possible(length, highest, clues)
    return min(left, key=lambda guess: max(Counter(score(guess, code) for code in left).values()))


def random_policy(messages: list[Message], rng: random.Random) -> str:
    """Guess a random code."""
    length, highest, _ = _read(messages)
    return " ".join(rng.choice(codes(length, highest)))


def random_legal_policy(messages: list[Message], rng: random.Random) -> str:
    """Guess a random code that the clues allow."""
    return " ".join(rng.choice(possible(*_read(messages))))


def careless_policy(messages: list[Message], rng: random.Random) -> str:
    """Guess a random code that the clues allow in half of the turns, and any code otherwise."""
    return (random_legal_policy if rng.random() < 0.5 else random_policy)(messages, rng)


def expert_policy(messages: list[Message], rng: random.Random) -> str:
    """Guess the allowed code that leaves the fewest possible codes in the worst case."""
    return " ".join(best_guess(*_read(messages)))


demonstrations = demonstrations_of(Mastermind, careless_policy)
"""Careless play teaches the format and the meaning of the clues; reinforcement learning can then use them always."""
preferences = preferences_of(Mastermind, expert_policy, random_policy)


def _read(messages: list[Message]) -> tuple[int, int, Clues]:
    """Read the length of the code, the highest digit, and the clues so far."""
    found = re.search(r"(\d) digits of 1 to (\d)", messages[0]["content"])
    if found is None:
        raise ValueError(f"Expected a prompt that says '... digits of 1 to ...', got {messages[0]['content']!r}.")
    clues = []
    for answer, hint in zip(messages[1::2], messages[2::2]):
        marks = re.fullmatch(r"(\d) in the right place, (\d) in the wrong place", hint["content"])
        if marks:
            clues.append(("".join(answer["content"].split()), (int(marks[1]), int(marks[2]))))
    return int(found[1]), int(found[2]), tuple(clues)
