"""The tasks of ``learning_suite.py``, and the half of them on which no default may be chosen.

``learning.py`` plays three of these. Environments import the standard library alone, since every side plays them. An answer
is one or two words, and the words of a task are the tokens of its model. A start state is a row of the data set.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from agile_environments.probes import PROBES, Probe, QuestionProbe
from environments.guess_number import GuessNumber, random_legal_policy
from environments.mastermind import Mastermind, careless_policy, codes

GROUP = 8
"""Episodes of a group."""
Policy = Callable[[list[Any], random.Random], str]


class Adding(QuestionProbe):
    """Shows a digit a, takes any answer, shows a digit b, and asks for ((a + b) % 3) + 1: two inputs, in two turns."""

    vocabulary = ("1", "2", "3")
    starts, max_turns, random_return = 49, 2, 1 / 3

    def questions(self, start: int) -> list[tuple[str, str | None]]:
        """Return two turns; only the second is rewarded."""
        a, b = divmod(start, 7)
        return [(f"first {a}", None), (f"second {b}", str((a + b) % 3 + 1))]


class Recall(QuestionProbe):
    """Shows a digit on each of two turns, then asks for the first or the second: memory of a chosen turn."""

    vocabulary = ("0", "1", "2", "3")
    starts, max_turns, random_return = 32, 3, 1 / 4

    def questions(self, start: int) -> list[tuple[str, str | None]]:
        """Return three turns; only the last is rewarded."""
        digits, name = (start // 8, start // 2 % 4), start % 2
        return [
            (str(digits[0]), None),
            (str(digits[1]), None),
            (f"recall {('first', 'second')[name]}", str(digits[name])),
        ]


class Lock(QuestionProbe):
    """Shows a digit on two turns and gives reward 1 at the end if both answers are right: of random play, one in 49.

    The right answer is (d % 3) + 1 on the first turn and (d + 2) % 3 + 1 on the second.
    """

    starts, max_turns, random_return = 9, 2, 1 / 49

    def questions(self, start: int) -> list[tuple[str, str | None]]:
        """Return two turns."""
        a, b = divmod(start, 3)
        return [(f"first {a}", str(a + 1)), (f"second {b}", str((b + 2) % 3 + 1))]

    def reward(self, right: bool, over: bool) -> float:
        """Return 1 at the end if all answers were right, else 0."""
        return float(over and self._right == self.max_turns)


class Corridor(Probe):
    """A walk through a corridor of ten doors in at most fourteen turns, with reward 1 at its end and nothing before.

    Door k shows a sign s. The answer s + 1 opens an even door and (s + 1) % 3 + 1 an odd one; with any other the walker
    stays. The signs are (a + b k) % 3, where a and b are the start state.
    """

    vocabulary = ("1", "2", "3")
    starts, max_turns, random_return = 9, 14, 0.0040
    doors = 10

    def begin(self, start: int) -> str:
        """Enter a start state and return its observation."""
        self._first, self._step_of_signs = divmod(start, 3)
        self._door = self._turn = 0
        return self._observation()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Try to open the door."""
        self._door += action.strip() == self.optimal_action("")
        self._turn += 1
        arrived = self._door == self.doors
        truncated = not arrived and self._turn == self.max_turns
        return self._observation(), float(arrived), arrived, truncated, {"success": arrived}

    def optimal_action(self, observation: str) -> str:
        """Return the answer that opens the door."""
        return str((self._sign() + self._door % 2) % 3 + 1)

    def _sign(self) -> int:
        return (self._first + self._step_of_signs * self._door) % 3

    def _observation(self) -> str:
        return "end" if self._door == self.doors else f"at {self._door} go {self._sign()}"


