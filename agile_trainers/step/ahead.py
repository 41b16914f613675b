"""Plays generation batches ahead of the updates that train on them (``batches_ahead``)."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

import torch
from accelerate.utils import gather_object
from datasets import IterableDataset
from peft import PeftModel

from agile_trainers.adapters.copies import Snapshots
from agile_trainers.adapters.lora_settings import check_bias
from agile_trainers.adapters.roles import POLICY
from agile_trainers.checkpoints.record import AheadState
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.generators.base import Generator
from agile_trainers.rollout.replay import RecordedEpisode
from agile_trainers.rollout.rollout import Rollout
from agile_trainers.sampling.sampler import RolloutSampler, Versions
from agile_trainers.step.draws import Drawn
from agile_trainers.step.token_batches import within_memory
from agile_trainers.types import Trajectory

_Result = TypeVar("_Result")


@dataclass
class OpenBatch:
    """A generation batch that is being played, or waits to be trained on."""

    version: int
    """Version of the policy that plays it: the number of generation batches that it was trained on."""
    drawn: Drawn
    """The episodes that were drawn for it."""
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
    """

    def __init__(
        self,
        ahead: int,
        engine: RolloutEngine,
        sampler: RolloutSampler,
        snapshots: Snapshots,
        draw: Callable[[int], Drawn],
    ) -> None:
        self._ahead, self._engine, self._sampler, self._snapshots = ahead, engine, sampler, snapshots
        self._draw = draw
        self._resources = ExitStack()
        self._rollout: Rollout | None = None
        self._background: BackgroundRollout | None = None
        """Plays on during updates, where sampling needs nothing of this process."""
        self._open: dict[int, OpenBatch] = {}
        self._version: dict[int, int] = {}
        """Key of an episode to its version."""
        self._versions = Versions(self._version.__getitem__, self._playing, self._holding)
        self._current = 0
        self._waited = 0.0

    @property
    def versions(self) -> dict[int, int]:
        """Open generation batch to the version that plays it."""
        return {generation: batch.version for generation, batch in self._open.items()}

    def play(self, generation: int, last: int) -> tuple[Drawn, list[Trajectory], int]:
        """Play a generation batch to its end, and those after it as far as they come meanwhile.

        Args:
            generation: Its index: the number of generation batches that the policy was trained on.
            last: Index of the run's last generation batch.

        Returns:
            What was drawn for it, its episodes, and the version that played it.
        """
        if self._rollout is None:
            self._engine.busy()  # what was before says nothing of the first batch
        started = time.perf_counter()
        with self._engine.waiting.active():
            self._begin(generation, last)
            batch = self._open[generation]
            trajectories = self._in_background(batch.keys) if self._sampler.overlaps else self._paused(batch.keys)
        self._waited = time.perf_counter() - started
        del self._open[generation]
        for key, trajectory in zip(batch.keys, trajectories, strict=True):
            trajectory.version = self._version.pop(key)
        return batch.drawn, trajectories, batch.version

    def metrics(self) -> dict[str, float]:
        """Return who waited for whom since the last call, on average over the processes, all of which call it.

        Returns:
            ``time/waiting``, the seconds that the last batch was waited for, and :meth:`RolloutEngine.busy`.
        """
        shares = gather_object([{"time/waiting": self._waited, **self._engine.busy()}])
        return {name: fmean(share[name] for share in shares) for name in shares[0]}

    def _paused(self, keys: range) -> list[Trajectory]:
        """Play until the episodes have ended; the others wait through the update."""
        rollout = self._rollout
        assert rollout is not None
        with self._sampler.generators(versions=self._versions) as make:
            return within_memory(lambda: rollout.play(keys, make()), lambda: self._sampler.halve(len(keys)))

    def _in_background(self, keys: range) -> list[Trajectory]:
        """Wait until the episodes have ended, which are played in a thread."""
        if self._background is None:
            assert self._rollout is not None
            generator = self._resources.enter_context(self._sampler.generator_of_versions(self._versions))
            self._background = BackgroundRollout(self._rollout, generator)
            self._resources.callback(self._background.close)
            self._background.start()
        return self._background.wait(keys)

    def _begin(self, generation: int, last: int) -> None:
        """Let the batches begin that are due, up to the run's last."""
        self._current = generation
        if self._rollout is None:
            self._rollout = self._resources.enter_context(self._engine.open(keep_instances=False))
        due = min(generation + self._ahead, last)
        # Batches begin in order: those up to the latest that is open have begun, this one too unless the run just starts.
        drawn = [self._add(index, generation) for index in range(max(self._open, default=generation - 1) + 1, due + 1)]
        if any(batch.version == generation for index, batch in self._open.items() if index > generation):
            self._snapshots.take(generation)
        self._snapshots.keep(self._playing())
        if self._sampler.overlaps:
            self._sampler.serve(self._versions)
        for batch in drawn:
            self._admit(batch)

    def _add(self, generation: int, version: int) -> OpenBatch:
        drawn = self._draw(generation)
        size = len(drawn.specs)
        keys = range(generation * size, (generation + 1) * size)
        self._version.update(dict.fromkeys(keys, version))
        self._open[generation] = OpenBatch(version, drawn, keys)
        return self._open[generation]

    def _admit(self, batch: OpenBatch, recorded: Sequence[RecordedEpisode] | None = None) -> None:
        rollout = self._rollout
        assert rollout is not None
        self._between_steps(lambda: rollout.admit(batch.keys, batch.drawn.specs, recorded))

    def _between_steps(self, function: Callable[[], _Result]) -> _Result:
        """Run a function of the rollout."""
        return function() if self._background is None else self._background.call(function)

    def _playing(self) -> set[int]:
        """Return the versions of all open batches."""
        return {batch.version for batch in self._open.values()}

    def _holding(self, version: int) -> AbstractContextManager[None]:
        return self._snapshots.holding(None if version == self._current else version)

    def close(self) -> None:
        """Give up what is under way."""
        self._resources.close()
        self._rollout = self._background = None
        self._open.clear()
        self._version.clear()
        self._snapshots.keep(())

    # ---------------------------------------------------------------------------------------------------- checkpoint

    def state(self) -> AheadState:
        """Return the open batches of this process, and the policies that play them."""
        rollout = self._rollout
        if rollout is None:
            return AheadState([], {})
        records = self._between_steps(lambda: {key: rollout.record(batch.keys) for key, batch in self._open.items()})
        batches = [
            {
                "generation": generation,
                "version": self._open[generation].version,
                "episodes": [record.to_json() for record in episodes],
            }
            for generation, episodes in records.items()
        ]
        weights = self._snapshots.weights
        return AheadState(batches, {version: weights[version] for version in sorted(self._playing())})

    def restore(self, state: AheadState) -> None:
        """Play the open batches of a checkpoint on, from the answers that it holds."""
        self.close()
        if not state.batches:
            return
        self._rollout = self._resources.enter_context(self._engine.open(keep_instances=False))
        self._snapshots.restore(state.weights)
        for batch in state.batches:
            added = self._add(batch["generation"], batch["version"])
            self._admit(added, [RecordedEpisode.from_json(episode) for episode in batch["episodes"]])


