"""Plays the groups of a generation batch, and replaces zero-advantage groups by fresh ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import gather_object
from trl import GRPOTrainer

from agile_trainers.rollout.engine import EpisodeSpec
from agile_trainers.rollout.seeds import training_specs
from agile_trainers.step.mixture import with_names
from agile_trainers.step.reward import not_scored, totals
from agile_trainers.step.task_sampling import Draw, TaskSampling
from agile_trainers.trainers.setup import RunSetup
from agile_trainers.types import Trajectory, TurnBatch

Row = dict[str, Any]
Play = Callable[[list[EpisodeSpec]], list[Trajectory]]
Score = Callable[[list[Row], list[Trajectory]], torch.Tensor]
"""Computes rewards (B, F) of all processes; every process passes equally many rows."""
ZeroAdvantage = Callable[[TurnBatch], list[bool]]
"""Returns for each group of all processes whether it is a zero-advantage group, from the batch of this process."""
Collate = Callable[[list[Trajectory], torch.Tensor], TurnBatch]
"""Makes the batch of this process, from its episodes and the rewards (B, F) of all."""


@dataclass
class PlayedGroups:
    """The episodes of a generation batch, of this process unless stated otherwise."""

    trajectories: list[Trajectory]
    rows: list[Row]
    """The row of each episode, for reward functions."""
    indices: list[int]
    """Index of each episode among those that all processes played for the batch: its group times the members of a group,
    and its place in the group. Groups that replace others have new indices."""
    rewards: torch.Tensor
    """(B, F), of all processes."""
    batch: TurnBatch
    """The episodes and rewards as tensors."""
    discarded: list[tuple[int, Trajectory]] = field(default_factory=list)
    """Index and episode of the groups that were replaced."""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class _Round:
    """Episodes that are played together."""

    places: list[int]
    """Place of each in the generation batch of all processes."""
    specs: list[EpisodeSpec]
    rows: list[Row]
    names: list[str | None]
    """Name of each group's task, of all groups; None without one."""
    draw: Draw


