"""Plays generation batches ahead of the updates that train on them (``batches_ahead``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from datasets import IterableDataset
from peft import PeftModel

from agile_trainers.adapters.snapshots import Snapshots
from agile_trainers.checkpoints.record import AheadState
from agile_trainers.rollout.engine import EpisodeSpec, Rollout, RolloutEngine
from agile_trainers.rollout.replay import RecordedAnswer, RecordedEpisode
from agile_trainers.sampling.sampler import RolloutSampler
from agile_trainers.step.token_batches import within_memory
from agile_trainers.types import Trajectory


class Drawn(Protocol):
    """A generation batch before it is played."""

    specs: list[EpisodeSpec]
    """The episodes of this process."""


@dataclass
class OpenBatch:
    """A generation batch that is being played, or waits to be trained on."""

    version: int
    """Version of the policy that plays it: the number of generation batches that it was trained on."""
    drawn: Any
    """What :class:`BatchesAhead` drew for it."""
    keys: range
    """Keys of its episodes."""


class BatchesAhead:
    """Keeps ``ahead`` generation batches under way beyond the one that is trained on.

    When the update of batch ``k`` is due, every batch up to ``k + ahead`` that has not begun begins, with the policy as it
    is then. So batch ``k`` is played, to its end, by the policy that was trained on ``k - ahead`` batches; the first ones by
    the policy that the run began with. Nothing is discarded, and no batch trains early: membership, order and staleness do
    not depend on timing.

    Args:
        ahead: Number of batches.
        engine: Plays the episodes.
        sampler: Makes the generators.
        snapshots: Keeps the policies that play.
        draw: Draws a generation batch, given its index.
        last: Returns the index of the run's last generation batch.
    """

    def __init__(
        self,
        ahead: int,
        engine: RolloutEngine,
        sampler: RolloutSampler,
        snapshots: Snapshots,
        draw: Callable[[int], Drawn],
        last: Callable[[], int],
    ) -> None:
        self._ahead, self._engine, self._sampler, self._snapshots = ahead, engine, sampler, snapshots
        self._draw, self._last = draw, last
        self._resources = ExitStack()
        self._rollout: Rollout | None = None
        self._open: dict[int, OpenBatch] = {}
        self._current = 0

    @property
    def versions(self) -> dict[int, int]:
        """Open generation batch to the version that plays it."""
        return {generation: batch.version for generation, batch in self._open.items()}

    def play(self, generation: int) -> tuple[Any, list[Trajectory], int]:
        """Play a generation batch to its end, and those after it as far as they come meanwhile.

        Args:
            generation: Its index: the number of generation batches that the policy was trained on.

        Returns:
            What was drawn for it, its episodes, and the version that played it.
        """
        self._begin(generation)
        batch = self._open[generation]
        rollout = self._rollout
        assert rollout is not None
        with self._sampler.generators(versions=(self._version_of, self._holding)) as make:
            trajectories = within_memory(
                lambda: rollout.play(batch.keys, make()), lambda: self._sampler.halve(len(batch.keys))
            )
        del self._open[generation]
        for trajectory in trajectories:
            trajectory.version = batch.version
        return batch.drawn, trajectories, batch.version

    def _begin(self, generation: int) -> None:
        """Let the batches begin that are due."""
        self._current = generation
        if self._rollout is None:
            self._rollout = self._resources.enter_context(self._engine.open(keep_instances=False))
        due = range(max(self._open, default=generation - 1) + 1, min(generation + self._ahead, self._last()) + 1)
        for index in due:
            self._admit(index, generation)
        if any(batch.version == generation for index, batch in self._open.items() if index > generation):
            self._snapshots.take(generation)
        self._snapshots.keep({batch.version for batch in self._open.values()})

    def _admit(self, generation: int, version: int, recorded: Sequence[RecordedEpisode] | None = None) -> None:
        assert self._rollout is not None
        drawn = self._draw(generation)
        size = len(drawn.specs)
        batch = OpenBatch(version, drawn, range(generation * size, (generation + 1) * size))
        self._open[generation] = batch
        self._rollout.admit(batch.keys, drawn.specs, recorded)

    def _version_of(self, key: int) -> int:
        return next(batch.version for batch in self._open.values() if key in batch.keys)

    def _holding(self, version: int) -> Any:
        return self._snapshots.holding(None if version == self._current else version)

    def close(self) -> None:
        """Give up what is under way."""
        self._resources.close()
        self._rollout = None
        self._open.clear()
        self._snapshots.keep(())

    # ---------------------------------------------------------------------------------------------------- checkpoint

    def state(self) -> AheadState:
        """Return the open batches of this process, and the policies that play them."""
        rollout = self._rollout
        batches = [
            {
                "generation": generation,
                "version": batch.version,
                "episodes": [asdict(record) for record in rollout.record(batch.keys)],
            }
            for generation, batch in self._open.items()
            if rollout is not None
        ]
        needed = {batch.version for batch in self._open.values()}
        weights = self._snapshots.weights
        return AheadState(batches, {version: weights[version] for version in sorted(needed)})

    def restore(self, state: AheadState) -> None:
        """Play the open batches of a checkpoint on, from the answers that it holds."""
        self.close()
        if not state.batches:
            return
        self._rollout = self._resources.enter_context(self._engine.open(keep_instances=False))
        self._snapshots.restore(state.weights)
        for batch in state.batches:
            self._admit(batch["generation"], batch["version"], list(_recorded(batch["episodes"])))


def check_plays_ahead(model: torch.nn.Module, dataset: Any, engine: RolloutEngine) -> None:
    """Check that a run can play batches ahead.

    Args:
        model: The policy, unwrapped.
        dataset: The rows.
        engine: Plays the episodes.

    Raises:
        ValueError: If the model is trained whole, the rows cannot be read in any order, or an agent plays.
    """
    fix = "Leave batches_ahead unset."
    if not isinstance(model, PeftModel):
        raise ValueError(
            "batches_ahead keeps copies of the adapter that plays, and this model is trained whole. Pass a "
            "peft_config, or leave batches_ahead unset."
        )
    if isinstance(dataset, IterableDataset):
        raise ValueError(f"batches_ahead reads rows before their update, and an IterableDataset has one order. {fix}")
    if agents := [name for name in engine.pool.factories if engine.pool.agent(name) is not None]:
        raise ValueError(
            f"batches_ahead cannot pause an agent{'' if agents == [None] else f' ({agents[0]!r})'}, whose clients would "
            f"wait through an update. {fix}"
        )


def _recorded(episodes: Sequence[Mapping[str, Any]]) -> Iterator[RecordedEpisode]:
    for episode in episodes:
        yield RecordedEpisode([RecordedAnswer(**answer) for answer in episode["answers"]], episode["noise"])


class RowOrder:
    """The order in which a run reads the rows of its data set, as far ahead as one asks.

    Args:
        sampler: Makes TRL's sampler, as it is before the first epoch.
        batch: Episodes of a generation batch, over all processes.
        repeats: Number of times in a row that a generation batch comes.
    """

    def __init__(self, sampler: Callable[[], Any], batch: int, repeats: int) -> None:
        self._make, self._batch, self._repeats = sampler, batch, repeats
        self._sampler, self._epoch = sampler(), -1
        self._indices: list[int] = []

    def of(self, generation: int) -> list[int]:
        """Return the rows of a generation batch of all processes, in order."""
        step = self._batch * self._repeats
        epoch, place = divmod(generation, len(self._sampler) // step)
        if epoch < self._epoch:
            self._sampler, self._epoch = self._make(), -1
        while self._epoch < epoch:
            self._indices, self._epoch = list(self._sampler), self._epoch + 1
        return self._indices[place * step : place * step + self._batch]
