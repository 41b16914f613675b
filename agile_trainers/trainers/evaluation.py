"""Plays the episodes of an evaluation and scores them."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from trl import GRPOTrainer

from agile_trainers.evaluation.results import evaluation_episodes, in_order, play_evaluation
from agile_trainers.monitor.evaluation_table import Evaluated
from agile_trainers.monitor.reporting import evaluation_summary
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.mixture import Mixture
from agile_trainers.rollout.seeds import preserved_random_state
from agile_trainers.sampling.sampler import RolloutSampler
from agile_trainers.step.mixture import with_names
from agile_trainers.step.reward import (
    drained_columns,
    drained_metrics,
    not_scored,
    reward_summary,
    totals,
)
from agile_trainers.types import Trajectory

Rewards = Callable[[list[dict[str, Any]], list[Trajectory]], torch.Tensor]
"""Maps rows and episodes of this process to the rewards (B, F) of all processes."""


class EpisodeEvaluator:
    """Plays evaluations with a trainer's policy, without changing the training stream or the random state.

    Args:
        trainer: After TRL's own constructor.
        engine: Its rollout engine.
        sampler: Its sampler.
        mixture: The environments of a run of several; None for one.
        rewards: Calls the trainer's reward functions.
    """

    def __init__(
        self,
        trainer: GRPOTrainer,
        engine: RolloutEngine,
        sampler: RolloutSampler,
        mixture: Mixture | None,
        rewards: Rewards,
    ) -> None:
        self._trainer: Any = trainer
        self._engine, self._sampler, self._mixture, self._rewards = engine, sampler, mixture, rewards

    def play(
        self,
        dataset: Any,
        count: int,
        greedy: bool | None,
        prefix: str,
        *,
        pending_metrics: dict[str, list[float]],
        pending_columns: dict[str, list[Any]],
    ) -> Evaluated:
        """Play the episodes of an evaluation and score them.

        Args:
            dataset: Rows handed to ``reset``, in order, again and again; None plays seeds.
            count: Episodes over all processes.
            greedy: Take the likeliest token. Default: ``eval_greedy``.
            prefix: Prefix of the metrics.
            pending_metrics: TRL's store for ``log_metric``; empty afterwards.
            pending_columns: TRL's store for ``log_extra``; empty afterwards.

        Raises:
            ValueError: For a data set without rows.
        """
        trainer, args = self._trainer, self._trainer.args
        started = time.time()
        rows = None if dataset is None else list(islice(dataset, count))
        rank, world_size = trainer.accelerator.process_index, trainer.accelerator.num_processes
        sample = not (args.eval_greedy if greedy is None else greedy)
        with preserved_random_state():
            results = play_evaluation(
                self._engine,
                self._sampler.generator(do_sample=sample),
                evaluation_episodes(args.seed, count, rows, self._mixture),
                rank=rank,
                world_size=world_size,
            )
            specs, trajectories = results.specs, results.trajectories
            # TRL gathers the same number of rewards from every process.
            missing = -(-count // world_size) - len(specs)
            options = with_names([spec.options or {} for spec in specs], specs)
            options += [dict(rows[0]) if rows else dict(options[0]) if options else {}] * missing
            rewards = self._rewards(options, [*trajectories, *(not_scored() for _ in range(missing))])
        if not trainer.is_in_train:
            self._engine.pool.close()
        scores = reward_summary(rewards, trainer.reward_weights, trainer.reward_func_names)
        scores |= drained_metrics(pending_metrics, trainer.accelerator)
        scores["num_tokens"] = float(trainer.state.num_input_tokens_seen)
        local = rewards.view(world_size, -1, rewards.size(1))[rank, : len(specs)]
        rewarded = in_order(results.places, totals(local, trainer.reward_weights).tolist())
        only_return = len(trainer.reward_func_names) == 1
        metrics = evaluation_summary(results, rewarded, scores, prefix, started, only_return=only_return)
        extra = drained_columns(pending_columns, len(specs))
        return Evaluated(trajectories, results.places, metrics, local.tolist(), extra)
