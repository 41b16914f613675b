"""Plays the episodes of an evaluation and scores them."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

from accelerate import Accelerator

from agile_trainers.evaluation.results import evaluation_episodes, gather_evaluation, in_order
from agile_trainers.monitor.evaluation_table import Evaluated
from agile_trainers.monitor.reporting import evaluation_summary
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.mixture import Mixture
from agile_trainers.rollout.seeds import preserved_random_state
from agile_trainers.sampling.sampler import RolloutSampler
from agile_trainers.step.mixture import with_names
from agile_trainers.step.reward import Rewards, not_scored
from agile_trainers.step.token_batches import within_memory


class EpisodeEvaluator:
    """Plays evaluations with a trainer's policy, without changing the training stream or the random state.

    Args:
        args: A ``MultiTurnConfig`` for episodes.
        accelerator: The trainer's.
        engine: Its rollout engine.
        sampler: Its sampler.
        mixture: The environments of a run of several; None for one.
        rewards: Its reward functions.
    """

    def __init__(
        self,
        args: Any,
        accelerator: Accelerator,
        engine: RolloutEngine,
        sampler: RolloutSampler,
        mixture: Mixture | None,
        rewards: Rewards,
    ) -> None:
        self._args, self._accelerator = args, accelerator
        self._sampler, self._mixture, self._rewards = sampler, mixture, rewards
        self.engine = engine
        """Plays them."""

    def play(
        self, dataset: Any, count: int, greedy: bool | None, prefix: str, *, tokens_seen: float, is_in_train: bool
    ) -> Evaluated:
        """Play the episodes of an evaluation and score them.

        Args:
            dataset: Rows handed to ``reset``, in order, again and again; None plays seeds.
            count: Episodes over all processes.
            greedy: Take the likeliest token. Default: ``eval_greedy``.
            prefix: Prefix of the metrics.
            tokens_seen: Tokens that the run read so far, for the metric ``num_tokens``.
            is_in_train: True keeps the environments for the next generation batch.

        Raises:
            ValueError: For a data set without rows.
        """
        args = self._args
        started = time.time()
        rows = None if dataset is None else list(islice(dataset, count))
        rank, world_size = self._accelerator.process_index, self._accelerator.num_processes
        sample = not (args.eval_greedy if greedy is None else greedy)
        with preserved_random_state():
            episodes = evaluation_episodes(args.seed, count, rows, self._mixture)
            with self._sampler.generators(do_sample=sample) as make:
                # No rank waits for another here: one may play again, or step an engine for those that have more episodes.
                played = within_memory(
                    lambda: self.engine.run(episodes[rank::world_size], make()),
                    lambda: self._sampler.halve(-(-count // world_size)),
                )
            results = gather_evaluation(self.engine, played, episodes, rank=rank, world_size=world_size)
            specs, trajectories = results.specs, results.trajectories
            # TRL gathers the same number of rewards from every process.
            missing = -(-count // world_size) - len(specs)
            options = with_names([spec.options or {} for spec in specs], specs)
            options += [dict(rows[0]) if rows else dict(options[0]) if options else {}] * missing
            rewards = self._rewards.of(options, [*trajectories, *(not_scored() for _ in range(missing))])
        if not is_in_train:
            self.engine.pool.close()
        scores = self._rewards.summary(rewards) | self._rewards.drain_metrics()
        scores["num_tokens"] = float(tokens_seen)
        local = rewards.view(world_size, -1, rewards.size(1))[rank, : len(specs)]
        rewarded = in_order(results.places, self._rewards.totals(local).tolist())
        only_return = len(self._rewards.names) == 1
        metrics = evaluation_summary(results, rewarded, scores, prefix, started, only_return=only_return)
        extra = self._rewards.drain_columns(len(specs))
        return Evaluated(trajectories, results.places, metrics, local.tolist(), extra)
