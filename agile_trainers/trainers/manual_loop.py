"""Runs training under the caller's control: ``rollout()`` plays episodes, and ``update()`` trains on them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from accelerate import skip_first_batches
from accelerate.utils import gather_object

from agile_trainers.adapters.folders import naming_full_disk
from agile_trainers.config.rules import BY_HAND, check_rules
from agile_trainers.monitor.progress import close_tables
from agile_trainers.rollout.seeds import training_specs
from agile_trainers.types import Trajectory

if TYPE_CHECKING:
    from agile_trainers.trainers.trainer import MultiTurnTrainer

Row = dict[str, Any]


class RunOverError(RuntimeError):
    """The run has no update left, or has not begun."""


class _Begun(Exception):
    """Exits ``Trainer.train`` before its first epoch."""


class Updates:
    """Begins, drives and ends a run for :meth:`MultiTurnTrainer.rollout` and :meth:`MultiTurnTrainer.update`.

    Everything before the first epoch and every optimizer step is ``Trainer``'s own code: its ``train`` exits before the
    first epoch, and an update is ``_run_epoch`` over the micro-batches of the given episodes.

    Args:
        trainer: The trainer; it calls :meth:`intercept` and :meth:`watched`.
    """

    def __init__(self, trainer: MultiTurnTrainer):
        self._trainer = trainer
        self.is_beginning = False
        """True while :meth:`start` runs ``Trainer.train``."""
        self._epoch: dict[str, Any] | None = None
        """Arguments of ``_run_epoch``, while a run is open."""
        self._resources = ExitStack()
        self._batches: Iterator[list[Row]] = iter(())
        self._pending: list[list[Row]] | None = None
        """Rows of the next update's generation batches."""
        self._micro_steps = 0
        """Micro-steps of the current epoch of the data set, up to the end of the current update."""
        self._before = 0
        """Micro-steps of the trainer before that epoch."""
        self._meter = _Meter()

    @property
    def is_open(self) -> bool:
        """True while a run is under way."""
        return self._epoch is not None

    # ------------------------------------------------------------------------------------------------- begin and end

    def start(self, resume_from_checkpoint: str | bool | None = None) -> None:
        """Begin a run of :meth:`rollout` and :meth:`update`, as ``train()`` does before its first step.

        The first ``rollout()`` or ``update()`` of a trainer that has not trained yet calls it.

        Args:
            resume_from_checkpoint: As for :meth:`train`.

        Raises:
            RuntimeError: In the middle of a run.
            ValueError: Without an environment, or where updates and generation batches do not end together.
        """
        self._check_environment()
        if self.is_open:
            raise RuntimeError("start() was called in the middle of a run. Call finish() first.")
        self._per_update()
        trainer, self.is_beginning = self._trainer, True
        try:
            trainer.train(resume_from_checkpoint)
        except _Begun:
            pass
        except BaseException:
            self.close()
            raise
        finally:
            self.is_beginning = False
        if self.is_open:
            self._meter = _Meter()
            self._finish_batch()

    def keep(self, resources: ExitStack) -> None:
        """Keep the resources of ``train`` (the lock of ``output_dir``) until the run ends."""
        self._resources = resources.pop_all()

    def intercept(self, arguments: dict[str, Any]) -> None:
        """Exit ``Trainer.train`` before its first epoch if :meth:`start` called it; see ``_run_epoch``."""
        if self.is_beginning:
            self._trainer.stop.pass_on("training had not begun")
            self._epoch = arguments
            self._micro_steps = arguments["steps_trained_in_current_epoch"]
            self._batches = self._drawn(arguments)
            raise _Begun

    def finish(self) -> None:
        """End a run of :meth:`update` before ``max_steps``, as ``train()`` ends: best model, callbacks, pushes.

        Raises:
            RunOverError: If the run is over.
        """
        trainer, epoch = self._trainer, self._epoch
        if epoch is None:
            raise RunOverError("finish() ends a run of rollout() and update(), but no run is under way.")
        samples = trainer.state.global_step * trainer.get_total_train_batch_size(trainer.args)
        try:
            trainer._finalize_training(epoch["trial"], samples, epoch["start_time"])
        finally:
            self.close()

    def close(self) -> None:
        """End a run without what :meth:`finish` does."""
        trainer = self._trainer
        self._epoch, self._pending, trainer.is_in_train = None, None, False
        trainer.rollout_log.finish()
        close_tables(trainer.callback_handler)
        trainer.setup.pool.close()
        self._resources.close()

    def _open(self) -> dict[str, Any]:
        """Return the open run; begin one if the trainer has not trained yet."""
        self._check_environment()
        if self._epoch is None and (done := self._trainer.state.global_step):
            raise RunOverError(
                f"The run is over after {done} updates (max_steps={self._trainer.args.max_steps}). Call start() to begin "
                "another one with the current policy, or start(resume_from_checkpoint=True) with a larger max_steps."
            )
        if self._epoch is None:
            self.start()
        if self._epoch is None:  # resumed at its end
            raise RunOverError("The run was over when it began: raise max_steps or num_train_epochs.")
        return self._epoch

    def _check_environment(self) -> None:
        if self._trainer.engine is None:
            raise ValueError("rollout() and update() play an environment: pass `environment=...` to the trainer.")
        self._trainer.check_open()
        check_rules(self._trainer.args, BY_HAND)

    # ------------------------------------------------------------------------------------------------------- rollout

    def rollout(self, rows: Sequence[Row] | None, generation: int | None) -> list[Trajectory]:
        """Play episodes with the current policy, without training. The same call gives the same episodes.

        Args:
            rows: Dataset rows, passed to ``reset`` as options: one for each group of this process (equally many on each).
                Default: the next rows of ``train()``; without a ``train_dataset`` the same number of episodes.
            generation: Index of the generation batch, which seeds environments and sampling. Default: the one that
                ``train()`` would play next, until an update is made.

        Returns:
            The episodes of this process, the ``num_generations`` members of a group side by side.

        Raises:
            ValueError: Without an environment, or for empty rows or a negative index.
            RunOverError: If the next rows are needed and the run is over.
        """
        self._check_environment()
        trainer = self._trainer
        if generation is not None and generation < 0:
            raise ValueError(f"generation counts from 0, got {generation}.")
        if rows is None:
            batches = self._next_rows()
        elif len(rows) == 0:
            raise ValueError("rows is empty: pass one row per group, or None for those that train() would draw next.")
        else:
            batches = [[row for row in rows for _ in range(trainer.num_generations)]]
        first = trainer._step // trainer.micro_steps_per_generation if generation is None else generation
        started = time.perf_counter()
        played: list[Trajectory] = []
        for index, batch in enumerate(batches):
            options = [None if row is None else dict(row) for row in batch]
            begin = trainer.accelerator.process_index * len(batch)
            places = range(begin, begin + len(batch))
            specs = training_specs(
                trainer.args.seed, first + index, options, places, trainer.num_generations, trainer.setup.mixture
            )
            played += trainer.runner.play(specs)
        if self.is_open:
            self._log_time(played, time.perf_counter() - started)
        return played

    def _log_time(self, played: list[Trajectory], seconds: float) -> None:
        """Log the duration of a rollout, under the names of ``training_summary``, which does not get it."""
        tokens = sum(turn.end - turn.start for episode in played for turn in episode.turns)
        everyone = gather_object([(seconds, tokens)])
        slowest, metrics = max(seconds for seconds, _ in everyone), self._trainer._metrics["train"]
        metrics["time/rollout"].append(slowest)
        metrics["rollout_tokens_per_second"].append(sum(tokens for _, tokens in everyone) / slowest)

    def _next_rows(self) -> list[list[Any]]:
        """Return the rows of the next update's generation batches; None for an episode without a row."""
        trainer = self._trainer
        if trainer.setup.rows_are_options or (not self.is_open and trainer.state.global_step == 0):
            self._open()
        if not trainer.setup.rows_are_options:
            return [[None] * self._size] * self._per_update()
        return self._peek()

    def _peek(self) -> list[list[Row]]:
        if self._pending is None:
            self._pending = [next(self._batches) for _ in range(self._per_update())]
        return self._pending

    @property
    def _size(self) -> int:
        """Number of episodes of a generation batch on this process."""
        return self._trainer.args.generation_batch_size // self._trainer.accelerator.num_processes

    def _per_update(self) -> int:
        """Return the number of generation batches of an update, which ends with an optimizer step."""
        trainer = self._trainer
        accumulation, every = trainer.args.gradient_accumulation_steps, trainer.micro_steps_per_generation
        if every % accumulation and accumulation % every:
            raise ValueError(
                f"update() needs generation batches and optimizer steps that end together, but a batch has {every} "
                f"micro-batches (steps_per_generation={trainer.args.steps_per_generation} x num_iterations="
                f"{trainer.num_iterations}) and a step gradient_accumulation_steps={accumulation}. Make one a multiple of "
                "the other."
            )
        return max(1, accumulation // every)

    def _drawn(self, epoch: dict[str, Any]) -> Iterator[list[Row]]:
        """Yield the generation batches of the data set, epoch after epoch, in ``Trainer``'s order."""
        trainer, handler = self._trainer, self._trainer.callback_handler
        loader, number = epoch["train_dataloader"], epoch["epoch"]
        resumed, done = epoch["resume_from_checkpoint"], epoch["steps_trained_in_current_epoch"]
        while True:
            current = skip_first_batches(loader, done) if done else loader
            if resumed and not done:
                trainer._load_rng_state(resumed)
            if hasattr(current, "set_epoch"):
                current.set_epoch(number)
            for index, rows in enumerate(current, start=done):
                if resumed and done and done == index:
                    trainer._load_rng_state(resumed)
                if index % trainer.micro_steps_per_generation == 0 or index == done:
                    yield rows
            number, resumed, done, self._micro_steps = number + 1, None, 0, 0
            epoch["epoch"] = number
            trainer.control = handler.on_epoch_begin(trainer.args, trainer.state, trainer.control)

    # -------------------------------------------------------------------------------------------------------- update

    def update(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Train on episodes as ``train()`` does on a generation batch: credit, loss, ``num_iterations`` passes.

        Schedule, callbacks, logs, evaluations and checkpoints are those of ``train()``; the run ends at ``max_steps``. Where
        ``gradient_accumulation_steps`` spans several generation batches, an update takes them all.

        Args:
            trajectories: This process's episodes, whole groups side by side, as :meth:`rollout` returns them. Their rewards
                may have been changed, and groups taken from several rollouts. They count as sampled by the current policy.

        Returns:
            The metrics of these optimizer steps (means), ``loss``, ``grad_norm``, ``learning_rate``, and the ``step``.

        Raises:
            ValueError: For more or fewer episodes than an update takes, or torn groups.
            TypeError: For anything but trajectories.
            RunOverError: If the run is over; see :meth:`start`.
        """
        self._check_environment()
        batches = self._generation_batches(list(trajectories))
        self._open()
        self._peek()  # advance the stream of rows, also for episodes of other rows
        self._pending = None
        return self._run([batch for batch in batches for _ in range(self._trainer.micro_steps_per_generation)])

    def _finish_batch(self) -> None:
        """Train on the rest of the generation batch in which the checkpoint was saved."""
        done = self._trainer._step % self._trainer.micro_steps_per_generation
        if done:
            rows = next(self._batches)
            self._run([rows] * (self._trainer.micro_steps_per_generation - done))

    def _run(self, micro_batches: list[Any]) -> dict[str, float]:
        """Run the optimizer steps of some micro-batches with ``Trainer``'s own loop."""
        trainer, epoch = self._trainer, self._open()
        accumulation, handler = trainer.args.gradient_accumulation_steps, trainer.callback_handler
        self._before = trainer._step - self._micro_steps
        self._micro_steps += len(micro_batches)
        if self._micro_steps < epoch["steps_in_epoch"]:
            # `Trainer`'s epoch ends here; the epoch of the data set ends only if the run does.
            end = handler.on_epoch_end

            def on_epoch_end(args: Any, state: Any, control: Any) -> Any:
                trainer.stop.ask(args, state, control)
                return end(args, state, control) if control.should_training_stop else control

            handler.on_epoch_end = on_epoch_end
        try:
            with trainer.stop.heard(), naming_full_disk(trainer.args.output_dir):
                trainer._run_epoch(
                    **{
                        **epoch,
                        "train_dataloader": micro_batches,
                        "steps_in_epoch": len(micro_batches),
                        "num_update_steps_per_epoch": math.ceil(len(micro_batches) / accumulation),
                        "resume_from_checkpoint": None,
                        "epochs_trained": 0,
                        "steps_trained_in_current_epoch": 0,
                    }
                )
                if trainer.control.should_training_stop:
                    self.finish()
        except BaseException:
            self.close()
            raise
        finally:
            handler.__dict__.pop("on_epoch_end", None)
        trainer.stop.pass_on()
        return self._meter.read()

    @contextmanager
    def watched(self, tr_loss: torch.Tensor, grad_norm: Any, learning_rate: float | None) -> Iterator[None]:
        """Note an optimizer step around ``_maybe_log_save_evaluate``, which clears its metrics."""
        trainer, epoch, metrics = self._trainer, self._epoch, self._trainer._metrics["train"]
        if epoch is None:
            yield
            return
        if trainer.state.global_step != self._meter.step:
            trainer.state.epoch = epoch["epoch"] + (trainer._step - self._before) / epoch["steps_in_epoch"]
            self._meter.note(trainer.state.global_step, self._mean(tr_loss), grad_norm, learning_rate, metrics)
        yield
        self._meter.mark(self._mean(tr_loss), metrics)

    def _mean(self, loss: torch.Tensor) -> float:
        return self._trainer.accelerator.gather(loss.detach().reshape(1)).mean().item()

    def _generation_batches(self, trajectories: list[Trajectory]) -> list[list[Trajectory]]:
        """Split episodes into generation batches; raise on all processes if they are not a whole update.

        Raises:
            ValueError: For too few or too many episodes, rewards that are not finite, or members of a group that do not
                belong together.
            TypeError: For anything but trajectories.
        """
        trainer, size, number = self._trainer, self._size, self._per_update()
        problem: Exception | None = None
        stranger = next((thing for thing in trajectories if not isinstance(thing, Trajectory)), None)
        if stranger is not None:
            problem = TypeError(
                f"update() takes a list of Trajectory, as rollout() returns it; got {stranger!r} in it."
            )
        elif len(trajectories) != size * number:
            problem = ValueError(
                f"update() takes {size * number} episodes on each process (generation_batch_size="
                f"{trainer.args.generation_batch_size}, {number} generation batch(es) per update), got {len(trajectories)}."
            )
        else:
            problem = _unusable_reward(trajectories)
        for error in gather_object([problem]):
            if error is not None:
                raise error
        batches = [trajectories[start : start + size] for start in range(0, len(trajectories), size)]
        for batch in batches:
            self._check_groups(gather_object([trajectory.seed for trajectory in batch]))
        return batches

    def _check_groups(self, seeds: list[int]) -> None:
        members = self._trainer.num_generations
        groups = [seeds[start : start + members] for start in range(0, len(seeds), members)]
        torn = next((group for group in groups if len(set(group)) > 1), None)
        if torn is not None:
            raise ValueError(
                f"update() takes whole groups, the num_generations={members} episodes of a group side by side, but these "
                f"{members} started from the seeds {torn}. Keep or drop the episodes of a group together."
            )


def _unusable_reward(trajectories: list[Trajectory]) -> ValueError | None:
    """Return the error for a reward that the caller set to anything but a finite number; None without one."""
    for place, trajectory in enumerate(trajectories):
        for number, reward in enumerate(trajectory.rewards):
            sound = isinstance(reward, Real) and not isinstance(reward, bool) and math.isfinite(reward)
            if not sound and not trajectory.stop_reason.failed:
                return ValueError(
                    f"update() takes finite rewards, but that of turn {number + 1} of episode {place} is {reward!r}. Check "
                    "divisions and logarithms; the run goes on with the next update() of sound episodes."
                )
    return None


class _Meter:
    """Collects the metrics of the optimizer steps of an update."""

    def __init__(self) -> None:
        self.step = -1
        self._loss_before = 0.0
        self._before: dict[str, tuple[list[float], int]] = {}
        """Each metric's values at the last mark, and their number."""
        self._values: dict[str, list[float]] = {}

    def note(
        self, step: int, loss: float, grad_norm: Any, learning_rate: float | None, metrics: Mapping[str, list[float]]
    ) -> None:
        """Add the metrics of an optimizer step."""
        self.step = step
        self._add("loss", [loss - self._loss_before])
        self._add("grad_norm", [] if grad_norm is None else [float(grad_norm)])
        self._add("learning_rate", [] if learning_rate is None else [learning_rate])
        for name, values in metrics.items():
            before, length = self._before.get(name, (None, 0))
            # Some metrics are replaced in every step instead of extended.
            self._add(name, values[length:] if values is before else values)

    def _add(self, name: str, values: list[float]) -> None:
        self._values.setdefault(name, []).extend(values)

    def mark(self, loss: float, metrics: Mapping[str, list[float]]) -> None:
        """Note the length of each metric, after `Trainer` may have logged and cleared them."""
        self._loss_before = loss
        self._before = {name: (values, len(values)) for name, values in metrics.items()}

    def read(self) -> dict[str, float]:
        """Return the means over the steps since the last call, and clear them."""
        values, self._values = self._values, {}
        sound = {name: [v for v in column if not math.isnan(v)] for name, column in values.items()}
        means = {name: sum(column) / len(column) for name, column in sound.items() if column}
        return {"step": float(self.step), **means}
