"""Runs whose sampler is replaced, or whose episodes are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from environment_agents import NoiseByPrompt, scripted

from agile_trainers.rollout.generators.base import Generator
from agile_trainers.rollout.generators.scripted import ScriptedGenerator
from agile_trainers.types import Trajectory


def sampling_with(trainer: Any, change: Callable[[Generator], Generator]) -> Any:
    """Let a trainer's rollouts use a changed generator."""
    generators = trainer.sampler.generators

    @contextmanager
    def changed(*arguments: Any, **options: Any) -> Iterator[Callable[[], Generator]]:
        with generators(*arguments, **options) as make:
            yield lambda: change(make())

    trainer.sampler.generators = changed
    return trainer


def by_script(trainer: Any) -> Callable[[Generator], Generator]:
    tokenizer = trainer.processing_class
    say = scripted(tokenizer.eos_token_id, tokenizer.encode("aeiou0123456789 again start"))
    return lambda _: NoiseByPrompt(ScriptedGenerator(say))  # type: ignore[return-value]


def watched(trainer: Any) -> list[list[Trajectory]]:
    """The episodes of each generation batch that a run trains on, filled as it trains."""
    trained: list[list[Trajectory]] = []
    rewarded = trainer.rollouts._rewarded

    def watching(trajectories: list[Trajectory], rows: Any) -> Any:
        trained.append(trajectories)
        return rewarded(trajectories, rows)

    trainer.rollouts._rewarded = watching
    return trained


def said(episodes: list[Trajectory]) -> list[tuple[int, list[int], list[int]]]:
    return [(one.seed, one.prompt_ids, one.completion_ids) for one in episodes]
