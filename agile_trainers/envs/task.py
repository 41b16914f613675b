"""Base classes of the ready tasks: levels, games with a limited number of turns, and data of scripted policies."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

from agile_trainers.envs.base import Environment, ResetResult, StepResult, read_options
from agile_trainers.envs.questions.answers import read_answer
from agile_trainers.envs.scripted_policies import ScriptedPolicy, compare_until, demonstrate
from agile_trainers.types import Message

TrainingRows = list[dict[str, list[Message]]]
"""Rows of messages for TRL's ``SFTTrainer`` and ``DPOTrainer``."""


def check_level(level: str, levels: Collection[str]) -> None:
    """Reject a level that a task does not have.

    Raises:
        ValueError: If the level is unknown; the message names the known ones.
    """
    if level not in levels:
        raise ValueError(f"Unknown level {level!r}; choose one of {', '.join(levels)}.")


def draw(seed: int | None, count: int) -> int:
    """Return ``seed % count``, so that ``count`` consecutive seeds give each number once. None draws one at random."""
    return random.SystemRandom().randrange(count) if seed is None else seed % count


WON, INVALID = 1.0, -0.2
"""Rewards of the answer that wins a game, and of one that is no move. Any other answer is rewarded with 0."""


class GameTask(ABC):
    """A game with a limited number of turns.

    Every answer uses one turn. The limit on turns is a rule of the game, so reaching it terminates the episode instead of
    truncating it. ``info["success"]`` of every step is True if the game is won, which also ends it. Rewards are ``WON``,
    ``INVALID`` or 0, which ``return_range`` states.

    A subclass sets ``name``, ``levels`` and ``options`` and defines :meth:`start` and :meth:`answer`.

    Args:
        level: A key of ``levels``.
        max_turns: Number of turns. Default: the level's.

    Raises:
        ValueError: If the level is unknown or ``max_turns`` is not positive.
    """

    name: ClassVar[str]
    """Id of the task, for errors."""
    levels: ClassVar[Mapping[str, tuple[int, ...]]]
    """Level to its parameters, of which the last is the number of turns."""
    options: ClassVar[tuple[str, ...]]
    """Columns of a dataset row that :meth:`start` reads."""

    def __init__(self, level: str = "normal", max_turns: int | None = None):
        check_level(level, self.levels)
        self.level = level
        self.max_turns = self.levels[level][-1] if max_turns is None else max_turns
        if self.max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, got {max_turns}.")
        self.return_range = INVALID * self.max_turns, WON

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Start a game; see :meth:`start` for seed and options.

        Raises:
            ValueError: If there is an option that the game does not read, or one has a wrong value.
        """
        self.turns = 0
        return self.start(seed, read_options(options, self.options, self.name))

    def step(self, action: str) -> StepResult:
        """Take a turn."""
        self.turns += 1
        observation, reward, info = self.answer(read_answer(action))
        return observation, reward, info["success"] or self.turns == self.max_turns, False, info

    @abstractmethod
    def start(self, seed: int | None, options: dict[str, Any]) -> ResetResult:
        """Set up the game and return its first observation and info."""

    @abstractmethod
    def answer(self, text: str) -> tuple[str, float, dict[str, Any]]:
        """Play an answer (without tags) and return observation, reward and info, which holds ``success``."""


def demonstrations_of(task: Callable[[], Environment], default: ScriptedPolicy) -> Callable[..., TrainingRows]:
    """Make the function ``demonstrations`` of a task.

    Args:
        task: Makes the default environment.
        default: The default policy.
    """

    def demonstrations(
        count: int, seed: int = 0, policy: ScriptedPolicy = default, environment: Environment | None = None
    ) -> TrainingRows:
        """Make episodes as training data for TRL's ``SFTTrainer``.

        Args:
            count: Number of episodes.
            seed: Seed of the first episode; the last one has ``seed + count - 1``.
            policy: The policy. Default: the task's choice.
            environment: The environment. Default: the task made without arguments.

        Returns:
            ``count`` rows ``{"messages": [...]}``, each ending with the policy's last answer.
        """
        return demonstrate(environment or task(), policy, range(seed, seed + count))

    return demonstrations


def preferences_of(
    task: Callable[[], Environment], better: ScriptedPolicy, worse: ScriptedPolicy
) -> Callable[..., TrainingRows]:
    """Make the function ``preferences`` of a task, with pairs of :func:`~agile_trainers.envs.scripted_policies.compare`.

    Args:
        task: Makes the default environment.
        better: The policy whose answers are chosen.
        worse: The policy whose answers are rejected.
    """

    def preferences(count: int, seed: int = 0, environment: Environment | None = None) -> TrainingRows:
        """Make pairs of a better and a worse answer for TRL's ``DPOTrainer``.

        Args:
            count: Number of pairs.
            seed: Seed of the first episode; episodes without a higher return of the better policy are skipped.
            environment: The environment. Default: the task made without arguments.

        Returns:
            ``count`` rows ``{"prompt", "chosen", "rejected"}`` of messages.
        """
        return compare_until(count, environment or task(), better, worse, seed)

    return preferences
