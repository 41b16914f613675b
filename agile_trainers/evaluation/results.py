"""The episodes of an evaluation: which are played, and their metrics."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from accelerate.utils import gather_object

from agile_trainers.rollout.engine import EpisodeSpec, RolloutEngine
from agile_trainers.rollout.generators.base import Generator
from agile_trainers.rollout.metrics import episode_row, summarize
from agile_trainers.rollout.mixture import Mixture
from agile_trainers.rollout.seeds import evaluation_specs
from agile_trainers.types import Trajectory


@dataclass(frozen=True)
class EpisodeResults:
    """The episodes of an evaluation and their metrics."""

    specs: list[EpisodeSpec]
    """The episodes of this process: seed, sampling stream and data set row of each."""
    trajectories: list[Trajectory]
    """The same episodes, played."""
    places: list[int]
    """Their places among the episodes of all processes."""
    rows: list[dict[str, Any]]
    """One :func:`~agile_trainers.rollout.metrics.episode_row` per episode of all processes, in order of their places:
    ``return``, ``success``, ``turns``, ``action_tokens``, ``stop_reason``, ``environment`` and others."""

    @property
    def metrics(self) -> dict[str, float]:
        """Return the metrics of :func:`evaluation_metrics` over all episodes."""
        return evaluation_metrics(self.rows)

    @property
    def by_environment(self) -> dict[str, dict[str, float]]:
        """The metrics of each of several environments, by its name; empty for one."""
        names = sorted({row["environment"] for row in self.rows} - {None})
        return {name: evaluation_metrics([row for row in self.rows if row["environment"] == name]) for name in names}


def evaluation_metrics(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Metrics of evaluation episodes.

    Args:
        rows: One row per episode, of all processes.

    Returns:
        Those of :func:`~agile_trainers.rollout.metrics.summarize`; ``return``, the mean return of the episodes whose
        environment did not fail, and ``return_sem``, its standard error (NaN without any such episode); ``episodes``, their
        number, failed ones included.
    """
    metrics = summarize(rows)
    sound = len(rows) * (1 - metrics["stop/environment_error"] - metrics["stop/environment_timeout"])
    metrics["return"] = metrics.get("return/mean", float("nan"))
    metrics["return_sem"] = metrics["return/std"] / sound**0.5 if "return/std" in metrics else float("nan")
    metrics["episodes"] = float(len(rows))
    return metrics


def evaluation_episodes(
    seed: int, episodes: int, rows: Any = None, mixture: Mixture | None = None
) -> list[EpisodeSpec]:
    """The episodes of an evaluation, of all processes.

    Args:
        seed: The same seed gives the same episodes.
        episodes: Their number.
        rows: Handed to ``reset`` in order, again and again. None: the environment gets seeds only.
        mixture: Of several environments.

    Raises:
        ValueError: If there are no episodes, ``rows`` is empty, or a row names no environment.
    """
    options = None if rows is None else [dict(row) for row in islice(rows, episodes)]
    if options is not None and not options:
        raise ValueError(f"An evaluation data set must have at least one row, got {rows!r}.")
    if episodes < 1:
        raise ValueError(f"episodes must be at least 1, got {episodes}.")
    return evaluation_specs(seed, episodes, options, 0, 1, mixture)


def play_evaluation(
    engine: RolloutEngine,
    generator: AbstractContextManager[Generator],
    specs: Sequence[EpisodeSpec],
    *,
    rank: int,
    world_size: int,
) -> EpisodeResults:
    """Play this process's share of an evaluation, and gather the rows of all.

    Args:
        engine: Plays the episodes.
        generator: Samples their actions.
        specs: The episodes of all processes.
        rank: Index of this process.
        world_size: Number of processes.
    """
    own, places = list(specs[rank::world_size]), list(range(rank, len(specs), world_size))
    with generator as made:
        trajectories = engine.run(own, made)
    return EpisodeResults(own, trajectories, places, in_order(places, map(episode_row, trajectories)))


def in_order(places: Sequence[int], values: Any) -> list[Any]:
    """The values of all processes' episodes, in order of their places.

    Args:
        places: Of this process's episodes.
        values: One for each of them.
    """
    return [value for _, value in sorted(gather_object(list(zip(places, values, strict=True))), key=lambda one: one[0])]
