"""Plays the groups of a generation batch, and replaces zero-advantage groups by fresh ones, or failures by successes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator

from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.seeds import COLUMN
from agile_trainers.rollout.spec import EpisodeSpec
from agile_trainers.sampling.sampler import RolloutSampler
from agile_trainers.step.ahead import BatchesAhead
from agile_trainers.step.credit import CreditAssignment, Judged
from agile_trainers.step.draws import EpisodeDraws, Row
from agile_trainers.step.reward import Rewards, not_scored
from agile_trainers.step.successes import Successes
from agile_trainers.step.token_batches import within_memory
from agile_trainers.train_batch import own_rows
from agile_trainers.types import Trajectory, TurnBatch


class EpisodeRunner:
    """Plays episodes with the current policy, and measures the time.

    Args:
        engine: The rollout engine.
        sampler: Makes the generator.
    """

    def __init__(self, engine: RolloutEngine, sampler: RolloutSampler) -> None:
        self._engine, self._sampler = engine, sampler
        self.seconds = 0.0
        """Wall time of all episodes that were played, since the caller set it to 0."""

    def play(self, specs: list[EpisodeSpec]) -> list[Trajectory]:
        """Play episodes, again from their start with fewer at the same time whenever memory runs out."""
        with self.timed(), self._sampler.generators() as make:
            # No rank waits for another here, so each decides by itself whether to play again.
            return within_memory(lambda: self._engine.run(specs, make()), lambda: self._sampler.halve(len(specs)))

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time of a block as that of playing."""
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started


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
    version: int | None = None
    """Version of the policy that played them, where it is not the current one; see
    :class:`~agile_trainers.step.ahead.BatchesAhead`."""
    judged: Judged | None = None
    """Credit of these episodes, where it was computed to choose them."""
    discarded: list[tuple[int, Trajectory]] = field(default_factory=list)
    """Index and episode of the groups that were replaced."""
    metrics: dict[str, float] = field(default_factory=dict)
    own: tuple[list[Trajectory], torch.Tensor] | None = None
    """:attr:`trajectories` and :attr:`rewards` before successes took places among them; None if none did."""


