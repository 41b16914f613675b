"""Probes: small environments that a correct trainer solves in seconds, each of which detects one kind of error.

Words are separated by single spaces and come from ``PROBE_WORDS``, so that a tokenizer with those words as tokens encodes
every observation and every right answer as whole tokens. The seed, modulo ``starts``, chooses the start state: seeds 0
to ``starts - 1`` enumerate all start states.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from agile_trainers.envs.base import ResetResult, StepResult, read_options
from agile_trainers.envs.scripted_policies import ScriptedPolicy

DIGITS = tuple("0123456")
PROBE_WORDS = (*DIGITS, "go", "recall", "first", "second", "third", "at", "goal", "left", "right", "end")


class Probe:
    """Base class of the probes."""

    vocabulary: ClassVar[tuple[str, ...]] = DIGITS
    """The legal answers; all others are wrong."""
    starts: ClassVar[int]
    """Number of start states."""
    max_turns: ClassVar[int] = 1
    random_return: ClassVar[float]
    """Expected return of uniformly random legal answers, over all starts."""
    optimal_return: ClassVar[float] = 1.0
    """Mean return of the best policy, over all starts."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Start an episode.

        Args:
            seed: Chooses the start state, ``seed % starts``. None draws one.
            options: ``{"start": int}`` replaces ``seed``.

        Raises:
            ValueError: If there is another option, or ``start`` is out of range.
        """
        drawn = random.SystemRandom().randrange(self.starts) if seed is None else seed % self.starts
        start = read_options(options, ("start",), type(self).__name__).get("start", drawn)
        if start not in range(self.starts):
            raise ValueError(f"start must be an integer from 0 to {self.starts - 1}, got {start!r}.")
        return self.begin(start), {}

    def begin(self, start: int) -> str:
        """Enter a start state and return its observation."""
        raise NotImplementedError

    def step(self, action: str) -> StepResult:
        """Take an answer."""
        raise NotImplementedError

    def optimal_action(self, observation: str) -> str:
        """Return the best answer in the current state, which the observation may not reveal."""
        raise NotImplementedError

    def scripted_policies(self) -> dict[str, ScriptedPolicy]:
        """Return a policy of uniformly random legal answers and one of the best answers."""
        return {
            "random": lambda messages, rng: rng.choice(self.vocabulary),
            "expert": lambda messages, rng: self.optimal_action(messages[-1]["content"]),
        }


class QuestionProbe(Probe):
    """Asks one question per turn, independent of the answers, with reward 1 for each right one."""

    _turn = 0
    _right = 0

    def questions(self, start: int) -> list[tuple[str, str | None]]:
        """Return the turns of an episode: the observation and the right answer, or None if no answer is right."""
        raise NotImplementedError

    def begin(self, start: int) -> str:
        """Enter a start state and return its observation."""
        self._questions = self.questions(start)
        self._turn = self._right = 0
        return self._questions[0][0]

    def step(self, action: str) -> StepResult:
        """Take an answer."""
        answer = self._questions[self._turn][1]
        right = answer is not None and action.strip() == answer
        self._right += right
        self._turn += 1
        over = self._turn == len(self._questions)
        observation = "end" if over else self._questions[self._turn][0]
        success = over and self._right == sum(answer is not None for _, answer in self._questions)
        return observation, self.reward(right, over), over, False, {"success": success}

    def reward(self, right: bool, over: bool) -> float:
        """Return the reward of an answer."""
        return float(right)

    def optimal_action(self, observation: str) -> str:
        """Return the best answer in the current state."""
        return self._questions[self._turn][1] or self.vocabulary[0]


def _shifted(number: int) -> str:
    """Apply the mapping of the conditional probes. Its values are 1, 2 and 3, so copying the input is not rewarded."""
    return str(number % 3 + 1)


class ConstantTarget(QuestionProbe):
    """A constant target: the right answer is always 4.

    Failure means that rewards do not reach the policy at all: wrong sign, wrong tokens, no optimizer step.
    """

    starts = 1
    random_return = 1 / 7

    def questions(self, start: int) -> list[tuple[str, str | None]]:
        """One turn."""
        return [("go", "4")]


class ConditionalTarget(QuestionProbe):
    """Shows a digit d; the right answer is (d % 3) + 1.

    Failure, with ``constant`` solved, means that the policy does not see the prompt that it is trained on: padding,
    positions, attention mask, or rows that are mixed up between rollout and update.
    """

    starts = 7
    random_return = 1 / 7

    def questions(self, start: int) -> list[tuple[str, str | None]]:
        """One turn."""
        return [(str(start), _shifted(start))]


class TwoInputs(QuestionProbe):
    """Shows two digits a and b; the right answer is ((a + b) % 3) + 1.

    Neither digit alone is informative. Failure, with ``conditional`` solved, means that learning is too noisy or slow
    rather than wrong: check the learning rate, the group size and the advantage normalization.
    """

    starts = 49
    random_return = 1 / 7

    def questions(self, start: int) -> list[tuple[str, str | None]]:
        """One turn."""
        a, b = divmod(start, 7)
        return [(f"{a} {b}", _shifted(a + b))]


class TwoTurnMemory(QuestionProbe):
    """Shows a digit, takes any answer, then asks for the digit without showing it.

    Failure means that the second turn is sampled or trained without the first turn's text: a truncated conversation, a
    stale key-value cache, positions that restart.
    """

    starts = 7
    max_turns = 2
    random_return = 1 / 7

    def questions(self, start: int) -> list[tuple[str, str | None]]:
        """Return two turns; only the second is rewarded."""
        return [(str(start), None), ("recall", str(start))]


class DelayedReward(QuestionProbe):
    """Shows the turn's name and a digit on three turns; the reward at the end is the share of right answers.

    The right answer is (d % 3) + 1 on the first turn, (d + 1) % 3 + 1 on the second, (d + 2) % 3 + 1 on the third. The
    mapping of one turn is wrong on the others, so that shared weights cannot make up for missing credit. The final reward
    is a share because three right answers are rarely found by chance. Success needs all three.

    Failure means that the final reward does not reach earlier turns. An advantage made from each turn's own reward is
    exactly zero on the first two.
    """

    starts = 27
    max_turns = 3
    random_return = 1 / 7

    def questions(self, start: int) -> list[tuple[str, str | None]]:
        """Return three turns."""
        digits = start // 9, start // 3 % 3, start % 3
        return [
            (f"{name} {digit}", _shifted(digit + turn))
            for turn, (name, digit) in enumerate(zip(("first", "second", "third"), digits))
        ]

    def reward(self, right: bool, over: bool) -> float:
        """Return the share of right answers at the end, else 0."""
        return self._right / self.max_turns if over else 0.0


class EightTurns(QuestionProbe):
    """Shows a digit d on each of eight turns, with a separate reward for the answer (d % 3) + 1.

    Turn k shows (a + b k) mod 7, where a and b are the start state. Failure, with ``conditional`` solved, means that
    rewards go to the wrong turn: an index shifted by one, turns counted from the padded side, a missing turn.
    """

    starts = 49
    max_turns = 8
    random_return = 8 / 7
    optimal_return = 8.0

    def questions(self, start: int) -> list[tuple[str, str | None]]:
        """Return eight turns."""
        a, b = divmod(start, 7)
        digits = [(a + b * turn) % 7 for turn in range(self.max_turns)]
        return [(str(digit), _shifted(digit)) for digit in digits]


class EqualReward(QuestionProbe):
    """Gives reward 1 for every answer of any length: the mean length of the answers must not change.

    The runner allows answers of 1 to ``max_new_tokens`` tokens and compares mean lengths before and after, without an
    entropy bonus. All returns are equal, so every advantage is zero and a correct estimator does not move. Failure means
    that length itself is rewarded or penalized: the turn's reward on each of its tokens, a penalty summed over tokens, an
    advantage that is not centred.

    The reward is constant for two reasons. A reward that depends on the answer makes the length drift even in a correct
    trainer (weights are shared between the word and the end of the answer), and pure noise makes Adam drift. An
    enumeration test verifies the weight of a token in turns of different lengths.
    """

    starts = 1
    random_return = 1.0

    def questions(self, start: int) -> list[tuple[str, str | None]]:
        """One turn."""
        return [("go", None)]

    def reward(self, right: bool, over: bool) -> float:
        """Return 1 for every answer."""
        return 1.0


class GridNavigation(Probe):
    """A walk to a goal on a line of four cells in at most five turns: 1 on arrival, -0.1 for every other turn.

    Answers are ``left`` and ``right``; a step into the wall or any other answer stays. All 12 pairs of start and goal
    occur. An episode that does not arrive in five turns is truncated.

    ``info["anchor"]`` names the state, so that turns that start from the same cell can be compared.

    Failure means that credit over several turns of the same episode is wrong, or that episodes of different length are
    treated differently.
    """

    vocabulary = ("left", "right")
    starts = 12
    max_turns = 5
    random_return = 41 / 120
    optimal_return = (6 * 1.0 + 4 * 0.9 + 2 * 0.8) / 12
    cells = 4

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Start an episode; see :meth:`Probe.reset`."""
        observation, info = super().reset(seed, options)
        return observation, {**info, "anchor": observation}

    def begin(self, start: int) -> str:
        """Enter a start state and return its observation."""
        self._cell, goal = divmod(start, self.cells - 1)
        self._goal = goal + (goal >= self._cell)
        self._turn = 0
        return self._observation()

    def step(self, action: str) -> StepResult:
        """Take a step."""
        move = {"left": -1, "right": 1}.get(action.strip(), 0)
        self._cell = min(max(self._cell + move, 0), self.cells - 1)
        self._turn += 1
        arrived = self._cell == self._goal
        truncated = not arrived and self._turn == self.max_turns
        observation = self._observation()
        return observation, 1.0 if arrived else -0.1, arrived, truncated, {"success": arrived, "anchor": observation}

    def optimal_action(self, observation: str) -> str:
        """Return the direction of the goal."""
        return "left" if self._goal < self._cell else "right"

    def _observation(self) -> str:
        return f"at {self._cell} goal {self._goal}"


