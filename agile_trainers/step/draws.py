"""Draws the episodes of generation batches: their rows, environments and seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from agile_trainers.rollout.seeds import Mixture, training_specs, with_names
from agile_trainers.rollout.spec import EpisodeSpec
from agile_trainers.step.task_sampling import Draw, TaskSampling
from agile_trainers.train_batch import own_rows

Row = dict[str, Any]


@dataclass
class Drawn:
    """Episodes of this process before they are played, together."""

    places: list[int]
    """Place of each in the generation batch of all processes."""
    specs: list[EpisodeSpec]
    rows: list[Row]
    names: list[str | None]
    """Name of each group's task, of all groups; None without one."""
    draw: Draw


class EpisodeDraws:
    """Draws the episodes of a run.

    Args:
        args: A ``MultiTurnConfig`` for episodes.
        accelerator: The trainer's.
        tasks: Draws the tasks of groups.
        dataset: The rows that tasks are drawn from.
        rows_are_options: True if ``reset`` gets the rows.
        mixture: The environments of a run of several; None for one.
        placed: Lets an expert take its places, given specifications and their places; None without one.
    """

    def __init__(
        self,
        args: Any,
        accelerator: Accelerator,
        tasks: TaskSampling,
        *,
        dataset: Any,
        rows_are_options: bool,
        mixture: Mixture | None,
        placed: Callable[[list[EpisodeSpec], list[int]], list[EpisodeSpec]] | None = None,
    ) -> None:
        self._args, self._accelerator, self.tasks = args, accelerator, tasks
        self._dataset, self._rows_are_options, self._mixture = dataset, rows_are_options, mixture
        self._members, self._placed = args.num_generations, placed
        self._groups = args.generation_batch_size // self._members

    def batch(self, inputs: Sequence[Row], generation: int) -> Drawn:
        """Draw a generation batch.

        Args:
            inputs: Rows of this process, in TRL's order: one for each episode.
            generation: Index of the batch in the run.
        """
        own = own_rows(self._accelerator, len(inputs))
        return self.again(inputs, generation, 0, list(range(own.start, own.stop)))

    def batch_of(self, rows: Sequence[int], generation: int) -> Drawn:
        """Draw a generation batch, given the indices of the rows of all processes."""
        own = rows[own_rows(self._accelerator, len(rows) // self._accelerator.num_processes)]
        return self.batch([self._dataset[row] for row in own], generation)

    def again(self, inputs: Sequence[Row], generation: int, attempt: int, places: list[int]) -> Drawn:
        """Draw the episodes of some places of this process.

        Args:
            inputs: Rows of this process, for the whole batch.
            generation: Index of the batch in the run.
            attempt: 0 for the batch itself, n for the groups that replace others for the n-th time.
            places: Their places in the generation batch of all processes.
        """
        members, draw = self._members, self.tasks.draw(generation, attempt)
        if draw.rows is not None:
            drawn = {group: self._dataset[draw.rows[group]] for group in {place // members for place in places}}
            inputs = [drawn[place // members] for place in places]
        else:
            first = own_rows(self._accelerator, len(inputs)).start
            inputs = [inputs[place - first] for place in places]
        specs = training_specs(
            self._args.seed,
            generation,
            [dict(row) if self._rows_are_options else None for row in inputs],
            places,
            members,
            self._mixture,
            environments=draw.environments,
            offset=attempt * self._groups,
        )
        if self._placed is not None:
            specs = self._placed(specs, places)
            inputs = [{**row, **(spec.options or {})} for row, spec in zip(inputs, specs, strict=True)]
        rows = with_names(inputs, specs)
        return Drawn(places, specs, rows, self._names(draw, places, rows), draw)

    def _names(self, draw: Draw, places: list[int], rows: list[Row]) -> list[str | None]:
        """Return the name of each group's task, of all groups; None for those that are not played now."""
        column = self._args.task_column
        if column is None or draw.tasks is not None:
            return self.tasks.names_of(draw)
        own = {place // self._members: str(row[column]) for place, row in zip(places, rows, strict=True)}
        everywhere = {group: name for part in gather_object([own]) for group, name in part.items()}
        return [everywhere.get(group) for group in range(self._groups)]
