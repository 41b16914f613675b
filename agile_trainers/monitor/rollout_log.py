"""Collects what an update computes of each episode, and writes the rollout log of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from transformers import TrainerCallback
from transformers.utils import logging

from agile_trainers.checkpoints.disclosure import masked
from agile_trainers.checkpoints.record import RunCheckpoints
from agile_trainers.envs.checker import describe_error
from agile_trainers.monitor.health_checks import HealthChecks
from agile_trainers.objectives.ratios import importance_ratios, is_clipped
from agile_trainers.objectives.returns import discounted_returns
from agile_trainers.records.schema import TRAINED
from agile_trainers.records.writer import RecordWriter, episode_row, file_part, new_run_id
from agile_trainers.step.play import PlayedGroups
from agile_trainers.train_batch import TrainBatch
from agile_trainers.types import Message, Trajectory, as_text

logger = logging.get_logger(__name__)

_MOST_BYTES = 4 * 10**9
"""Size of a run's rollout log, over all processes. Beyond it, training batches are deleted, every second one first."""


class RolloutLog(TrainerCallback):
    """The rollout log of a run, its episode records, metrics and findings in ``output_dir/rollouts/<run id>``.

    The episodes of a generation batch are kept until its last pass is over, and written then. As a callback, it writes
    every log of the trainer to ``metrics.jsonl``.

    Args:
        args: A ``MultiTurnConfig`` for episodes.
        accelerator: The trainer's.
        processing_class: The trainer's.
        checkpoints: Knows the id of the run.
        health: Finds what is wrong with the run.
    """

    def __init__(
        self,
        args: Any,
        accelerator: Accelerator,
        processing_class: Any,
        checkpoints: RunCheckpoints,
        health: HealthChecks,
    ) -> None:
        self._args, self._accelerator, self._processing_class = args, accelerator, processing_class
        self._health = health
        self._checkpoints = checkpoints
        self._every = int(args.log_rollouts)
        self._writer: RecordWriter | None = None
        self._evaluation = ""
        """Id of the evaluations before a run."""
        self._generation = 0
        self.unfinished: list[dict[str, Any]] = []
        """Rows of the current generation batch, which is not over."""
        self._failing: set[str] = set()
        """Kinds of writes whose last attempt failed."""
        self._failures = 0
        """Writes that failed since all kinds succeeded."""

    # -------------------------------------------------------------------------------------------------------- a run

    def begin_run(self) -> None:
        """Leave the folder of an earlier run or evaluation; the next record goes to that of the run that begins."""
        self._writer, self._evaluation, self.unfinished = None, "", []

    def resume(self, rows: list[dict[str, Any]], generation: int, step: int) -> None:
        """Go on at a checkpoint: delete the records of what was played after it, which the run plays again.

        Args:
            rows: :attr:`unfinished` at the checkpoint.
            generation: First generation batch that was not over.
            step: Optimizer steps so far.
        """
        self._generation = generation
        self.unfinished = [row | {name: _hidden(row[name]) for name in TRAINED} for row in rows]

        def rewind(writer: RecordWriter) -> None:
            if deleted := writer.rewind(generation, step, self._accelerator.num_processes):
                logger.warning(
                    "The resumed run plays the episodes after step %d again. %d files of earlier records in %s are deleted.",
                    step, deleted, writer.folder,
                )  # fmt: skip

        self._write("train", rewind)

    # ------------------------------------------------------------------------------------------------------ training

    def begin(
        self, generation: int, step: int, played: PlayedGroups, advantages: torch.Tensor, values: torch.Tensor | None
    ) -> None:
        """Take the episodes of a generation batch.

        Args:
            generation: Its index in the run.
            step: Optimizer steps so far.
            played: The episodes of this process, with the rewards that credit was computed from. Those of groups that were
                replaced are written too, without advantages.
            advantages: (B, K), of their turns.
            values: (B, K), of the critic; None without one.
        """
        self.unfinished, self._generation = [], generation
        if not self._every or generation % self._every:
            return
        batch = played.batch
        rewarded = None if batch.path_ids is None else batch.rewarded
        returns = discounted_returns(batch.turn_rewards, batch.turn_mask, self._args.gamma, rewarded).tolist()
        by_turn = advantages.tolist(), returns, [None] * len(returns) if values is None else values.tolist()
        for index, trajectory, of_turns, to_go, valued in zip(
            played.indices, played.trajectories, *by_turn, strict=True
        ):
            self._add(generation, step, index, trajectory, advantages=of_turns, returns=to_go, values=valued)
        # After the others, whose places `observe` knows.
        own = zip(played.indices, played.own[0], played.trajectories, strict=True) if played.own else ()
        replaced = [*played.discarded, *((index, one) for index, one, trained in own if one is not trained)]
        for index, trajectory in replaced:
            self._add(generation, step, index, trajectory)
        written = [*played.trajectories, *(one for _, one in replaced)]
        if any(one.images for one in written):
            self._write("images", lambda writer: writer.write_images(written))

    def _add(self, generation: int, step: int, index: int, trajectory: Trajectory, **of_turns: Any) -> None:
        group, member = divmod(index, self._args.num_generations)
        row = episode_row(
            trajectory, step=step, phase="train", index=index, generation=generation,
            group=group, member=member, **of_turns,
        )  # fmt: skip
        self.unfinished.append(row)

    def observe(self, batch: TrainBatch, log_probs: torch.Tensor, log_ratio: torch.Tensor) -> None:
        """Take the token columns of a micro-batch from the loss. Those of a later pass replace them.

        Args:
            batch: The micro-batch.
            log_probs: (B, T), under the policy.
            log_ratio: (B, T), whose exponential is the ratio of TRL's loss, pooled over turns if it is.
        """
        if not self.unfinished or batch.episodes is None:
            return
        columns = self._token_columns(batch, log_probs.detach().float(), log_ratio.detach().float())
        hidden = (~batch.counted).cpu().numpy()
        for place, episode in enumerate(batch.episodes.tolist()):
            row = self.unfinished[episode]
            length = len(row["completion_ids"])
            if not hidden[place, :length].all():
                here = ~hidden[place, :length]
                for name, values in columns.items():
                    own = values[place, :length]
                    if row[name] is None:
                        row[name] = np.ma.masked_array(own, ~here)
                    else:  # a forward pass may hold a part of the episode
                        row[name][here] = own[here]

    def _token_columns(
        self, batch: TrainBatch, log_probs: torch.Tensor, log_ratio: torch.Tensor
    ) -> dict[str, np.ndarray]:
        args = self._args
        ratios = importance_ratios(log_ratio, batch.counted, args.importance_sampling_level == "sequence")
        highest = args.epsilon if args.epsilon_high is None else args.epsilon_high
        clipped = is_clipped(ratios, batch.advantages, args.loss_type, args.epsilon, highest, args.delta)
        old = log_probs if batch.old_per_token_logps is None else batch.old_per_token_logps
        columns = {"logprobs": old, "advantages": batch.advantages, "ratios": ratios, "clipped": clipped}
        if batch.recorded_reference is not None:
            difference = batch.recorded_reference - log_probs
            columns["kl"] = difference.exp() - difference - 1
        together = torch.stack([column.float() for column in columns.values()]).cpu().numpy()
        return {name: column > 0 if name == "clipped" else column for name, column in zip(columns, together)}

    def finish(self) -> None:
        """Write the current generation batch, after its last pass or at the end of the run."""
        rows, self.unfinished = self.unfinished, []
        if rows:
            self._write("train", lambda writer: writer.write_train(self._generation, rows))

    # ---------------------------------------------------------------------------------------- evaluation and metrics

    def write_evaluation(self, step: int, prefix: str, played: Evaluated) -> None:
        """Write the episodes of an evaluation, and show its metrics to the health checks.

        Args:
            step: Optimizer steps so far.
            prefix: Prefix of its metrics.
            played: The episodes of this process.
        """
        self._health.diagnosis.evaluated(prefix, played.metrics)
        if any(one.images for one in played.trajectories):
            self._write("images", lambda writer: writer.write_images(played.trajectories))
        rows = (episode_row(one, step=step, index=n) for one, n in zip(played.trajectories, played.places))
        self._write("eval", lambda writer: writer.write_eval(step, prefix, rows))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Write a log of the trainer, and what the diagnosis found since the last."""
        found = [finding.to_dict() for finding in self._health.unwritten()]

        def write(writer: RecordWriter) -> None:
            writer.write_metrics(state.global_step, logs or {})
            writer.write_findings(found)

        self._write("log", write, state.is_world_process_zero)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Warn of writes that failed and were not reported one by one."""
        if self._failing:
            self._warn(f"{self._failures} writes failed until the end of training.")

    # ------------------------------------------------------------------------------------------------------- writing

    def _write(self, kind: str, action: Callable[[RecordWriter], Any], here: bool = True) -> None:
        """Write on disk. All processes call it. A failure does not end the run; the first of several in a row is reported.

        Args:
            kind: Kind of the write. It goes on failing until a write of the same kind succeeds.
            action: Writes.
            here: False if this process has nothing to write.
        """
        if not self._every:
            return
        try:
            writer = self._writer or self._open()
            if here:
                action(writer)
        except Exception as error:
            if not self._failing:
                self._warn(f"further failures are counted, not shown. {describe_error(error)}")
            self._failing.add(kind)
            self._failures += 1
            return
        self._failing.discard(kind)
        if self._failures and not self._failing:
            self._warn(f"{self._failures} writes failed. Records are written again.")
            self._failures = 0

    def _warn(self, what: str) -> None:
        logger.warning(f"The episodes of {self._args.output_dir} could not be written: {what}")

    def _open(self) -> RecordWriter:
        """Open the folder of the run. An evaluation before a run has a folder of its own."""
        args, record = self._args, self._checkpoints.record()
        if not self._checkpoints.run_id and not self._evaluation:
            (self._evaluation,) = broadcast_object_list([new_run_id("evaluation")])
        run = self._checkpoints.run_id or self._evaluation
        entries = {
            "kind": "training" if run == self._checkpoints.run_id else "evaluation",
            "run": run,
            "algorithm": record["algorithm"],
            "model": record["base_model"]["name"],
            "environment": record["environment"],
            "seed": args.seed,
            "options": record["options"],
        }
        self._writer = RecordWriter(
            args.output_dir,
            entries,
            max_bytes=_MOST_BYTES // self._accelerator.num_processes,
            rank=self._accelerator.process_index,
            report=logger.warning,
        )
        if self._accelerator.is_main_process:
            self._writer.write_vocabulary(self._processing_class)
        return self._writer