@dataclass(frozen=True)
class ProbeSpec:
    """Settings of a probe's run and the criterion of success."""

    factory: type[Probe]
    episodes: int
    """Training budget in episodes."""
    max_new_tokens: int = 1
    """Tokens of one answer. With 1, the model does not have to learn to stop."""
    criterion: Literal["success", "length"] = "success"
    """``success``: the greedy success rate over all starts reaches ``threshold``. ``length``: training changes the mean
    number of tokens of an answer by at most the share ``threshold``."""
    threshold: float = 0.95


PROBES: dict[str, ProbeSpec] = {
    "constant": ProbeSpec(ConstantTarget, episodes=4096),
    "conditional": ProbeSpec(ConditionalTarget, episodes=4096),
    "two_inputs": ProbeSpec(TwoInputs, episodes=12288),
    "memory": ProbeSpec(TwoTurnMemory, episodes=16384),
    "delayed": ProbeSpec(DelayedReward, episodes=16384),
    "grid": ProbeSpec(GridNavigation, episodes=32768),
    "equal_reward": ProbeSpec(EqualReward, episodes=4096, max_new_tokens=8, criterion="length", threshold=0.05),
    "eight_turns": ProbeSpec(EightTurns, episodes=16384),
}
"""Every probe by name, which is also its id: ``agile:probe/<name>``."""
