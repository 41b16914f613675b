"""Evaluation by playing episodes."""

from __future__ import annotations

import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.utils import gather_object
from transformers.trainer_utils import PredictionOutput
from transformers.utils import logging

from agile_trainers.envs.checker import describe_error
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.episode_files import episode_record, write_records
from agile_trainers.rollout.metrics import episode_row
from agile_trainers.rollout.mixture import Mixture
from agile_trainers.rollout.seeds import evaluation_specs, preserved_random_state
from agile_trainers.sampling.sampler import Generation
from agile_trainers.trainers.evaluation_data import kept_columns, rows_of
from agile_trainers.trainers.evaluation_table import Evaluated, completions_table
from agile_trainers.trainers.mixture import with_names
from agile_trainers.trainers.reporting import environment_evaluations, evaluation_summary
from agile_trainers.trainers.reward_functions import (
    drained_columns,
    drained_metrics,
    not_scored,
    reward_summary,
    totals,
)

logger = logging.get_logger(__name__)


class EpisodeEvaluation(Generation):
    """``evaluate`` of the multi-turn trainers; uses nothing of TRL but its public methods."""

    args: Any
    model: Any
    control: Any
    engine: RolloutEngine | None
    _eval_rows: Any
    _mixture: Mixture | None

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
            eval_dataset: Rows handed to ``reset``, repeated in order up to ``num_episodes``; several data sets by name; or
                the name of one of the trainer's. Default: the trainer's ``eval_dataset``; without any, the environment
                gets seeds only.
            ignore_keys: Accepted for ``Trainer``'s sake; there are no model outputs to ignore.
            metric_key_prefix: Prefix of the metrics.
            num_episodes: Over all processes. Default: ``args.num_eval_episodes``.
            greedy: Take the likeliest token instead of sampling. Default: ``args.eval_greedy``.

        Returns:
            The metrics of :func:`agile_trainers.rollout.metrics.summarize` under ``eval_``, with ``eval_return`` (the mean
            episode return, for ``metric_for_best_model="return"``), its standard error ``eval_return_sem``, and
            ``eval_episodes``; under TRL's names ``eval_reward`` (the return and the weighted reward functions), its
            ``eval_reward_std``, ``eval_rewards/<name>/mean`` and ``.../std``, ``eval_completions/...``, and what reward
            functions log. Seeds are the same in every evaluation. Of several environments, these are over all of them, and
            ``eval_<name>_return`` and so on are over one; without rows each plays equally many episodes.
        """
        if self.engine is None:
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        eval_dataset = rows_of(self._eval_rows, eval_dataset)
        if isinstance(eval_dataset, dict):
            results: dict[str, float] = {}
            for name, part in eval_dataset.items():
                prefix = f"{metric_key_prefix}_{name}"
                results |= self.evaluate(part, ignore_keys, prefix, num_episodes=num_episodes, greedy=greedy)
            return results
        count = self.args.num_eval_episodes if num_episodes is None else num_episodes
        if count < 1:
            raise ValueError(f"num_episodes must be at least 1, got {count}.")
        training = self.model.training
        played = self._play_evaluation(eval_dataset, count, greedy, metric_key_prefix)
        # TRL's `log` files metrics under the mode of the model.
        self.model.eval()
        with completions_table(self, played, metric_key_prefix):
            self.log(played.metrics)
        self.model.train(training)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, played.metrics)
        self._record(
            metric_key_prefix,
            [episode_record(trajectory, step=self.state.global_step) for trajectory in played.trajectories],
        )
        return played.metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Play one episode for every row and return what was said; nothing is trained, logged or written.

        Args:
            test_dataset: Rows handed to ``reset``.
            ignore_keys: Accepted for ``Trainer``'s sake; there are no model outputs to ignore.
            metric_key_prefix: Prefix of the metrics.

        Returns:
            ``predictions``: an object array (rows,) of conversations, each the messages after the prompt, of all processes;
            ``metrics``: those of :meth:`evaluate`. There are no ``label_ids``.
        """
        if self.engine is None:
            return super().predict(test_dataset, ignore_keys, metric_key_prefix)
        rows = list(kept_columns(self.args, test_dataset, "test_dataset"))
        played = self._play_evaluation(rows, len(rows), None, metric_key_prefix)
        said = np.empty(len(rows), dtype=object)
        for place, messages in gather_object(list(zip(played.places, (t.messages for t in played.trajectories)))):
            said[place] = messages
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control, played.metrics)
        return PredictionOutput(predictions=said, label_ids=None, metrics=played.metrics)

    def _play_evaluation(self, dataset: Any, count: int, greedy: bool | None, prefix: str) -> Evaluated:
        """Play and score; the training stream and the random state stay what they are."""
        assert self.engine is not None
        started = time.time()
        rows = None if dataset is None else list(islice(dataset, count))
        if rows is not None and not rows:
            raise ValueError(f"An evaluation data set must have at least one row, got {dataset!r}.")
        rank, world_size = self.accelerator.process_index, self.accelerator.num_processes
        specs = evaluation_specs(self.args.seed, count, rows, rank, world_size, self._mixture)
        sample = not (self.args.eval_greedy if greedy is None else greedy)
        with preserved_random_state():
            with self._generator(do_sample=sample) as generator:
                trajectories = self.engine.run(specs, generator)
            # TRL gathers as many rewards from every process.
            missing = -(-count // world_size) - len(specs)
            options = with_names([spec.options or {} for spec in specs], specs)
            options += [dict(rows[0]) if rows else dict(options[0]) if options else {}] * missing
            rewards = self._reward(options, [*trajectories, *(not_scored() for _ in range(missing))])
        if not self.is_in_train:
            self.engine.pool.close()
        scores = reward_summary(rewards, self.reward_weights, self.reward_func_names)
        scores |= drained_metrics(self._pending_metrics, self.accelerator)
        scores["num_tokens"] = float(self.state.num_input_tokens_seen)
        local = rewards.view(world_size, -1, rewards.size(1))[rank, : len(specs)]
        played = gather_object([episode_row(trajectory) for trajectory in trajectories])
        rewarded = gather_object(totals(local, self.reward_weights).tolist())
        metrics = evaluation_summary(played, scores, prefix, started)
        metrics |= environment_evaluations(played, rewarded, prefix)
        extra = drained_columns(self._pending_extra_logs, len(specs))
        return Evaluated(trajectories, list(range(rank, count, world_size)), metrics, local.tolist(), extra)
