"""Probes: environments so small that a correct trainer solves them in seconds, each aimed at one way of being wrong.

Words are separated by single spaces and come from ``PROBE_WORDS``, so that a tokenizer with those words as tokens sees
every observation and every right answer as whole tokens. The seed, modulo ``starts``, chooses the start state: seeds 0
to ``starts - 1`` enumerate them all.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from agile_trainers.envs.base import ResetResult, StepResult, read_options
from agile_trainers.envs.players import Player

DIGITS = tuple("0123456")
PROBE_WORDS = (*DIGITS, "go", "recall", "first", "second", "third", "at", "goal", "left", "right", "end")


class Probe:
    """What every probe has."""

    vocabulary: ClassVar[tuple[str, ...]] = DIGITS
    """The legal answers; any other answer is simply wrong."""
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
            options: ``{"start": int}`` takes the place of ``seed``.

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
        """The best answer in the current state (which the probe may know better than the observation tells)."""
        raise NotImplementedError

    def players(self) -> dict[str, Player]:
        """Uniformly random legal answers, and the best ones."""
        return {
            "random": lambda messages, rng: rng.choice(self.vocabulary),
            "expert": lambda messages, rng: self.optimal_action(messages[-1]["content"]),
        }


class QuestionProbe(Probe):
    """Asks its questions one per turn, whatever the answers, and pays 1 for each right one."""

    _turn = 0
    _right = 0

    def questions(self, start: int) -> list[tuple[str, str | None]]:
        """The turns of an episode: what is shown, and the right answer to it. None: there is no right answer."""
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
        """Reward of an answer."""
        return float(right)

    def optimal_action(self, observation: str) -> str:
        """The best answer in the current state."""
        return self._questions[self._turn][1] or self.vocabulary[0]


def _shifted(number: int) -> str:
    """The mapping the conditional probes ask for. Its answers are 1, 2 and 3, so copying the input does not pay."""
    return str(number % 3 + 1)


class ConstantTarget(QuestionProbe):
    """The right answer is always 4.

    Failing means that rewards do not reach the policy at all: wrong sign, wrong tokens, no optimizer step.
    """

    starts = 1
    random_return = 1 / 7

    def questions(self, start: int) -> list[tuple[str, str | None]]:
        """One turn."""
        return [("go", "4")]


class ConditionalTarget(QuestionProbe):
    """Shows a digit d; the right answer is (d % 3) + 1.

    Failing, with ``constant`` solved, means that the policy does not see the prompt it is trained on: padding,
    positions, attention mask, or rows that were mixed up between rollout and update.
    """

    starts = 7
    random_return = 1 / 7

    def questions(self, start: int) -> list[tuple[str, str | None]]:
        """One turn."""
        return [(str(start), _shifted(start))]


class TwoInputs(QuestionProbe):
    """Shows two digits a and b; the right answer is ((a + b) % 3) + 1.

    Neither digit says anything alone. Failing, with ``conditional`` solved, means that learning is too noisy or slow
    rather than wrong: look at the learning rate, the group size and the advantage normalization.
    """

    starts = 49
    random_return = 1 / 7

    def questions(self, start: int) -> list[tuple[str, str | None]]:
        """One turn."""
        a, b = divmod(start, 7)
        return [(f"{a} {b}", _shifted(a + b))]


class TwoTurnMemory(QuestionProbe):
    """Shows a digit, takes any answer, then asks for the digit without showing it.

    Failing means that the second turn is sampled or trained without the first one's text: a conversation that was cut,
    a stale key-value cache, positions that restart.
    """

    starts = 7
    max_turns = 2
    random_return = 1 / 7

    def questions(self, start: int) -> list[tuple[str, str | None]]:
        """Two turns; the first pays nothing."""
        return [(str(start), None), ("recall", str(start))]


class DelayedReward(QuestionProbe):
    """Three turns, each showing its name and a digit; the only reward comes at the end: the share of right answers.

    The right answer is (d % 3) + 1 on the first turn, (d + 1) % 3 + 1 on the second, (d + 2) % 3 + 1 on the third: what
    is learned on one turn is wrong on the others, so that shared weights cannot make up for missing credit. The final
    reward is a share because all or nothing is hardly ever found by chance. Success needs all three.

    Failing means that the final reward does not reach earlier turns. An advantage made from each turn's own reward
    gives exactly zero to the first two.
    """

    starts = 27
    max_turns = 3
    random_return = 1 / 7

    def questions(self, start: int) -> list[tuple[str, str | None]]:
        """Three turns."""
        digits = start // 9, start // 3 % 3, start % 3
        return [
            (f"{name} {digit}", _shifted(digit + turn))
            for turn, (name, digit) in enumerate(zip(("first", "second", "third"), digits))
        ]

    def reward(self, right: bool, over: bool) -> float:
        """Nothing before the end."""
        return self._right / self.max_turns if over else 0.0


class EightTurns(QuestionProbe):
    """Eight turns, each with a digit d of its own and a reward of its own for (d % 3) + 1.

    Turn k shows (a + b k) mod 7, where a and b make the start state. Failing, with ``conditional`` solved, means that
    rewards go to the wrong turn: an index shifted by one, turns counted from the padded side, a turn left out.
    """

    starts = 49
    max_turns = 8
    random_return = 8 / 7
    optimal_return = 8.0

    def questions(self, start: int) -> list[tuple[str, str | None]]:
        """Eight turns."""
        a, b = divmod(start, 7)
        digits = [(a + b * turn) % 7 for turn in range(self.max_turns)]
        return [(str(digit), _shifted(digit)) for digit in digits]


class EqualReward(QuestionProbe):
    """Pays 1 for every answer, however long: the mean length of the answers must stay where it was.

    The runner lets answers have 1 to ``max_new_tokens`` tokens and compares mean lengths before and after, without an
    entropy bonus. Every return is equal, so every advantage is zero and a correct estimator does not move. Failing
    means that length itself is paid for or charged: the turn's reward on each of its tokens, a penalty summed over
    tokens, an advantage that is not centred.

    Why nothing varies here: a reward that depends on what is said makes length drift for honest reasons (weights are
    shared between the word and the end of the answer), and pure noise makes Adam walk. The weight of a token in turns
    of different lengths is proved right elsewhere, by enumeration.
    """

    starts = 1
    random_return = 1.0

    def questions(self, start: int) -> list[tuple[str, str | None]]:
        """One turn."""
        return [("go", None)]

    def reward(self, right: bool, over: bool) -> float:
        """The same for every answer."""
        return 1.0


class GridNavigation(Probe):
    """Walk to a goal on a line of four cells in at most five turns: 1 on arrival, -0.1 for every other turn.

    Answers are ``left`` and ``right``; a step into the wall or any other answer stays. All 12 pairs of start and goal
    occur. An episode that does not arrive in five turns is truncated.

    ``info["anchor"]`` names the state, so that turns which start from the same cell can be compared.

    Failing means that credit over several turns of the same episode is wrong, or that episodes of different length are
    not handled alike.
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
        """Towards the goal."""
        return "left" if self._goal < self._cell else "right"

    def _observation(self) -> str:
        return f"at {self._cell} goal {self._goal}"


@dataclass(frozen=True)
class ProbeSpec:
    """How a probe is run and when it counts as solved."""

    factory: type[Probe]
    episodes: int
    """Training budget."""
    max_new_tokens: int = 1
    """Per turn. One: the answer is a single token, and nothing else has to be learned (not even to stop)."""
    criterion: Literal["success", "length"] = "success"
    """``success``: greedy success over all starts reaches ``threshold``. ``length``: the mean number of tokens of an
    answer after training differs from that before by at most ``threshold``, as a share of it."""
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
