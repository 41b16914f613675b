"""Evaluation by playing episodes."""

from __future__ import annotations

import time
from itertools import islice
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from transformers.utils import logging

from agile_trainers.envs.checker import describe_error
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.metrics import episode_row
from agile_trainers.rollout.record import episode_record, write_records
from agile_trainers.types import Trajectory

from .generation import Generation
from .randomness import evaluation_specs, preserved_random_state
from .reporting import evaluation_summary

logger = logging.get_logger(__name__)


class EpisodeEvaluation(Generation):
    """``evaluate`` of the multi-turn trainers; uses nothing of TRL but its public methods."""

    args: Any
    model: Any
    control: Any
    engine: RolloutEngine | None
    _eval_rows: Any

    def _record(self, name: str, records: list[dict[str, Any]]) -> None:
        if self.args.log_rollouts:
            name = f"step-{self.state.global_step:06d}-{name}-rank{self.accelerator.process_index}.jsonl"
            path = Path(self.args.output_dir) / "rollouts" / name
            try:
                write_records(path, records)
            except Exception as error:  # a log is not worth a run
                logger.warning(f"The episodes of {path} could not be written: {describe_error(error)}")

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        *,
        num_episodes: int | None = None,
        greedy: bool | None = None,
    ) -> dict[str, float]:
        """Play many episodes and report their return; nothing is trained and the training stream does not change.

        Args:
            eval_dataset: Rows handed to ``reset``, repeated in order up to ``num_episodes``. Default: the trainer's
                ``eval_dataset``; without any, the environment gets seeds only.
            ignore_keys: Accepted for ``Trainer``'s sake; there are no model outputs to ignore.
            metric_key_prefix: Prefix of the metrics.
            num_episodes: Over all processes. Default: ``args.num_eval_episodes``.
            greedy: Take the likeliest token instead of sampling. Default: ``args.eval_greedy``.

        Returns:
            The metrics of :func:`agile_trainers.rollout.metrics.summarize` under ``eval_``, with ``eval_return`` (the mean
            episode return, for ``metric_for_best_model="return"``), its standard error ``eval_return_sem``, and
            ``eval_episodes``. Seeds are the same in every evaluation.
        """
        if self.engine is None:
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        if eval_dataset is None:
            eval_dataset = self._eval_rows
        if isinstance(eval_dataset, dict):
            results: dict[str, float] = {}
            for name, part in eval_dataset.items():
                prefix = f"{metric_key_prefix}_{name}"
                results |= self.evaluate(part, ignore_keys, prefix, num_episodes=num_episodes, greedy=greedy)
            return results
        count = self.args.num_eval_episodes if num_episodes is None else num_episodes
        if count < 1:
            raise ValueError(f"num_episodes must be at least 1, got {count}.")
        started, training = time.time(), self.model.training
        with preserved_random_state():
            trajectories = self._play_evaluation(
                eval_dataset, count, self.args.eval_greedy if greedy is None else greedy
            )
        if not self.is_in_train:
            self.engine.pool.close()
        rows = gather_object([episode_row(trajectory) for trajectory in trajectories])
        metrics = evaluation_summary(rows, metric_key_prefix, started)
        # TRL's `log` files metrics under the mode of the model.
        self.model.eval()
        self.log(metrics)
        self.model.train(training)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self._record(
            metric_key_prefix, [episode_record(trajectory, step=self.state.global_step) for trajectory in trajectories]
        )
        return metrics

    def _play_evaluation(self, dataset: Any, count: int, greedy: bool) -> list[Trajectory]:
        assert self.engine is not None
        rows = None if dataset is None else list(islice(dataset, count))
        rank, world_size = self.accelerator.process_index, self.accelerator.num_processes
        specs = evaluation_specs(self.args.seed, count, rows, rank, world_size)
        with self._generator(do_sample=not greedy) as generator:
            return self.engine.run(specs, generator)
