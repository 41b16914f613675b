"""Which environment an episode plays, in a run of several: drawn for a whole group, or named by its row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

COLUMN = "environment"
"""The column that names each row's environment, as in TRL. ``reset`` does not get it."""
STREAM = 2
"""First key of the random stream that environments are drawn from; see :mod:`agile_trainers.rollout.seeds`."""


@dataclass(frozen=True)
class Mixture:
    """Which environment a group plays.

    Args:
        names: The environments.
        weights: How often each is drawn where no row says it, in the order of ``names``.
        groups: Groups of one generation batch, over all processes.
    """

    names: tuple[str, ...]
    weights: tuple[float, ...]
    groups: int

    def draw(self, seed: int, generation: int) -> list[str]:
        """The environment of every group of a generation batch that is played without rows.

        Each environment gets its share of the batch, rounded up or down at random so that the shares are exact on average
        (systematic sampling), in random order. The draw depends on the arguments alone, not on rank or world size.

        Args:
            seed: The run's.
            generation: Index of the generation batch in the run.
        """
        drawn = [(name, weight) for name, weight in zip(self.names, self.weights) if weight > 0]
        ends = np.cumsum([weight for _, weight in drawn])
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, STREAM, generation))))
        points = (np.arange(self.groups) + random.random()) / self.groups * ends[-1]
        chosen = random.permutation(np.searchsorted(ends[:-1], points, side="right"))
        return [drawn[index][0] for index in chosen]

    def evaluated(self, count: int) -> list[tuple[str, int]]:
        """The environment of every evaluation episode that is played without rows, and its number among those of that one.

        Every environment plays equally many; the first ones play one more where that leaves a rest.

        Raises:
            ValueError: If there are fewer episodes than environments.
        """
        if count < len(self.names):
            raise ValueError(
                f"num_eval_episodes={count} leaves some of the {len(self.names)} environments ({', '.join(self.names)}) "
                f"without an episode. Evaluate on at least {len(self.names)}."
            )
        share, rest = divmod(count, len(self.names))
        return [(name, n) for index, name in enumerate(self.names) for n in range(share + (index < rest))]

    def of_row(self, row: Mapping[str, Any], where: str = "train_dataset") -> tuple[str, dict[str, Any]]:
        """The environment that a row names, and the row without that column.

        Raises:
            ValueError: If it names none, or one that is not there.
        """
        if COLUMN not in row:
            raise ValueError(
                f"{where} has no column {COLUMN!r}, which says which of the environments ({', '.join(self.names)}) each "
                f"row is for; its columns are {', '.join(row)}. Add it."
            )
        name = row[COLUMN]
        if name not in self.names:
            raise ValueError(
                f"{where}: a row is for the environment {name!r}, which is none of {', '.join(self.names)}. Name one of "
                "them in its column, or pass that environment too."
            )
        return name, {column: value for column, value in row.items() if column != COLUMN}
