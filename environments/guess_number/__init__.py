"""Guess a number: the model guesses, the environment says higher or lower. See README.md for results of good play."""

from __future__ import annotations

import random
import re
from typing import Any

from agile_trainers.envs.base import ResetResult
from agile_trainers.envs.task import INVALID, WON, GameTask, demonstrations_of, draw, preferences_of
from agile_trainers.types import Message

LEVELS = {"easy": (6, 3), "normal": (12, 4), "hard": (24, 5)}
"""Level to highest number and number of guesses. Halving always wins, with guesses to spare."""


class GuessNumber(GameTask):
    """A game of guessing a number between 1 and ``high``.

    An answer is a number alone, such as ``7``. Reward: 1 for the right number, -0.2 for an answer that is
    not a number between 1 and ``high``, 0 otherwise.

    Args:
        level: ``easy`` (1 to 6, 3 guesses), ``normal`` (1 to 12, 4 guesses) or ``hard`` (1 to 24, 5 guesses).
        high: Highest number. Default: the level's.
        max_turns: Number of guesses. Default: the level's.

    Raises:
        ValueError: If the level is unknown or a number is not positive.
    """

    name, levels, options = "agile:guess_number", LEVELS, ("secret", "high")

    def __init__(self, level: str = "normal", high: int | None = None, max_turns: int | None = None):
        super().__init__(level, max_turns)
        self.high = self._high = LEVELS[level][0] if high is None else high
        if self.high < 1:
            raise ValueError(f"high must be at least 1, got {high}.")

    def start(self, seed: int | None, options: dict[str, Any]) -> ResetResult:
        """Choose the secret.

        Args:
            seed: The secret is ``seed % high + 1``, so that ``high`` consecutive seeds give every secret once. None draws
                one.
            options: ``{"secret": int}`` sets the secret instead of the seed, and ``{"high": int}`` the highest number of
                this game, so that games of a data set differ in difficulty.

        Raises:
            ValueError: If the secret is out of range, or the highest number is not positive.
        """
        self.high = options.get("high", self._high)
        if not isinstance(self.high, int) or self.high < 1:
            raise ValueError(f"high must be an integer of at least 1, got {self.high!r}.")
        self.secret = options.get("secret", draw(seed, self.high) + 1)
        if self.secret not in range(1, self.high + 1):
            raise ValueError(f"secret must be an integer from 1 to {self.high}, got {self.secret!r}.")
        guesses = f"{self.max_turns} guesses" if self.max_turns > 1 else "1 guess"
        prompt = f"Guess the number between 1 and {self.high}. You have {guesses}. Answer with one number."
        return prompt, {"secret": self.secret}

    def answer(self, text: str) -> tuple[str, float, dict[str, Any]]:
        """Take a guess."""
        guess = _number(text)
        if guess == self.secret:
            return "correct", WON, {"success": True}
        if not 1 <= guess <= self.high:
            return "invalid", INVALID, {"success": False}
        return "higher" if self.secret > guess else "lower", 0.0, {"success": False}


def random_policy(messages: list[Message], rng: random.Random) -> str:
    """Guess a random number of the whole range."""
    return str(rng.randint(*_range(messages[:1])))


def random_legal_policy(messages: list[Message], rng: random.Random) -> str:
    """Guess a random number that the hints allow."""
    return str(rng.randint(*_range(messages)))


def halving_policy(messages: list[Message], rng: random.Random) -> str:
    """Guess the middle of the range that the hints allow, which is optimal."""
    return str(sum(_range(messages)) // 2)


expert_policy = halving_policy
"""The best policy, under the name that all tasks share."""


demonstrations = demonstrations_of(GuessNumber, random_legal_policy)
"""Random legal play teaches the format and the meaning of the hints; reinforcement learning can still improve on it.
:func:`random_policy` teaches too little to start from, and :func:`halving_policy` leaves nothing to improve."""
preferences = preferences_of(GuessNumber, halving_policy, random_policy)


def _number(action: str) -> int:
    """Read the number of an answer, 0 if it is not a number."""
    answer = action.strip()
    return int(answer) if re.fullmatch(r"[0-9]{1,9}", answer) else 0


def _range(messages: list[Message]) -> tuple[int, int]:
    """Return the smallest and the largest number that the prompt and the hints so far allow."""
    found = re.search(r"between (\d+) and (\d+)", messages[0]["content"])
    if found is None:
        raise ValueError(f"Expected a prompt that says 'between ... and ...', got {messages[0]['content']!r}.")
    low, high = int(found[1]), int(found[2])
    for answer, hint in zip(messages[1::2], messages[2::2]):
        guess = int(re.findall(r"\d+", answer["content"])[-1])
        if "higher" in hint["content"]:
            low = max(low, guess + 1)
        elif "lower" in hint["content"]:
            high = min(high, guess - 1)
    return low, high