def _hidden(values: list[float | bool | None] | None) -> np.ndarray | None:
    """Return a token column that was read from a file as :meth:`RolloutLog.observe` makes it, masked where it has None."""
    if values is None:
        return None
    hidden = [value is None for value in values]
    return np.ma.masked_array([0 if value is None else value for value in values], hidden)


# ------------------------------------------------------------------------------------------- the table of an evaluation


@dataclass
class Evaluated:
    """The episodes and metrics of an evaluation."""

    trajectories: list[Trajectory]
    """Episodes of this process."""
    places: list[int]
    """Their indices among the episodes of all processes."""
    metrics: dict[str, float]
    """Metrics over all processes."""
    rewards: list[list[float]]
    """Rewards of this process, per episode and reward function; NaN without a reward."""
    columns: dict[str, list[Any]]
    """Columns that reward functions logged with ``log_extra``, of all processes."""


def shown_messages(trajectory: Trajectory) -> list[Message]:
    """Return what a table of completions shows of an episode: its conversation, and after it what was said beside it.

    The roles of the latter, such as discarded answers, begin with "aside" and a number.
    """
    return [
        *as_text(trajectory.messages),
        *(
            {**message, "role": f"aside {number}: {message['role']}"}
            for number, said in enumerate(trajectory.asides, 1)
            for message in as_text(said)
        ),
    ]


