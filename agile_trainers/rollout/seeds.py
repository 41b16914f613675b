"""Draws what an episode starts from, whatever process plays it: its seeds, and its environment in a run of several."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from agile_trainers.rollout.spec import EpisodeSpec

TRAINING, EVALUATION, SELECTION, HELD_OUT = 0, 1, 5, 6
"""First key of every random stream: of training, of evaluations during a run, of those by which a population selects, and of
those that choose nothing. The choice of environments (2), the choice of tasks (3) and the seeds of a pool (4) have separate
streams."""


def environment_seed(seed: int, domain: int, generation: int, group: int) -> int:
    """Compute the environment seed of a group, a non-negative int below 2**31, equal for all its members."""
    return int(np.random.SeedSequence((seed, domain, generation, group)).generate_state(1)[0] >> 1)


def training_specs(
    seed: int,
    generation: int,
    rows: Sequence[dict[str, Any] | None],
    places: Sequence[int],
    group_size: int,
    mixture: Mixture | None = None,
    *,
    environments: Sequence[str] | None = None,
    offset: int = 0,
) -> list[EpisodeSpec]:
    """Return the episodes of one rank's part of a generation batch.

    Args:
        seed: The run's seed.
        generation: Index of the generation batch in the run.
        rows: The dataset row of each episode, or None.
        places: Index of each row in the whole batch, over all ranks.
        group_size: Members of a group.
        mixture: Chooses the environments in a run of several: named by the row, or drawn for the whole group.
        environments: Name of each group's environment in a run of several without rows. Default: ``mixture`` draws them.
        offset: Added to the indices of groups, so that groups that replace others have seeds and noise of their own.
    """
    specs = []
    if environments is None:
        environments = mixture.draw(seed, generation) if mixture is not None else []
    for place, row in zip(places, rows, strict=True):
        group, member = divmod(place, group_size)
        start = environment_seed(seed, TRAINING, generation, group + offset)
        name: str | None = None
        if mixture is not None:
            name, row = (environments[group], None) if row is None else mixture.of_row(row)
        specs.append(EpisodeSpec(start, (seed, TRAINING, generation, group + offset, member), row, name))
    return specs


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore the state of Python's, NumPy's and torch's global random generators after the block."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


COLUMN = "environment"
"""The column that names each row's environment, as in TRL. ``reset`` does not get it."""
STREAM = 2
"""First key of the random stream that environments are drawn from."""


def systematic_sample(weights: np.ndarray, count: int, random: np.random.Generator) -> np.ndarray:
    """Draw indices such that each gets its share of the draws, rounded up or down at random (systematic sampling).

    Args:
        weights: (n,) non-negative, not all 0.
        count: Number of draws.
        random: Random generator.

    Returns:
        (count,) int64, in random order. An index is drawn ``count * weight / sum of weights`` times on average, exactly.
    """
    # In an order of its own: draws are evenly spaced, and in a regular order all would meet indices of one kind.
    drawn = random.permutation(np.flatnonzero(weights))
    ends = np.cumsum(weights[drawn])
    points = (np.arange(count) + random.random()) / count * ends[-1]
    return drawn[random.permutation(np.searchsorted(ends[:-1], points, side="right"))]


def with_names(rows: Sequence[Mapping[str, Any]], specs: Sequence[EpisodeSpec]) -> list[dict[str, Any]]:
    """Add the column that names each episode's environment to the rows, in a run of several environments."""
    return [
        dict(row) if spec.environment is None else {**row, COLUMN: spec.environment}
        for row, spec in zip(rows, specs, strict=True)
    ]


@dataclass(frozen=True)
class Mixture:
    """Chooses the environment of each group.

    Args:
        names: Names of the environments.
        groups: Number of groups of one generation batch, over all processes.
    """

    names: tuple[str, ...]
    groups: int

    def draw(self, seed: int, generation: int) -> list[str]:
        """Draw the environment of every group of a generation batch that is played without rows.

        Each environment gets an equal share of the batch, rounded up or down at random so that the shares are exact on
        average (systematic sampling), in random order. The draw depends on the arguments alone, not on rank or world size.

        Args:
            seed: The run's seed.
            generation: Index of the generation batch in the run.
        """
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, STREAM, generation))))
        return [self.names[index] for index in systematic_sample(np.ones(len(self.names)), self.groups, random)]

    def evaluated(self, count: int) -> list[tuple[str, int]]:
        """Return the environment of every evaluation episode without rows, and the episode's index in that environment.

        The episodes are divided equally; the first environments play one more if there is a remainder.

        Raises:
            ValueError: If there are fewer episodes than environments.
        """
        if count < len(self.names):
            raise ValueError(
                f"num_eval_episodes={count} leaves some of the {len(self.names)} environments ({', '.join(self.names)}) "
                f"without an episode. Set at least {len(self.names)}."
            )
        share, rest = divmod(count, len(self.names))
        return [(name, n) for index, name in enumerate(self.names) for n in range(share + (index < rest))]

    def of_row(self, row: Mapping[str, Any], where: str = "train_dataset") -> tuple[str, dict[str, Any]]:
        """Return the environment that a row names, and the row without that column.

        Raises:
            ValueError: If the row names no environment or an unknown one.
        """
        if COLUMN not in row:
            raise ValueError(
                f"{where} has no column {COLUMN!r}, which names the environment ({', '.join(self.names)}) of each row; its "
                f"columns are {', '.join(row)}. Add it."
            )
        name = row[COLUMN]
        if name not in self.names:
            raise ValueError(
                f"{where}: a row names the environment {name!r}, expected one of {', '.join(self.names)}. Correct the "
                "row, or pass that environment too."
            )
        return name, {column: value for column, value in row.items() if column != COLUMN}
