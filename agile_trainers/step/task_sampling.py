"""Draws the tasks of groups: uniformly, or by how often groups of the task have an advantage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import IterableDataset
from transformers.utils import logging

from agile_trainers.config.multi_turn import MultiTurnConfig
from agile_trainers.rollout.seeds import Mixture, systematic_sample

logger = logging.get_logger(__name__)

HALF_LIFE = 8
"""Groups of a task after which an earlier group of it counts half, as in AgileRL's ``TaskAssigner``."""
_DECAY = 0.5 ** (1 / HALF_LIFE)
_STREAM = 3
"""First key of the random stream that tasks are drawn from."""
_LOGGED = 32
"""Largest number of tasks whose shares are logged one by one."""


@dataclass(frozen=True)
class TaskPool:
    """The tasks that groups can start from: rows or sets of rows, or environments."""

    size: int
    """Number of tasks."""
    names: tuple[str, ...] = ()
    """Names of the tasks; empty where their indices name them."""
    task_of: np.ndarray | None = None
    """(rows,) int64, the task of each row; None for environments."""

    def name(self, task: int) -> str:
        """Return the name of a task."""
        return self.names[task] if self.names else str(task)


@dataclass
class Draw:
    """The items drawn for the groups of a generation batch. Each list has one entry per group, or is None."""

    tasks: list[int] | None = None
    rows: list[int] | None = None
    """Indices of dataset rows."""
    environments: list[str] | None = None


def task_pool(args: MultiTurnConfig, dataset: Any, mixture: Mixture | None) -> TaskPool | None:
    """Make the pool that tasks are drawn from, where the options need one.

    Args:
        args: The trainer's.
        dataset: Its ``train_dataset``; None without rows.
        mixture: The environments of a run of several; None for one.

    Returns:
        The pool; None if every group has a seed of its own, or TRL's order of the rows decides.

    Raises:
        ValueError: For options that have no effect on these rows, or that need others.
    """
    adaptive = args.task_sampling == "adaptive"
    if args.task_column is not None and dataset is None:
        raise ValueError(
            f"task_column={args.task_column!r} names a column of train_dataset, and there is none. Pass train_dataset, or "
            "leave task_column unset."
        )
    if dataset is not None:
        return _rows(args, dataset, adaptive)
    if mixture is not None:
        return TaskPool(len(mixture.names), mixture.names)
    if adaptive:
        raise ValueError(
            "task_sampling='adaptive' needs tasks that are played again and again, and without a train_dataset every group "
            "has a seed of its own. Pass train_dataset, or several environments."
        )
    return None


def dataset_columns(dataset: Any) -> list[str]:
    """Return the names of a data set's columns; of a stream that does not know them, those of its first row."""
    names = getattr(dataset, "column_names", None)
    return list(names) if names is not None else list(next(iter(dataset), {}))


def _rows(args: MultiTurnConfig, dataset: Any, adaptive: bool) -> TaskPool | None:
    options = {"task_sampling": adaptive, "resample_zero_advantage_groups": args.resample_zero_advantage_groups > 0}
    used = [f"{name}={getattr(args, name)!r}" for name, on in options.items() if on]
    if used and isinstance(dataset, IterableDataset):
        raise ValueError(
            f"{used[0]} draws rows of train_dataset by their index, and a stream has none. Pass a Dataset (for example "
            "Dataset.from_list(list(stream.take(n)))), or leave the option unset."
        )
    if adaptive and not args.shuffle_dataset:
        raise ValueError(
            "shuffle_dataset=False has no effect with task_sampling='adaptive', which draws the rows. Leave it unset."
        )
    column = args.task_column
    if column is not None and column not in (there := dataset_columns(dataset)):
        raise ValueError(f"task_column={column!r} is no column of train_dataset; it has {', '.join(there)}.")
    if not used:
        return None
    number = len(dataset)
    if column is None:
        return TaskPool(number, task_of=np.arange(number))
    names, task_of = np.unique([str(value) for value in dataset.with_format(None)[column][:]], return_inverse=True)
    return TaskPool(len(names), tuple(names.tolist()), task_of)


