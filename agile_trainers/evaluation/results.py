"""The episodes of an evaluation: which are played, and their metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from hashlib import blake2b
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
class EpisodeStart:
    """The start of an episode, by which episodes of several policies are paired and repeats are found."""

    environment: str | None
    """The environment's name in a run of several."""
    seed: int
    row: str | None
    """Hash of the data set row; None without one."""
    state: str
    """Hash of the row, the prompt and the environment's information at reset: equal for equal starting states."""

    def unit(self, greedy: bool) -> Hashable:
        """Return the unit that the episode belongs to, of episodes that depend on each other.

        Episodes of one row, or of one seed, are one unit. In greedy play so are those of one starting state, since each is
        the same game again.
        """
        if greedy:
            return self.environment, self.state
        return self.environment, self.seed if self.row is None else self.row


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
    starts: list[EpisodeStart]
    """The start of each episode of all processes, in the order of ``rows``."""
    greedy: bool = False
    """True if the likeliest token was taken instead of sampling."""

    @property
    def units(self) -> list[Hashable]:
        """The unit of each of ``rows``, of episodes that depend on each other; see :meth:`EpisodeStart.unit`."""
        return [start.unit(self.greedy) for start in self.starts]

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
    seed: int,
    episodes: int,
    rows: Any = None,
    mixture: Mixture | None = None,
    *,
    attempts: int = 1,
    sampling_seed: int | None = None,
) -> list[EpisodeSpec]:
    """The episodes of an evaluation, of all processes.

    Args:
        seed: The same seed gives the same episodes.
        episodes: Their number, of different seeds.
        rows: Handed to ``reset`` in order, again and again. None: the environment gets seeds only.
        mixture: Of several environments.
        attempts: Times that each is played, with sampling noise of its own.
        sampling_seed: Seed of the sampling noise, besides ``seed``, which the environments get. Policies with different ones
            play the same episodes with independent noise. Default: the noise of ``trainer.evaluate()``.

    Raises:
        ValueError: If there are no episodes or attempts, ``rows`` is empty, or a row names no environment.
    """
    options = None if rows is None else [dict(row) for row in islice(rows, episodes)]
    if options is not None and not options:
        raise ValueError(f"An evaluation data set must have at least one row, got {rows!r}.")
    if episodes < 1:
        raise ValueError(f"episodes must be at least 1, got {episodes}.")
    if attempts < 1:
        raise ValueError(f"attempts must be at least 1, got {attempts}.")
    own = () if sampling_seed is None else (sampling_seed,)
    return [
        replace(spec, stream=(*spec.stream[:-1], attempt, *own))
        for spec in evaluation_specs(seed, episodes, options, 0, 1, mixture)
        for attempt in range(attempts)
    ]


def play_evaluation(
    engine: RolloutEngine,
    generator: AbstractContextManager[Generator],
    specs: Sequence[EpisodeSpec],
    *,
    rank: int,
    world_size: int,
    on_finish: Callable[[Trajectory], None] | None = None,
) -> EpisodeResults:
    """Play this process's share of an evaluation, and gather the rows of all.

    Args:
        engine: Plays the episodes.
        generator: Samples their actions.
        specs: The episodes of all processes.
        rank: Index of this process.
        world_size: Number of processes.
        on_finish: Called with each of this process's episodes when it ends.
    """
    own, places = list(specs[rank::world_size]), list(range(rank, len(specs), world_size))
    with generator as made:
        trajectories = engine.run(own, made, on_finish)
    played = in_order(places, [(episode_row(one), start_of_episode(one)) for one in trajectories])
    return EpisodeResults(own, trajectories, places, [row for row, _ in played], [start for _, start in played])


def start_of_episode(trajectory: Trajectory) -> EpisodeStart:
    """Return the start of an episode."""
    seed = trajectory.seed
    row = None if trajectory.options is None else _digest(trajectory.options, seed)
    state = _digest([row, trajectory.prompt, trajectory.reset_info], seed)
    return EpisodeStart(trajectory.environment_name, seed, row, state)


def _digest(value: Any, seed: int) -> str:
    """Hash a value of the user's or the environment's; one that cannot be written as text is told by its seed."""
    try:
        text = json.dumps(value, sort_keys=True, default=lambda it: re.sub(r" at 0x[0-9a-f]+", "", repr(it)))
    except Exception:  # it refers to itself, mixes types of keys, or its repr raises
        text = f"seed {seed}"
    return blake2b(text.encode(errors="backslashreplace"), digest_size=16).hexdigest()


def in_order(places: Sequence[int], values: Any) -> list[Any]:
    """The values of all processes' episodes, in order of their places.

    Args:
        places: Of this process's episodes.
        values: One for each of them.
    """
    return [value for _, value in sorted(gather_object(list(zip(places, values, strict=True))), key=lambda one: one[0])]
