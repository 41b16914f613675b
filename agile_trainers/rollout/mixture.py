"""Chooses the environment of each group in a run of several: drawn at random, or named by the dataset row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

COLUMN = "environment"
"""The column that names each row's environment, as in TRL. ``reset`` does not get it."""
STREAM = 2
"""First key of the random stream that environments are drawn from; see :mod:`agile_trainers.rollout.seeds`."""


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