class GroupRollouts:
    """Plays the episodes of generation batches.

    Without ``resample_zero_advantage_groups`` a batch is played once. With it, zero-advantage groups are played again from
    fresh starts, up to that many times; those that are left then stay (dynamic sampling, DAPO: Yu et al.,
    2025, https://huggingface.co/papers/2503.14476, which samples until the batch is full). All processes do so together;
    each plays the episodes of its own places. Rows, environments and seeds of fresh groups come from the run's
    :class:`~agile_trainers.step.task_sampling.TaskSampling`.

    Args:
        trainer: After TRL's own constructor.
        setup: The run's.
        play: Plays episodes with the current policy.
        score: Calls the trainer's reward functions.
        collate: Makes a batch.
        zero_advantage: Applies the credit rule.
    """

    def __init__(
        self,
        trainer: GRPOTrainer,
        setup: RunSetup,
        play: Play,
        score: Score,
        collate: Collate,
        zero_advantage: ZeroAdvantage,
    ) -> None:
        self._trainer: Any = trainer
        self._setup, self._play, self._score, self._collate = setup, play, score, collate
        self._zero_advantage = zero_advantage
        args = trainer.args
        self._members, self._limit = setup.args.num_generations, setup.args.resample_zero_advantage_groups
        self._groups = args.generation_batch_size // self._members
        self.tasks = TaskSampling(setup.args, setup.tasks, self._groups)
        self.discarded = 0
        """Episodes that the run played and discarded so far, over all processes."""

    @property
    def _watches(self) -> bool:
        """True if something depends on which groups have an advantage."""
        return bool(self._limit or self.tasks.adaptive or self._setup.args.task_column)

    def play(self, inputs: list[Row], generation: int, columns: dict[str, list[Any]]) -> PlayedGroups:
        """Play and score a generation batch.

        Args:
            inputs: Rows of this process, in TRL's order: one for each episode.
            generation: Index of the batch in the run.
            columns: TRL's store for ``log_extra``. Afterwards it holds the values of the episodes that are returned.
        """
        rank, size = self._trainer.accelerator.process_index, len(inputs)
        places = list(range(rank * size, (rank + 1) * size))
        first = self._round(inputs, generation, 0, places, rank * size)
        trajectories = self._play(first.specs)
        rewards = self._score(first.rows, trajectories)
        batch = PlayedGroups(trajectories, first.rows, places, rewards, self._collate(trajectories, rewards))
        if not self._watches:
            return batch
        zero = self._zero_advantage(batch.batch)
        self.tasks.observe(first.draw.tasks, first.names, zero)
        if self._limit:
            known = {name: values[:size] for name, values in columns.items()}
            mean = totals(rewards, self._trainer.reward_weights).nanmean().item()
            metrics = {"resampling/first_zero_advantage": sum(zero) / len(zero), "resampling/first_reward": mean}
            replaced = 0
            for attempt in range(1, self._limit + 1):
                again = [group for group, none in enumerate(zero) if none]
                if not again:
                    break
                replaced += len(again)
                columns.clear()
                zero = self._replace(batch, again, inputs, generation, attempt, columns, known)
            columns.clear()
            columns.update(known)
            self.discarded += replaced * self._members
            metrics["resampling/groups"] = float(replaced)
            metrics["resampling/zero_advantage"] = sum(zero) / len(zero)
            episodes = self._groups * self._members * (generation + 1)
            batch.metrics = metrics | {"episodes_played": float(episodes + self.discarded)}
        batch.metrics |= self.tasks.metrics()
        return batch

    def _round(self, inputs: list[Row], generation: int, attempt: int, places: list[int], first: int) -> _Round:
        """Draw the episodes of some places of this process."""
        setup, trainer, members = self._setup, self._trainer, self._members
        draw = self.tasks.draw(generation, attempt)
        if draw.rows is not None:
            drawn = {group: trainer.train_dataset[draw.rows[group]] for group in {place // members for place in places}}
            inputs = [drawn[place // members] for place in places]
        else:
            inputs = [inputs[place - first] for place in places]
        specs = training_specs(
            trainer.args.seed,
            generation,
            [dict(row) if setup.rows_are_options else None for row in inputs],
            places,
            members,
            setup.mixture,
            environments=draw.environments,
            seeds=draw.seeds,
            offset=attempt * self._groups,
        )
        rows = with_names(inputs, specs)
        return _Round(places, specs, rows, self._names(draw, places, rows), draw)

    def _names(self, draw: Draw, places: list[int], rows: list[Row]) -> list[str | None]:
        """Return the name of each group's task, of all groups; None for those that are not played now."""
        column = self._setup.args.task_column
        if column is None or draw.tasks is not None:
            return self.tasks.names_of(draw)
        own = {place // self._members: str(row[column]) for place, row in zip(places, rows, strict=True)}
        everywhere = {group: name for part in gather_object([own]) for group, name in part.items()}
        return [everywhere.get(group) for group in range(self._groups)]

    def _replace(
        self,
        batch: PlayedGroups,
        again: list[int],
        inputs: list[Row],
        generation: int,
        attempt: int,
        columns: dict[str, list[Any]],
        known: dict[str, list[Any]],
    ) -> list[bool]:
        """Replace groups of a batch in place, and return which groups are zero-advantage groups now."""
        accelerator, members, size = self._trainer.accelerator, self._members, len(inputs)
        rank = accelerator.process_index
        first = rank * size
        by_rank = list(_places(again, members, size, accelerator.num_processes))
        fresh = self._round(inputs, generation, attempt, by_rank[rank], first)
        played = self._play(fresh.specs)
        # TRL gathers the same number of rewards from every process.
        missing = max(map(len, by_rank)) - len(played)
        filler = [dict(inputs[0])] * missing
        scored = self._score([*fresh.rows, *filler], [*played, *(not_scored() for _ in range(missing))])
        parts = scored.view(accelerator.num_processes, -1, scored.size(1))
        batch.rewards = batch.rewards.clone()
        for part, places in zip(parts, by_rank, strict=True):
            batch.rewards[places] = part[: len(places)]
        for number, (place, trajectory) in enumerate(zip(fresh.places, played, strict=True)):
            slot = place - first
            batch.discarded.append((batch.indices[slot], batch.trajectories[slot]))
            batch.trajectories[slot], batch.rows[slot] = trajectory, fresh.rows[number]
            batch.indices[slot] = place + attempt * self._groups * members
            for name in known.keys() | columns.keys():
                values = columns.get(name)
                known.setdefault(name, [None] * size)[slot] = None if values is None else values[number]
        batch.batch = self._collate(batch.trajectories, batch.rewards)
        zero = self._zero_advantage(batch.batch)
        tasks = fresh.draw.tasks
        self.tasks.observe(
            None if tasks is None else [tasks[group] for group in again],
            [fresh.names[group] for group in again],
            [zero[group] for group in again],
        )
        return zero

    # ---------------------------------------------------------------------------------------------------- checkpoint

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs, as JSON."""
        return {"counts": self.tasks.state(), "discarded": self.discarded}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state`; of a checkpoint without one, nothing was counted."""
        self.tasks.restore(state.get("counts", {}))
        self.discarded = int(state.get("discarded", 0))


def _places(groups: Sequence[int], members: int, size: int, processes: int) -> Iterator[list[int]]:
    """Yield for each process the places of some groups' episodes that are its own.

    Args:
        groups: Indices of groups, ascending.
        members: Members of a group.
        size: Episodes of a process.
        processes: Number of processes.
    """
    places = [group * members + member for group in groups for member in range(members)]
    for rank in range(processes):
        yield [place for place in places if place // size == rank]
