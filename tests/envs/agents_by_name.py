"""Agents, and what is none, as ids name them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from agile_trainers.envs.agent import Agent, Model, Task


async def solve(model: Model, task: Task, bonus: float = 0.0) -> float:
    """An agent that asks nothing."""
    return task.seed + bonus


def plain(model: Model, task: Task) -> float:
    """The same in a thread."""
    return float(task.seed)


wrapped = Agent(solve, not_enforced=["response_format"])
command = Agent.command(["echo", "{question}"], score=lambda task, finished: 2.0)


def make(bonus: float) -> Agent:
    """Make an agent."""
    return wrapped.with_arguments(bonus=bonus)


def make_function() -> Callable[[Model, Task], float]:
    """Make a function that is one."""
    return plain


class Solver:
    """An agent that is made once."""

    def __init__(self, bonus: float = 0.5):
        self.bonus = bonus

    async def __call__(self, model: Model, task: Task) -> float:
        """Ask nothing."""
        return task.seed + self.bonus


number = 3


def one_parameter(task: Task) -> float:
    """No agent: it does not take the model."""
    return 0.0


def make_number() -> int:
    """Make what is no agent."""
    return number


def yields(model: Model, task: Task) -> Iterator[float]:
    """No agent: its reward is yielded."""
    yield 1.0


async def yields_later(model: Model, task: Task) -> AsyncIterator[Any]:
    """No agent: its reward is yielded."""
    yield 1.0
