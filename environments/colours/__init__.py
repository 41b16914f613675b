"""Spell a code word of colours that images show, with a digit between two of them. See README.md for results."""

from __future__ import annotations

import random
from typing import Any

from agile_trainers.envs.base import ResetResult
from agile_trainers.envs.images import opened
from agile_trainers.envs.task import INVALID, WON, GameTask, draw
from agile_trainers.types import Message, images_of, text_of

COLOURS = {
    "red": (220, 30, 30), "green": (30, 170, 60), "blue": (40, 70, 220), "yellow": (240, 220, 40),
    "black": (10, 10, 10), "white": (245, 245, 245), "pink": (250, 150, 200), "brown": (120, 70, 30),
}  # fmt: skip
LEVELS = {"easy": (2, 3), "normal": (4, 3), "hard": (8, 5)}
"""Level to number of colours, and of digits, and number of turns: images and digits alternate, an image first and last."""
DIGITS = "0123456789"
_SIDE = 16
"""Pixels."""


class Colours(GameTask):
    """A code word of colours, each of which an image shows, and of digits between them, which the text says.

    An answer is the colour's name or the digit, such as ``red``. Each right answer is rewarded with ``1 / turns``, one that
    is neither a colour nor a digit with -0.2, any other with 0. The game is won if all answers are right.

    Args:
        level: ``easy`` (2 colours and digits, 3 turns), ``normal`` (4, 3) or ``hard`` (8, 5).
        max_turns: Number of turns, an odd number. Default: the level's.

    Raises:
        ValueError: If the level is unknown, or the number of turns is not odd.
    """

    name, levels, options = "agile:colours", LEVELS, ("code",)

    def __init__(self, level: str = "normal", max_turns: int | None = None):
        super().__init__(level, max_turns)
        if self.max_turns % 2 == 0:
            raise ValueError(
                f"max_turns must be odd, since the code word begins and ends with a colour; got {max_turns}."
            )
        self.colours, self.digits = list(COLOURS)[: LEVELS[level][0]], DIGITS[: LEVELS[level][0]]

    def start(self, seed: int | None, options: dict[str, Any]) -> ResetResult:
        """Choose the code word.

        Args:
            seed: Decides the code word. None draws one.
            options: ``{"code": ["red", "3", "blue"]}`` sets it.

        Raises:
            ValueError: If the code word is not colours of the level and digits in turn, one for each turn.
        """
        rng = random.Random(draw(seed, 2**63))
        drawn = [rng.choice(self.colours if turn % 2 == 0 else self.digits) for turn in range(self.max_turns)]
        self.code = options.get("code", drawn)
        legal = [self.colours if turn % 2 == 0 else self.digits for turn in range(self.max_turns)]
        if len(self.code) != len(legal) or not all(one in known for one, known in zip(self.code, legal, strict=True)):
            raise ValueError(
                f"code must be {self.max_turns} colours of {self.colours} and digits of {self.digits} in turn, got "
                f"{self.code!r}."
            )
        self.right = 0
        return self._question(), {"code": " ".join(self.code)}

    def answer(self, text: str) -> tuple[Any, float, dict[str, Any]]:
        """Take a colour or a digit."""
        said, expected = text.strip(), self.code[self.turns - 1]
        self.right += said == expected
        won = self.right == self.max_turns
        known = said in COLOURS or (len(said) == 1 and said in DIGITS)
        reward = WON / self.max_turns if said == expected else 0.0 if known else INVALID
        return "end" if self.turns == self.max_turns else self._question(), reward, {"success": won}

    def _question(self) -> list[Message]:
        item = self.code[self.turns]
        if item in COLOURS:
            parts = [{"type": "text", "text": "which colour"}, {"type": "image", "image": bitmap(COLOURS[item])}]
            return [{"role": "user", "content": parts}]
        return [{"role": "user", "content": f"say the digit {item}"}]


def bitmap(colour: tuple[int, int, int], side: int = _SIDE) -> bytes:
    """Return a square of one colour as a file (BMP), whose bytes are the same everywhere.

    Args:
        colour: Red, green and blue, 0 to 255.
        side: Pixels, a multiple of 4.
    """
    pixels = bytes(reversed(colour)) * side * side
    header = (40, side, side, 1 | 24 << 16, 0, len(pixels), 2835, 2835, 0, 0)
    numbers = (54 + len(pixels), 0, 54, *header)
    return b"BM" + b"".join(number.to_bytes(4, "little") for number in numbers) + pixels


def random_policy(messages: list[Message], rng: random.Random) -> str:
    """Guess one of the four colours of ``normal`` without a look at the image; say the digit."""
    return _said(messages) or rng.choice(list(COLOURS)[: LEVELS["normal"][0]])


def expert_policy(messages: list[Message], rng: random.Random) -> str:
    """Say what the image shows, or the digit."""
    if said := _said(messages):
        return said
    pixel = opened(images_of(messages[-1:])[0]).getpixel((0, 0))
    return next(name for name, colour in COLOURS.items() if colour == pixel)


def _said(messages: list[Message]) -> str:
    """Return the digit that the last message asks for; nothing if it shows an image."""
    return "" if images_of(messages[-1:]) else text_of(messages[-1]).rpartition(" ")[2]