@contextmanager
def completions_table(
    tables: dict[str, Any],
    played: Evaluated,
    names: Sequence[str],
    folder: Path,
    step: int,
    prefix: str,
    *,
    writes: bool,
) -> Iterator[None]:
    """Make TRL's ``log`` show and write the episodes of an evaluation; those of training are kept.

    TRL writes one file for each step. The training episodes of that step stay in it; the evaluation's go to a file of their
    own, whose name ends in the prefix, see :func:`~agile_trainers.records.writer.file_part`.

    Args:
        tables: TRL's ``_logs``, which its ``log`` reads inside the context.
        played: The episodes. They have no advantages, which the table shows as NaN.
        names: Names of the reward functions.
        folder: ``output_dir``.
        step: Optimizer steps so far.
        prefix: Prefix of the evaluation's metrics.
        writes: True on the process that writes it.
    """
    prompts, completions, rewards = (
        masked(gather_object(part))
        for part in (
            [as_text(t.prompt) for t in played.trajectories],
            [*map(shown_messages, played.trajectories)],
            played.rewards,
        )
    )
    path = folder / "completions" / f"completions_{step:05d}.parquet"
    aside, training = path.with_suffix(".training"), dict(tables)
    if writes and path.exists():
        path.rename(aside)
    tables.update(
        images=[],
        prompt=prompts,
        completion=completions,
        rewards={name: [row[place] for row in rewards] for place, name in enumerate(names)},
        advantages=[float("nan")] * len(prompts),
        extra=masked(played.columns),
    )
    try:
        yield
    finally:
        tables.update(training)
        if writes:
            for there, name in ((path, path.with_stem(f"{path.stem}_{file_part(prefix)}")), (aside, path)):
                try:
                    if there.exists():
                        there.rename(name)
                except OSError as error:  # the run goes on, as where the rollout log cannot be written
                    logger.warning("A table of completions could not be written: %s", describe_error(error))