class Slippery(Probe):
    """A walk to a goal on a line of five cells in at most eight turns, of which each fails with probability 1/4.

    The wind is 0 or 1; with 1, ``left`` moves right and ``right`` left. Reward 1 on arrival. Members of a group slip at
    different moments: each environment has a random stream of its own.
    """

    vocabulary = ("left", "right")
    starts, max_turns, random_return = 40, 8, 0.6
    optimal_return = 0.993
    cells, slips = 5, 0.25

    def __init__(self, stream: int = 0):
        self._random = random.Random(stream)

    def begin(self, start: int) -> str:
        """Enter a start state and return its observation."""
        pair, self._wind = divmod(start, 2)
        self._cell, goal = divmod(pair, self.cells - 1)
        self._goal, self._turn = goal + (goal >= self._cell), 0
        return self._observation()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take a step, or slip."""
        move = {"left": -1, "right": 1}.get(action.strip(), 0) * (-1 if self._wind else 1)
        if self._random.random() >= self.slips:
            self._cell = min(max(self._cell + move, 0), self.cells - 1)
        self._turn += 1
        arrived = self._cell == self._goal
        truncated = not arrived and self._turn == self.max_turns
        return self._observation(), float(arrived), arrived, truncated, {"success": arrived}

    def optimal_action(self, observation: str) -> str:
        """Return the answer that moves towards the goal."""
        return "left" if (self._goal < self._cell) != bool(self._wind) else "right"

    def _observation(self) -> str:
        return f"at {self._cell} goal {self._goal} wind {self._wind}"


@dataclass(frozen=True)
class Task:
    """A task, and the size of its rollouts and trainings, which are those of every side."""

    kind: str
    """The ability that it tests."""
    make: Callable[[int], Any]
    """Makes an environment; the argument numbers those of a training."""
    rows: tuple[dict[str, Any], ...]
    """Options of ``reset`` for each start state."""
    groups: int
    """Groups of a rollout, which is one row of the data set each."""
    turns: int
    budget: int
    """Episodes after which a training of the suite ends."""
    expert: float = 0.0
    """Share of the best answers among those that the model is taught before; the others are random legal ones."""
    new_tokens: int = 1
    taught: int = 100
    """Supervised updates of 32 games."""
    teacher: Policy | None = None
    """Plays the games that are taught. Default: a probe's scripted policies."""

    @property
    def episodes(self) -> int:
        """Episodes of a rollout."""
        return self.groups * GROUP


def _starts(count: int) -> tuple[dict[str, Any], ...]:
    return tuple({"start": start} for start in range(count))


def _probe(name: str) -> Callable[[int], Any]:
    return lambda _: PROBES[name].factory()


TASKS = {
    "guess_number": Task(
        "search", lambda _: GuessNumber(), tuple({"secret": n} for n in range(1, 13)), groups=12, turns=4, budget=9600,
        new_tokens=2, taught=250, teacher=random_legal_policy,
    ),
    "lock": Task("rare success: 1 in 49", lambda _: Lock(), _starts(9) * 2, groups=18, turns=2, budget=8640),
    "corridor": Task(
        "long horizon: 10 to 14 turns", lambda _: Corridor(), _starts(9), groups=9, turns=14, budget=5040, expert=0.35
    ),
    "adding": Task("two inputs", lambda _: Adding(), _starts(49), groups=14, turns=2, budget=8960),
    "grid": Task("shaped reward", _probe("grid"), _starts(12), groups=12, turns=5, budget=5760),
    "delayed": Task(
        "delayed reward, partial credit", _probe("delayed"), _starts(27), groups=27, turns=3, budget=8640, expert=0.5,
        taught=150,
    ),
    "recall": Task("memory", lambda _: Recall(), _starts(32), groups=16, turns=3, budget=8960),
    "slippery": Task("stochastic environment", Slippery, _starts(40), groups=14, turns=8, budget=6720),
    "eight_turns": Task(
        "reward in every turn", _probe("eight_turns"), _starts(49), groups=14, turns=8, budget=5600, expert=0.25
    ),
    "mastermind": Task(
        "search with clues", lambda _: Mastermind("easy"), tuple({"secret": code} for code in codes(2, 4)), groups=16,
        turns=4, budget=8960, new_tokens=3, taught=250, teacher=careless_policy,
    ),
}  # fmt: skip
"""The tasks of the suite."""

CHOSEN = ("guess_number", "lock", "corridor", "adding", "grid")
"""The half of the suite on which defaults are chosen."""
HELD_OUT = ("delayed", "recall", "slippery", "eight_turns", "mastermind")
"""The half that confirms them. It was fixed before the first training of the suite and chose nothing."""

CONDITIONAL = Task(
    "one turn", _probe("conditional"), _starts(7) * 2, groups=14, turns=1, budget=4032, expert=0.5, taught=150
)
"""A task of ``learning.py`` alone, since it has one turn."""
EVERY = {**TASKS, "conditional": CONDITIONAL}
"""The tasks of both benchmarks."""
