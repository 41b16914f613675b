"""Episodes of any length, answered with words that depend on the noise, for rollouts that pause."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from episodes import Scripted, end, go_on, ids, make_engine

from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.generators.base import GenerationOutput, GenerationRequest
from agile_trainers.rollout.generators.scripted import ScriptedGenerator
from agile_trainers.rollout.spec import EpisodeSpec
from agile_trainers.types import Trajectory

WORDS = ("a", "b", "c")


def answer(request: GenerationRequest) -> GenerationOutput:
    """Words that depend on the noise and on the prompt."""
    draws = request.uniforms(1 + len(request.token_ids) % 2)
    words = [WORDS[int(draw * 3)] for draw in draws]
    said = [*ids(" ".join(words)), *ids("]")]
    return GenerationOutput(request.episode, said, [-draw for draw in [*draws, 0.5]], "stop")


def slowly(chance: random.Random) -> ScriptedGenerator:
    return ScriptedGenerator(answer, lambda request: chance.randint(1, 9))


class Listening:
    """Answers, and keeps the requests."""

    def __init__(self) -> None:
        self.asked: list[GenerationRequest] = []

    def __call__(self, request: GenerationRequest) -> GenerationOutput:
        self.asked.append(request)
        return answer(request)


class Counting(Scripted):
    """Goes on until the letters that it heard reach its number, and rewards them."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.left = (seed or 0) % 5 + 1
        return f"go {'up ' * self.left}", {"seed": seed}

    def step(self, action: str) -> Any:
        self.left -= len(action.split())
        return go_on("up " * max(self.left, 1), 0.25) if self.left > 0 else end(1.0)


SPECS = [EpisodeSpec(seed, (seed, 7), {"seed": seed}) for seed in range(12)]


def compared(trajectories: list[Trajectory]) -> list[dict[str, Any]]:
    return [{**asdict(one), "read_again": 0, "environment": None} for one in trajectories]


def whole(make: Callable[[], RolloutEngine] = lambda: make_engine(Counting, max_turns=8)) -> list[dict[str, Any]]:
    return compared(make().run(SPECS, ScriptedGenerator(answer)))


class Countdown:
    """True after it was asked some times."""

    def __init__(self, times: int) -> None:
        self.left = times

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0
