"""A sound game, and games with one fault each, for the tests of ``agile-trainers check``.

Processes that play them import this file, which imports nothing that takes long.
"""

from __future__ import annotations

import random
import re
from typing import Any, ClassVar

from agile_trainers.types import Message

WORDS = ("red", "blue", "green", "black")


class Colours:
    """A sound game: three guesses at a colour that the seed decides; 1 for the right one, and each guess is answered."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.secret, self.turn = WORDS[(seed or 0) * 7919 % 4], 0
        return "Guess a colour: red, blue, green or black.", {}

    def step(self, action: str) -> Any:
        self.turn += 1
        right = action.strip() == self.secret
        near = "close" if action.strip()[:1] == self.secret[:1] else "far"
        return "right" if right else near, float(right), right or self.turn == 3, False, {"success": right}


def random_policy(messages: list[Message], rng: random.Random) -> str:
    return rng.choice(WORDS)


class NeverEnds(Colours):
    def step(self, action: str) -> Any:
        observation, reward, _, _, info = super().step(action)
        return observation, reward, False, False, info


class IgnoresAnswers(Colours):
    """Decides by its seed how an episode goes."""

    def step(self, action: str) -> Any:
        return super().step("red")


class EchoesAnswers(IgnoresAnswers):
    """The same, with an observation that depends on the answer."""

    def step(self, action: str) -> Any:
        return f"You said {action}.", *super().step(action)[1:]


class SameTask(Colours):
    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(2, options)


class WinIsTruncated(Colours):
    def step(self, action: str) -> Any:
        observation, reward, ended, _, info = super().step(action)
        return observation, reward, ended and not reward, ended and bool(reward), info


class HoldsOut(Colours):
    """Sound: who has not said the secret for three turns has succeeded, which a limit ends."""

    def step(self, action: str) -> Any:
        self.turn += 1
        lost = action.strip() == self.secret
        return "go on", float(not lost), lost, not lost and self.turn == 3, {"success": not lost and self.turn == 3}


class PaysAtTheLimit(Colours):
    """Sound: it goes on until a limit ends it, and then pays for the secret if it was said."""

    def step(self, action: str) -> Any:
        self.said = action.strip() == self.secret or (self.turn > 0 and self.said)
        self.turn += 1
        return "right" if self.said else "go on", 0.0, False, False, {"success": self.said}

    def end(self, reason: str) -> float:
        return float(self.said)


class SaysNothing(Colours):
    def step(self, action: str) -> Any:
        return " ", *super().step(action)[1:]


class WrongRange(Colours):
    return_range = (-1.0, 0.5)


class NoRange(Colours):
    return_range = "0 to 1"


class SharedList(Colours):
    """Gives a guess that was made before, in any episode, no credit."""

    made: ClassVar[list[str]] = []

    def step(self, action: str) -> Any:
        self.made.append(action)
        _, reward, *rest = super().step(action)
        return f"{len(self.made)} guesses", reward / len(self.made), *rest


class SharedStart(Colours):
    """Counts its episodes in the class, and says the number."""

    started = 0

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        type(self).started += 1
        return f"Game {self.started}: guess a colour.", super().reset(seed)[1]


class UnseededSecret(Colours):
    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        start = super().reset(seed)
        self.secret = random.SystemRandom().choice(WORDS)
        return start


class GlobalSecret(Colours):
    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        start = super().reset(seed)
        self.secret = random.choice(WORDS)
        return start


class DrawsItsStart(Colours):
    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return f"Game {random.SystemRandom().random()}: guess a colour.", super().reset(seed)[1]


class MoodyAboutColours(Colours):
    """Pays at random for a colour, whether right or not, and nothing for the answer of the protocol's own check."""

    def step(self, action: str) -> Any:
        observation, _, *rest = super().step(action)
        return observation, random.SystemRandom().random() if action.strip() in WORDS else 0.0, *rest


class UntoldForm(Colours):
    """Understands only an answer in brackets, and does not say so."""

    def step(self, action: str) -> Any:
        return super().step(action if re.fullmatch(r"\[\w+\]", action.strip()) else "")
