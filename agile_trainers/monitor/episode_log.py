"""Logs generation batches: metrics and TRL's tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers.utils import logging
from trl import GRPOTrainer

from agile_trainers.checkpoints.secrets import masked
from agile_trainers.monitor.health_metrics import health_metrics, task_of
from agile_trainers.monitor.reporting import environment_summaries, training_summary
from agile_trainers.objectives.advantages import pool_over_turns
from agile_trainers.rollout.metrics import (
    differing_groups,
    environments_with_success,
    episode_metrics,
    start_of,
    with_success,
)
from agile_trainers.step.reward import drained_columns, reward_summary, share_without_spread, totals
from agile_trainers.types import Trajectory

logger = logging.get_logger(__name__)


class EpisodeLog:
    """The log of a run's episodes.

    Args:
        trainer: After TRL's own constructor.
        environment: The trainer's argument, for its name in warnings.
        note: Takes evidence for the diagnosis: the name of a finding and a sentence.
    """

    def __init__(self, trainer: GRPOTrainer, environment: Any, note: Callable[[str, str | None], None]) -> None:
        self._trainer: Any = trainer
        self._note = note
        self._name = environment if isinstance(environment, str) else getattr(environment, "__name__", "given")

    def summarize(
        self,
        trajectories: Sequence[Trajectory],
        rewards: torch.Tensor,
        seconds: float,
        discarded: Sequence[tuple[int, Trajectory]] = (),
    ) -> dict[str, float]:
        """Compute the metrics of a generation batch, and note what speaks against its environment.

        Args:
            trajectories: The episodes of this process.
            rewards: (B, F) of all processes, NaN where a function gave none.
            seconds: Wall time of the rollout on this process.
            discarded: Index and episode of this process's groups that were replaced. Only their tokens count.
        """
        trainer = self._trainer
        rows = gather_object([episode_metrics(trajectory) for trajectory in trajectories])
        per_episode = totals(rewards, trainer.reward_weights)
        unused = gather_object([episode_metrics(trajectory) for _, trajectory in discarded])
        known = trainer.engine.reports_success
        known |= environments_with_success(rows)
        summary = training_summary(rows, max(gather_object([seconds])), unused, known)
        summary |= reward_summary(rewards, trainer.reward_weights, trainer.reward_func_names)
        summary |= environment_summaries(rows, per_episode.tolist(), known)
        grouped = trainer.num_generations > 1 and trainer.scale_rewards != "batch"
        group_size = trainer.num_generations if grouped else len(rows)
        summary["frac_reward_zero_std"] = share_without_spread(per_episode, group_size)
        tasks = gather_object([task_of(trajectory) for trajectory in trajectories])
        compared = trainer.num_generations if trainer.num_generations > 1 else len(rows)
        summary |= health_metrics(with_success(rows, known), per_episode.tolist(), tasks, compared)
        if trainer.num_generations > 1:
            summary["groups_with_different_starts"] = self._compare_starts(trajectories)
        trainer.state.num_input_tokens_seen += sum(row["tokens"] for row in [*rows, *unused])
        failed = next((trajectory for trajectory in trajectories if trajectory.error is not None), None)
        error = None if failed is None else ": ".join(filter(None, (failed.environment_name, failed.error)))
        error = next(filter(None, gather_object([error])), None)
        if error is not None:
            self._note("environment_failing", error)
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
        """Add a generation batch to TRL's table of completions, with secrets of known forms masked.

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
        # Trackers get the tables.
        tables["prompt"].extend(masked(gather_object([trajectory.prompt for trajectory in trajectories])))
        tables["completion"].extend(masked(gather_object([trajectory.messages for trajectory in trajectories])))
        for name, values in drained_columns(pending_columns, len(trajectories)).items():
            tables["extra"][name].extend(masked(values))
        pooled = pool_over_turns(advantages, turn_mask)[:, 0].contiguous()
        tables["advantages"].extend(trainer.accelerator.gather(pooled).tolist())

    def _compare_starts(self, trajectories: Sequence[Trajectory]) -> float:
        """Return the share of groups, of all ranks, whose members started differently, and note the first."""
        size = self._trainer.num_generations
        starts = gather_object([start_of(trajectory) for trajectory in trajectories])
        different, groups = differing_groups(starts, size), len(starts) // size
        if different:
            group = starts[different[0] * size :][:size]
            start = next(start for start in group if start is not None)
            shown = list(dict.fromkeys(start.prompt for start in group if start is not None))[:2]
            name = start.environment or self._name
            self._note(
                "environment_ignores_seed",
                f"{len(different)} of {groups} groups did not start from the same observation: after "
                f"reset(seed={start.seed}) the environment {name} said {shown[0]!r} to one member and {shown[-1]!r} to "
                "another.",
            )
        return len(different) / groups
