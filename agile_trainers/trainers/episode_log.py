"""Logs generation batches: metrics, TRL's tables, and warnings of batches without signal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers.utils import logging
from trl import GRPOTrainer

from agile_trainers.objectives.advantages import pool_over_turns
from agile_trainers.rollout.metrics import differing_groups, episode_row, start_of
from agile_trainers.trainers.reporting import degeneracies, environment_summaries, training_summary
from agile_trainers.trainers.reward_functions import drained_columns, reward_summary, share_without_spread, totals
from agile_trainers.types import Trajectory

logger = logging.get_logger(__name__)


class EpisodeLog:
    """The log of a run's episodes.

    Args:
        trainer: After TRL's own constructor.
        environment: The trainer's argument, for its name in warnings.
    """

    def __init__(self, trainer: GRPOTrainer, environment: Any) -> None:
        self._trainer: Any = trainer
        self._name = environment if isinstance(environment, str) else getattr(environment, "__name__", "given")
        self._warned_of_starts = False
        self.idle_batches = 0
        """Number of latest batches in a row whose advantages were all 0."""

    def summarize(
        self, trajectories: Sequence[Trajectory], rewards: torch.Tensor, seconds: float, credit: dict[str, float]
    ) -> dict[str, float]:
        """Compute the metrics of a generation batch, and warn if it has no signal.

        Args:
            trajectories: The episodes of this process.
            rewards: (B, F) of all processes, NaN where a function gave none.
            seconds: Wall time of the rollout on this process.
            credit: Metrics of the credit rule.
        """
        trainer = self._trainer
        rows = gather_object([episode_row(trajectory) for trajectory in trajectories])
        per_episode = totals(rewards, trainer.reward_weights)
        summary = training_summary(rows, max(gather_object([seconds])))
        summary |= reward_summary(rewards, trainer.reward_weights, trainer.reward_func_names)
        summary |= environment_summaries(rows, per_episode.tolist())
        grouped = trainer.num_generations > 1 and trainer.scale_rewards != "batch"
        group_size = trainer.num_generations if grouped else len(rows)
        summary["frac_reward_zero_std"] = share_without_spread(per_episode, group_size)
        if trainer.num_generations > 1:
            summary["groups_with_different_starts"] = self._compare_starts(trajectories)
        trainer.state.num_input_tokens_seen += sum(row["tokens"] for row in rows)
        idle = credit["advantage/mean"] == credit["advantage/std"] == 0.0
        self.idle_batches = self.idle_batches + 1 if idle else 0
        failed = next((trajectory for trajectory in trajectories if trajectory.error is not None), None)
        error = None if failed is None else ": ".join(filter(None, (failed.environment_name, failed.error)))
        for warning in degeneracies(summary, self.idle_batches, error, trainer.mask_truncated_completions):
            logger.warning(warning)
        return summary

    def fill_tables(
        self,
        tables: dict[str, Any],
        pending_columns: dict[str, list[Any]],
        trajectories: Sequence[Trajectory],
        rewards: torch.Tensor,
        advantages: torch.Tensor,
        turn_mask: torch.Tensor,
    ) -> None:
        """Add a generation batch to TRL's table of completions.

        Args:
            tables: TRL's ``_logs``.
            pending_columns: TRL's ``_pending_extra_logs``; empty afterwards.
            trajectories: The episodes of this process.
            rewards: (B, F) of all processes.
            advantages: (B, K) of this process.
            turn_mask: (B, K) bool.
        """
        trainer = self._trainer
        for index, name in enumerate(trainer.reward_func_names):
            tables["rewards"][name].extend(rewards[:, index].tolist())
        tables["prompt"].extend(gather_object([trajectory.prompt for trajectory in trajectories]))
        tables["completion"].extend(gather_object([trajectory.messages for trajectory in trajectories]))
        for name, values in drained_columns(pending_columns, len(trajectories)).items():
            tables["extra"][name].extend(values)
        pooled = pool_over_turns(advantages, turn_mask)[:, 0].contiguous()
        tables["advantages"].extend(trainer.accelerator.gather(pooled).tolist())

    def _compare_starts(self, trajectories: Sequence[Trajectory]) -> float:
        """Return the share of groups, of all ranks, whose members started differently, and warn of the first."""
        size = self._trainer.num_generations
        starts = gather_object([start_of(trajectory) for trajectory in trajectories])
        different, groups = differing_groups(starts, size), len(starts) // size
        if different and not self._warned_of_starts:
            self._warned_of_starts = True
            group = starts[different[0] * size :][:size]
            start = next(start for start in group if start is not None)
            shown = list(dict.fromkeys(start.prompt for start in group if start is not None))[:2]
            name = start.environment or self._name
            logger.warning(
                f"{len(different)} of {groups} groups did not start from the same observation: after "
                f"reset(seed={start.seed}) the environment {name} said {shown[0]!r} to one member and {shown[-1]!r} to "
                "another. A group's returns are compared as if only the answers differed: derive all randomness of reset "
                "from its seed. The metric groups_with_different_starts counts further ones."
            )
        return len(different) / groups