def check_plays_ahead(model: torch.nn.Module, dataset: Any) -> None:
    """Check that a run can play batches ahead, which only the loaded model and the rows say.

    Args:
        model: The policy, unwrapped.
        dataset: The rows.

    Raises:
        ValueError: If the model is trained whole, or a part of its base, or the rows cannot be read in any order.
    """
    if not isinstance(model, PeftModel):
        raise ValueError(
            "batches_ahead keeps copies of the adapter that plays, and this model is trained whole. Pass a "
            "peft_config, or leave batches_ahead unset."
        )
    check_bias(model.peft_config[POLICY], "the policy and earlier ones, which play,")
    if isinstance(dataset, IterableDataset):
        raise ValueError(
            "batches_ahead reads rows before their update, and an IterableDataset has one order. Leave batches_ahead unset."
        )


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


class BackgroundRollout:
    """A thread that plays a rollout from :meth:`start` to :meth:`close`; nothing else may use the rollout meanwhile.

    It computes little: the environments' own work, if they are stepped inline, and tokens to text. A generator that tells
    when it has an answer (``listen``) lets it sleep until then.

    Args:
        rollout: The rollout.
        generator: Samples the actions, elsewhere.
    """

    def __init__(self, rollout: Rollout, generator: Generator) -> None:
        self._rollout, self._generator = rollout, generator
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="rollout", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def call(self, function: Callable[[], _Result]) -> _Result:
        """Run a function of the rollout between two steps, and return its result.

        Raises:
            BaseException: What the function raised, or the rollout before.
        """
        answer: Future[_Result] = Future()

        def run() -> None:
            try:
                answer.set_result(function())
            except BaseException as error:
                answer.set_exception(error)
            self._notify()

        self._post(run)
        self._wait(answer.done)
        return answer.result()

    def wait(self, keys: Sequence[int]) -> list[Trajectory]:
        """Wait until some episodes have ended, and return them.

        Raises:
            BaseException: What the rollout raised.
        """
        self._wait(lambda: all(map(self._rollout.has_ended, keys)))
        return self._rollout.take(keys)

    def close(self) -> None:
        """End the thread after its step, without waiting for episodes."""
        self._closing = True
        if self._thread.is_alive():
            self._post(lambda: None)
            self._thread.join()

    def _post(self, function: Callable[[], None]) -> None:
        self._posted.put(function)
        self._rollout.wake()

    def _wait(self, until: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or until())
        if self._error is not None and not until():
            raise self._error

    def _notify(self, ended: Trajectory | None = None) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            with self._rollout.playing(self._generator, self._notify) as go_on_until:
                while not self._closing:
                    if self._rollout.under_way and self._posted.empty():
                        go_on_until(lambda: not self._posted.empty())
                    else:
                        self._posted.get()()
        except BaseException as error:
            self._error = error
            self._notify()
