"""Mastermind: find a code from how many digits of each guess were right. See README.md for what good play reaches."""

from __future__ import annotations

import random
import re
from collections import Counter
from functools import cache, lru_cache
from itertools import product
from typing import Any

from agile_trainers.envs.answers import read_answer
from agile_trainers.envs.base import ResetResult, StepResult, read_options
from agile_trainers.envs.play import Player, compare_until, demonstrate
from agile_trainers.types import Message

LEVELS = {"easy": (2, 4, 4), "normal": (3, 6, 7), "hard": (4, 6, 6)}
"""Each level's length of the code, highest digit, and number of guesses."""

Clues = tuple[tuple[str, tuple[int, int]], ...]
"""Guesses, each with its digits in the right and in the wrong place."""


class Mastermind:
    """Find a code of digits.

    An answer is the code and nothing else, with or without blanks: ``1 2 3``. Reward: 1 for the code, -0.2 for an answer
    that is no code, 0 otherwise; every answer uses up a guess. When the guesses are used up the game is over: that is one
    of its rules, so the episode counts as terminated, not truncated. ``info["success"]`` says whether the code has been
    found; ``info["anchor"]`` holds the clues so far, in no order.

    Args:
        level: ``easy`` (2 digits of 1 to 4, 4 guesses), ``normal`` (3 of 1 to 6, 7 guesses) or ``hard`` (4 of 1 to 6, 6
            guesses).
        max_turns: Number of guesses, instead of the level's.

    Raises:
        ValueError: If the level is unknown or ``max_turns`` is not positive.
    """

    def __init__(self, level: str = "normal", max_turns: int | None = None):
        if level not in LEVELS:
            raise ValueError(f"Unknown level {level!r}; choose one of {', '.join(LEVELS)}.")
        self.length, self.highest, guesses = LEVELS[level]
        self.max_turns = guesses if max_turns is None else max_turns
        if self.max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, got {max_turns}.")

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Start a game.

        Args:
            seed: Chooses the code; as many seeds in a row as there are codes hold every one once. None draws one.
            options: ``{"secret": str}`` sets the code, whatever the seed.

        Raises:
            ValueError: If there is another option, or the secret is no code of the level.
        """
        every = codes(self.length, self.highest)
        # Neighbouring seeds get codes that differ in more than the last digit.
        drawn = random.SystemRandom().choice(every) if seed is None else every[seed * 89 % len(every)]
        self.secret = read_options(options, ("secret",), "agile:mastermind").get("secret", drawn)
        if self.secret not in every:
            raise ValueError(f"secret must be {self.length} digits of 1 to {self.highest}, got {self.secret!r}.")
        self._clues: list[str] = []
        self._guesses = 0
        prompt = (
            f"Find the code: {self.length} digits of 1 to {self.highest}, which may repeat. You have {self.max_turns} "
            f"guesses. Answer with {self.length} digits."
        )
        return prompt, {"secret": self.secret, "anchor": ""}

    def step(self, action: str) -> StepResult:
        """Take a guess."""
        guess = "".join(read_answer(action).split())
        self._guesses += 1
        over = self._guesses == self.max_turns
        if guess == self.secret:
            return "correct", 1.0, True, False, {"success": True, "anchor": self.secret}
        if guess not in codes(self.length, self.highest):
            return "invalid", -0.2, over, False, {"success": False, "anchor": self._anchor()}
        right, misplaced = score(guess, self.secret)
        self._clues.append(f"{guess}:{right},{misplaced}")
        hint = f"{right} in the right place, {misplaced} in the wrong place"
        return hint, 0.0, over, False, {"success": False, "anchor": self._anchor()}

    def _anchor(self) -> str:
        return " ".join(sorted(set(self._clues)))


@cache
def codes(length: int, highest: int) -> tuple[str, ...]:
    """Every code, in ascending order."""
    digits = map(str, range(1, highest + 1))
    return tuple("".join(code) for code in product(digits, repeat=length))


def score(guess: str, secret: str) -> tuple[int, int]:
    """How many digits of a guess are in the right place, and how many others of them the secret has elsewhere."""
    right = sum(a == b for a, b in zip(guess, secret))
    return right, sum(min(guess.count(digit), secret.count(digit)) for digit in set(guess)) - right


@lru_cache(maxsize=10_000)
def possible(length: int, highest: int, clues: Clues) -> tuple[str, ...]:
    """The codes that agree with every clue, in ascending order."""
    if not clues:
        return codes(length, highest)
    *earlier, (guess, marks) = clues
    return tuple(code for code in possible(length, highest, tuple(earlier)) if score(guess, code) == marks)


@lru_cache(maxsize=10_000)
def best_guess(length: int, highest: int, clues: Clues) -> str:
    """The possible code whose answer leaves the fewest possible ones in the worst case; the first is fixed."""
    if not clues:
        return "".join(str(1 + index * 2 // length) for index in range(length))  # 12, 112, 1122
    left = possible(length, highest, clues)
    return min(left, key=lambda guess: max(Counter(score(guess, code) for code in left).values()))


def random_player(messages: list[Message], rng: random.Random) -> str:
    """Any code, clues ignored."""
    length, highest, _ = _read(messages)
    return " ".join(rng.choice(codes(length, highest)))


def random_legal_player(messages: list[Message], rng: random.Random) -> str:
    """Any code that the clues still allow."""
    return " ".join(rng.choice(possible(*_read(messages))))


def careless_player(messages: list[Message], rng: random.Random) -> str:
    """What the clues still allow half of the time, any code otherwise."""
    return (random_legal_player if rng.random() < 0.5 else random_player)(messages, rng)


def expert_player(messages: list[Message], rng: random.Random) -> str:
    """The code that the clues allow and that narrows it down furthest in the worst case."""
    return " ".join(best_guess(*_read(messages)))


def demonstrations(
    count: int, seed: int = 0, player: Player = careless_player, environment: Mastermind | None = None
) -> list[dict[str, list[Message]]]:
    """Games as training data for TRL's ``SFTTrainer``.

    Args:
        count: Number of games; a multiple of the number of codes shows each equally often.
        seed: Their seeds are ``seed`` to ``seed + count - 1``.
        player: Who plays. The default teaches the format and what the clues mean, and leaves ignoring them to be unlearned.
        environment: What to play. Default: the normal level.

    Returns:
        ``count`` rows ``{"messages": [...]}``, each ending with the player's last guess.
    """
    return demonstrate(environment or Mastermind(), player, range(seed, seed + count))


def preferences(count: int, seed: int = 0, environment: Mastermind | None = None) -> list[dict[str, list[Message]]]:
    """Pairs for TRL's ``DPOTrainer``: the expert's guess, against the first other one of a lost game.

    Args:
        count: Number of pairs.
        seed: Seed of the first game; games that random guesses won are passed over.
        environment: What to play. Default: the normal level.

    Returns:
        ``count`` rows ``{"prompt", "chosen", "rejected"}`` of messages.
    """
    return compare_until(count, environment or Mastermind(), expert_player, random_player, seed)


def _read(messages: list[Message]) -> tuple[int, int, Clues]:
    """Length of the code, highest digit, and the clues so far."""
    found = re.search(r"(\d) digits of 1 to (\d)", messages[0]["content"])
    if found is None:
        raise ValueError(f"Expected a prompt that says '... digits of 1 to ...', got {messages[0]['content']!r}.")
    clues = []
    for answer, hint in zip(messages[1::2], messages[2::2]):
        marks = re.fullmatch(r"(\d) in the right place, (\d) in the wrong place", hint["content"])
        if marks:
            clues.append(("".join(answer["content"].split()), (int(marks[1]), int(marks[2]))))
    return int(found[1]), int(found[2]), tuple(clues)
