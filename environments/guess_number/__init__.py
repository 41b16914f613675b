"""Guess a number: the model guesses, the environment says higher or lower. See README.md for what good play reaches."""

from __future__ import annotations

import random
import re
from typing import Any

from agile_trainers.envs.answers import read_answer
from agile_trainers.envs.base import ResetResult, StepResult, read_options
from agile_trainers.envs.play import Player, compare_until, demonstrate
from agile_trainers.types import Message

LEVELS = {"easy": (6, 3), "normal": (12, 4), "hard": (24, 5)}
"""Each level's highest number and number of guesses. Halving always wins, with some slack."""


class GuessNumber:
    """Guess a number between 1 and ``high``.

    An answer is a number and nothing else, such as ``7``. Reward: 1 for the right number, -0.2 for an answer that is
    not a number between 1 and ``high``, 0 otherwise; every answer uses up a guess. When the guesses are used up the
    game is over: that is one of its rules, so the episode counts as terminated, not truncated. ``info["success"]`` says
    whether the number has been found.

    Args:
        level: ``easy`` (1 to 6, 3 guesses), ``normal`` (1 to 12, 4 guesses) or ``hard`` (1 to 24, 5 guesses).
        high: Highest number, instead of the level's.
        max_turns: Number of guesses, instead of the level's.

    Raises:
        ValueError: If the level is unknown or a number is not positive.
    """

    def __init__(self, level: str = "normal", high: int | None = None, max_turns: int | None = None):
        if level not in LEVELS:
            raise ValueError(f"Unknown level {level!r}; choose one of {', '.join(LEVELS)}.")
        self.high = LEVELS[level][0] if high is None else high
        self.max_turns = LEVELS[level][1] if max_turns is None else max_turns
        if self.high < 1 or self.max_turns < 1:
            raise ValueError(f"high and max_turns must be at least 1, got high={high} and max_turns={max_turns}.")

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Start a game.

        Args:
            seed: Chooses the secret, ``seed % high + 1``, so that ``high`` seeds in a row hold every secret once. None
                draws one.
            options: ``{"secret": int}`` sets the secret, whatever the seed.

        Raises:
            ValueError: If there is another option, or the secret is out of range.
        """
        drawn = random.SystemRandom().randrange(self.high) if seed is None else seed % self.high
        self.secret = read_options(options, ("secret",), "agile:guess_number").get("secret", drawn + 1)
        if self.secret not in range(1, self.high + 1):
            raise ValueError(f"secret must be an integer from 1 to {self.high}, got {self.secret!r}.")
        self.guesses = 0
        guesses = f"{self.max_turns} guesses" if self.max_turns > 1 else "1 guess"
        prompt = f"Guess the number between 1 and {self.high}. You have {guesses}. Answer with one number."
        return prompt, {"secret": self.secret}

    def step(self, action: str) -> StepResult:
        """Take a guess."""
        guess = _number(read_answer(action))
        self.guesses += 1
        if guess == self.secret:
            return "correct", 1.0, True, False, {"success": True}
        if not 1 <= guess <= self.high:
            hint, reward = "invalid", -0.2
        else:
            hint, reward = "higher" if self.secret > guess else "lower", 0.0
        return hint, reward, self.guesses == self.max_turns, False, {"success": False}


def random_player(messages: list[Message], rng: random.Random) -> str:
    """Any number of the whole range, hints ignored."""
    return str(rng.randint(*_range(messages[:1])))


def random_legal_player(messages: list[Message], rng: random.Random) -> str:
    """Any number that the hints still allow."""
    return str(rng.randint(*_range(messages)))


def halving_player(messages: list[Message], rng: random.Random) -> str:
    """The middle of what the hints still allow: optimal play."""
    return str(sum(_range(messages)) // 2)


expert_player = halving_player
"""The best player, by the name that it has in every task."""


def demonstrations(
    count: int, seed: int = 0, player: Player = random_legal_player, environment: GuessNumber | None = None
) -> list[dict[str, list[Message]]]:
    """Games as training data for TRL's ``SFTTrainer``.

    The default player teaches the format and the meaning of the hints and leaves reinforcement learning something to
    find. :func:`random_player` teaches too little for it to start from, :func:`halving_player` nothing is left after.

    Args:
        count: Number of games; a multiple of the number of secrets shows each equally often.
        seed: The games' seeds are ``seed`` to ``seed + count - 1``.
        player: Who plays.
        environment: What to play. Default: the normal level.

    Returns:
        ``count`` rows ``{"messages": [...]}``, each ending with the player's last guess.
    """
    return demonstrate(environment or GuessNumber(), player, range(seed, seed + count))


def preferences(count: int, seed: int = 0, environment: GuessNumber | None = None) -> list[dict[str, list[Message]]]:
    """Pairs for TRL's ``DPOTrainer``: the best guess, against the first other one of a lost game.

    Args:
        count: Number of pairs.
        seed: Seed of the first game; games that random guesses won are passed over.
        environment: What to play. Default: the normal level.

    Returns:
        ``count`` rows ``{"prompt", "chosen", "rejected"}`` of messages.
    """
    return compare_until(count, environment or GuessNumber(), halving_player, random_player, seed)


def _number(action: str) -> int:
    """The number an answer consists of, 0 if it is none."""
    answer = action.strip()
    return int(answer) if re.fullmatch(r"[0-9]{1,9}", answer) else 0


def _range(messages: list[Message]) -> tuple[int, int]:
    """The smallest and the largest number that the prompt and the hints so far allow."""
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