def _rows_of(tasks: np.ndarray, task_of: np.ndarray, random: np.random.Generator) -> list[int]:
    """Draw a row of each task; a task's rows repeat only once all of them are drawn."""
    rows = np.empty_like(tasks)
    for task in np.unique(tasks):
        places, own = np.flatnonzero(tasks == task), np.flatnonzero(task_of == task)
        rounds = -(-len(places) // len(own))
        rows[places] = np.concatenate([random.permutation(own) for _ in range(rounds)])[: len(places)]
    return rows.tolist()


class TaskSampling:
    """Draws the tasks of a run, and counts how often their groups had an advantage.

    With ``task_sampling="adaptive"`` a task's weight is ``(informative + 1) / (observed + 2)``, whatever its number of rows
    (AgileRL's rule). ``observed`` counts the task's groups, ``informative`` those
    that were no zero-advantage groups; before each new group of the task both are multiplied by ``0.5 ** (1 / 8)``. A task
    that was not played yet has weight 1/2. Of the rows of a drawn task each is equally likely.

    The draw depends on the run's seed, the generation batch and these counts alone, which are the same on all processes.

    Args:
        args: The trainer's.
        pool: Of :func:`task_pool`.
        groups: Number of groups of one generation batch, over all processes.
    """

    def __init__(self, args: MultiTurnConfig, pool: TaskPool | None, groups: int) -> None:
        self._pool, self._groups, self._seed = pool, groups, args.seed
        self.adaptive = args.task_sampling == "adaptive"
        size = pool.size if pool is not None and self.adaptive else 0
        self._informative, self._observed = np.zeros(size), np.zeros(size)
        self._played, self._zero = Counter[str | None](), Counter[str | None]()
        """Groups of the generation batch, and zero-advantage groups among them, by the name of their task."""

    @property
    def weights(self) -> np.ndarray:
        """(tasks,) float64, the factor of each task's weight."""
        return (self._informative + 1) / (self._observed + 2)

    def draw(self, generation: int, attempt: int = 0) -> Draw:
        """Draw a task for each group of a generation batch by systematic sampling, and a row of the task.

        Args:
            generation: Index of the generation batch in the run.
            attempt: 0 for the batch itself, n for the groups that replace others for the n-th time.

        Returns:
            The draw; nothing where the batch takes TRL's order of the rows, or every group has a seed of its own.
        """
        pool = self._pool
        if pool is None or not (self.adaptive or attempt):
            return Draw()
        entropy = np.random.SeedSequence((self._seed, _STREAM, generation, attempt))
        random = np.random.Generator(np.random.Philox(entropy))
        if pool.task_of is not None and not self.adaptive:  # each row is equally likely
            rows = systematic_sample(np.ones(len(pool.task_of)), self._groups, random)
            return Draw(pool.task_of[rows].tolist(), rows.tolist())
        tasks = systematic_sample(self.weights if self.adaptive else np.ones(pool.size), self._groups, random)
        draw = Draw(tasks.tolist())
        if pool.task_of is not None:
            draw.rows = _rows_of(tasks, pool.task_of, random)
        else:
            draw.environments = [pool.names[task] for task in tasks]
        return draw

    def observe(self, tasks: Sequence[int] | None, names: Sequence[str | None], zero: Sequence[bool]) -> None:
        """Count groups that were played.

        Args:
            tasks: The task of each, as drawn; None where they were not drawn.
            names: The name of each one's task; None without a name.
            zero: Whether each is a zero-advantage group.
        """
        self._played.update(names)
        self._zero.update(name for name, none in zip(names, zero, strict=True) if none)
        if self.adaptive and tasks is not None:
            for task, none in zip(tasks, zero, strict=True):
                self._informative[task] = self._informative[task] * _DECAY + (not none)
                self._observed[task] = self._observed[task] * _DECAY + 1

    def names_of(self, draw: Draw) -> list[str | None]:
        """Return the name of each drawn group's task; None where tasks have none."""
        pool = self._pool
        if pool is None or draw.tasks is None or not pool.names:
            return [None] * self._groups
        return [pool.names[task] for task in draw.tasks]

    def metrics(self) -> dict[str, float]:
        """Compute the metrics of the generation batch, and forget its groups.

        Returns:
            ``tasks/<name>/share`` of the groups that were played, replaced ones included, and
            ``tasks/<name>/zero_advantage``, the share of zero-advantage groups among these, for up to 32 tasks with names;
            with adaptive sampling ``tasks/seen``, the share of tasks that were ever played, and ``tasks/effective``, the
            number of equally likely tasks that would be drawn as unevenly (the inverse of the sum of squared probabilities)
            over the number of tasks.
        """
        played, without, self._played, self._zero = self._played, self._zero, Counter(), Counter()
        metrics: dict[str, float] = {}
        if None not in played and len(played) <= _LOGGED:
            for name in sorted(name for name in played if name is not None):
                metrics[f"tasks/{name}/share"] = played[name] / played.total()
                metrics[f"tasks/{name}/zero_advantage"] = without[name] / played[name]
        if self.adaptive and self._pool is not None:
            weights = self.weights
            metrics["tasks/seen"] = float((self._observed > 0).mean())
            metrics["tasks/effective"] = float(weights.sum() ** 2 / (weights**2).sum() / len(weights))
        return metrics

    # ---------------------------------------------------------------------------------------------------- checkpoint

    def state(self) -> dict[str, list[float]]:
        """Return the counts as JSON: name of each task that was played to its ``[informative, observed]``."""
        if self._pool is None:
            return {}
        return {
            self._pool.name(task): [float(self._informative[task]), float(self._observed[task])]
            for task in np.flatnonzero(self._observed).tolist()
        }

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restore the counts of :meth:`state`. Tasks that the run no longer has are left out, with a warning."""
        if not self.adaptive or self._pool is None:
            return
        self._informative[:], self._observed[:] = 0, 0
        tasks = {self._pool.name(task): task for task in range(self._pool.size)}
        for name, (informative, observed) in state.items():
            if name in tasks:
                self._informative[tasks[name]], self._observed[tasks[name]] = informative, observed
        if gone := [name for name in state if name not in tasks]:
            logger.warning(
                "The checkpoint counted groups of %d tasks that this run does not have (%s, ...); they are forgotten.",
                len(gone), gone[0],
            )  # fmt: skip