class GroupRollouts:
    """Plays the episodes of generation batches.

    Without ``resample_zero_advantage_groups`` a batch is played once. With it, zero-advantage groups are played again from
    fresh starts, up to that many times; those that are left then stay (dynamic sampling, DAPO: Yu et al.,
    2025, https://huggingface.co/papers/2503.14476, which samples until the batch is full). All processes do so together;
    each plays the episodes of its own places.

    Args:
        args: A ``MultiTurnConfig`` for episodes.
        accelerator: The trainer's.
        draws: Draws the episodes.
        runner: Plays episodes.
        rewards: Rewards them.
        collate: Makes their batch.
        credit: Applies the credit rule, which says which groups are zero-advantage groups.
        ahead: Plays batches ahead of their updates, with ``batches_ahead``; None without.
        successes: Keeps successes, with ``replay_successes``; None without.
    """

    def __init__(
        self,
        args: Any,
        accelerator: Accelerator,
        draws: EpisodeDraws,
        runner: EpisodeRunner,
        rewards: Rewards,
        collate: Callable[[list[Trajectory]], TurnBatch],
        credit: CreditAssignment,
        ahead: BatchesAhead | None = None,
        successes: Successes | None = None,
    ) -> None:
        self._args, self._accelerator, self._draws = args, accelerator, draws
        self._runner, self._rewards, self._collate, self._credit = runner, rewards, collate, credit
        self._members, self._limit = args.num_generations, args.resample_zero_advantage_groups
        self._groups = args.generation_batch_size // self._members
        self.tasks, self.ahead, self.successes = draws.tasks, ahead, successes
        self.discarded = 0
        """Episodes that the run played and discarded so far, over all processes."""

    def given(self, trajectories: list[Trajectory]) -> PlayedGroups:
        """Reward the episodes of a generation batch that the caller played, of this process.

        Their dataset row has an empty prompt where an episode had none, and names the environment in a run of several.
        """
        rows: list[Row] = []
        for trajectory in trajectories:
            row = dict(trajectory.options or {"prompt": [{"role": "user", "content": ""}]})
            name = trajectory.environment_name
            rows.append(row if name is None else {**row, COLUMN: name})
        return self._rewarded(trajectories, rows)

    def play(self, inputs: list[Row], generation: int, last: int) -> PlayedGroups:
        """Play and reward a generation batch.

        Args:
            inputs: Rows of this process, in TRL's order: one for each episode.
            generation: Index of the batch in the run.
            last: Index of the run's last one.
        """
        played = self._play(inputs, generation, last)
        if self.successes is not None:
            self._replay(played, self.successes)
        return played

    def _play(self, inputs: list[Row], generation: int, last: int) -> PlayedGroups:
        if self.ahead is not None:
            with self._runner.timed():
                first, trajectories, version = self.ahead.play(generation, last)
            busy = self.ahead.metrics()
            played = self._rewarded(trajectories, first.rows)
            played.metrics |= busy
            played.version = None if version == generation else version
        else:
            first = self._draws.batch(inputs, generation)
            played = self._rewarded(self._runner.play(first.specs), first.rows)
        if not (self._limit or self.tasks.adaptive or self._args.task_column):
            return played  # nothing depends on which groups have an advantage
        played.judged = self._credit.judge(played.batch)
        self.tasks.observe(first.draw.tasks, first.names, played.judged.zero.tolist())
        if self._limit:
            self._resample(played, inputs, generation)
        played.metrics |= self.tasks.metrics()
        return played

    def _replay(self, played: PlayedGroups, successes: Successes) -> None:
        """Let successes take their places, in place."""
        if played.judged is None:
            played.judged = self._credit.judge(played.batch)
        totals, zero = self._rewards.totals(played.rewards), played.judged.zero.tolist()
        taken, metrics = successes.exchange(played.trajectories, played.rewards, totals, zero)
        played.metrics |= metrics
        if not taken.rewards:
            return
        played.own, played.judged = (played.trajectories, played.rewards), None
        played.trajectories, played.rewards = list(played.trajectories), played.rewards.clone()
        for place, trajectory in taken.episodes.items():
            played.trajectories[place] = trajectory
        for place, rewards in taken.rewards.items():
            played.rewards[place] = played.rewards.new_tensor(rewards)
        played.batch = self._batch(played.trajectories, played.rewards)

    def _rewarded(self, trajectories: list[Trajectory], rows: list[Row]) -> PlayedGroups:
        own = own_rows(self._accelerator, len(trajectories))
        rewards = self._rewards.of(rows, trajectories)
        return PlayedGroups(
            trajectories, rows, list(range(own.start, own.stop)), rewards, self._batch(trajectories, rewards)
        )

    def _batch(self, trajectories: list[Trajectory], rewards: torch.Tensor) -> TurnBatch:
        """Collate this process's episodes, and add to their rewards those of functions and judges.

        An episode that nothing rewards is left out of every statistic, as in TRL.
        """
        own = own_rows(self._accelerator, len(trajectories))
        batch, added = self._collate(trajectories), self._rewards.added(rewards)[own]
        rows = torch.arange(len(added), device=added.device)
        last = (batch.turn_mask.sum(dim=1) - 1).clamp(min=0)
        batch.turn_rewards[rows, last] += added * batch.turn_mask.any(dim=1)
        for row, of_turns in enumerate(self._rewards.by_turn(trajectories)):
            batch.turn_rewards[row, : len(of_turns)] += torch.tensor(of_turns, device=added.device)
        batch.failed |= self._rewards.totals(rewards)[own].isnan().to(batch.failed.device)
        return batch

    def _resample(self, played: PlayedGroups, inputs: list[Row], generation: int) -> None:
        """Replace zero-advantage groups in place, until there are none or the limit is reached."""
        assert played.judged is not None
        columns, zero = self._rewards.pending_columns, played.judged.zero
        # The values that functions logged for the episodes that stay.
        known = {name: values[: len(inputs)] for name, values in columns.items()}
        played.metrics = {
            "resampling/first_zero_advantage": zero.double().mean().item(),
            "resampling/first_reward": self._rewards.totals(played.rewards).nanmean().item(),
        }
        replaced = 0
        for attempt in range(1, self._limit + 1):
            again = played.judged.zero.nonzero()[:, 0].tolist()
            if not again:
                break
            replaced += len(again)
            columns.clear()
            self._replace(played, again, inputs, generation, attempt, known)
        columns.clear()
        columns.update(known)
        self.discarded += replaced * self._members
        episodes = self._groups * self._members * (generation + 1)
        played.metrics |= {
            "resampling/groups": float(replaced),
            "resampling/zero_advantage": played.judged.zero.double().mean().item(),
            "episodes_played": float(episodes + self.discarded),
        }

    def _replace(
        self,
        played: PlayedGroups,
        again: list[int],
        inputs: list[Row],
        generation: int,
        attempt: int,
        known: dict[str, list[Any]],
    ) -> None:
        """Replace groups of a batch in place, with what functions logged for them, and judge it anew."""
        processes, size = self._accelerator.num_processes, len(inputs)
        first = own_rows(self._accelerator, size).start
        by_rank = list(_places(again, self._members, size, processes))
        fresh = self._draws.again(inputs, generation, attempt, by_rank[self._accelerator.process_index])
        episodes = self._runner.play(fresh.specs)
        # TRL gathers the same number of rewards from every process.
        missing = max(map(len, by_rank)) - len(episodes)
        filler = [dict(inputs[0])] * missing
        scored = self._rewards.of([*fresh.rows, *filler], [*episodes, *(not_scored() for _ in range(missing))])
        parts = scored.view(processes, -1, scored.size(1))
        played.rewards = played.rewards.clone()
        for part, places in zip(parts, by_rank, strict=True):
            played.rewards[places] = part[: len(places)]
        columns = self._rewards.pending_columns
        for number, (place, trajectory) in enumerate(zip(fresh.places, episodes, strict=True)):
            slot = place - first
            played.discarded.append((played.indices[slot], played.trajectories[slot]))
            played.trajectories[slot], played.rows[slot] = trajectory, fresh.rows[number]
            played.indices[slot] = place + attempt * self._groups * self._members
            # A function may log a column for some episodes only: the others have None there.
            for name in known.keys() | columns.keys():
                values = columns.get(name)
                known.setdefault(name, [None] * size)[slot] = None if values is None else values[number]
        played.batch = self._batch(played.trajectories, played.rewards)
        # The whole batch, since a rule may compare groups (scale_rewards="batch" divides by one spread), and since the last
        # judgement is the credit of the update. It takes milliseconds, beside playing.
        played.judged = self._credit.judge(played.batch)
        tasks, zero = fresh.draw.tasks, played.judged.zero.tolist()
        self.tasks.observe(
            None if tasks is None else [tasks[group] for group in again],
            [fresh.names[group] for group in again],
            [zero[group] for group in again],
        )

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
