"""What of a generation batch is logged, shown and recorded."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import gather_object
from transformers.utils import logging

from agile_trainers.objectives.advantages import pool_over_turns
from agile_trainers.rollout.episode_files import episode_record
from agile_trainers.rollout.metrics import differing_groups, episode_row, start_of
from agile_trainers.sampling.sampler import Generation
from agile_trainers.trainers.reporting import degeneracies, environment_summaries, training_summary
from agile_trainers.trainers.reward_functions import (
    drained_columns,
    drained_metrics,
    reward_summary,
    share_without_spread,
    totals,
)
from agile_trainers.types import Trajectory

logger = logging.get_logger(__name__)


class RolloutLog(Generation):
    """The metrics, tables and records of training episodes, and warnings of batches that teach nothing."""

    num_generations: int
    _logs: dict[str, Any]
    _rollout_seconds: float
    _idle_batches: int
    environment: Any
    _warned_of_starts = False

    def _log_rollout(
        self, trajectories: list[Trajectory], rewards: torch.Tensor, advantages: torch.Tensor, turn_mask: torch.Tensor
    ) -> None:
        rows = gather_object([episode_row(trajectory) for trajectory in trajectories])
        slowest = max(gather_object([self._rollout_seconds]))
        per_episode = totals(rewards, self.reward_weights)
        summary = training_summary(rows, slowest) | self._sync_metrics()
        summary |= reward_summary(rewards, self.reward_weights, self.reward_func_names)
        summary |= drained_metrics(self._pending_metrics, self.accelerator)
        summary |= environment_summaries(rows, per_episode.tolist())
        grouped = self.num_generations > 1 and self.scale_rewards != "batch"
        group_size = self.num_generations if grouped else len(rows)
        summary["frac_reward_zero_std"] = share_without_spread(per_episode, group_size)
        metrics = self._metrics["train"]
        for name, value in summary.items():
            metrics[name].append(value)
        self.state.num_input_tokens_seen += sum(row["tokens"] for row in rows)
        metrics["num_tokens"] = [self.state.num_input_tokens_seen]
        for index, name in enumerate(self.reward_func_names):
            self._logs["rewards"][name].extend(rewards[:, index].tolist())
        self._logs["prompt"].extend(gather_object([trajectory.prompt for trajectory in trajectories]))
        self._logs["completion"].extend(gather_object([trajectory.messages for trajectory in trajectories]))
        for name, values in drained_columns(self._pending_extra_logs, len(trajectories)).items():
            self._logs["extra"][name].extend(values)
        pooled = pool_over_turns(advantages, turn_mask)[:, 0].contiguous()
        self._logs["advantages"].extend(self.accelerator.gather(pooled).tolist())
        idle = metrics["advantage/mean"][-1] == metrics["advantage/std"][-1] == 0.0
        self._idle_batches = self._idle_batches + 1 if idle else 0
        if self.num_generations > 1:
            self._compare_starts(trajectories)
        failed = next((trajectory for trajectory in trajectories if trajectory.error is not None), None)
        error = None if failed is None else ": ".join(filter(None, (failed.environment_name, failed.error)))
        for warning in degeneracies(summary, self._idle_batches, error, self.mask_truncated_completions):
            logger.warning(warning)

    def _compare_starts(self, trajectories: list[Trajectory]) -> None:
        """Count the groups, of all ranks, whose members did not start from the same observation; warn of the first."""
        starts = gather_object([start_of(trajectory) for trajectory in trajectories])
        different = differing_groups(starts, self.num_generations)
        groups = len(starts) // self.num_generations
        self._metrics["train"]["groups_with_different_starts"].append(len(different) / groups)
        if different and not self._warned_of_starts:
            self._warned_of_starts = True
            group = starts[different[0] * self.num_generations :][: self.num_generations]
            start = next(start for start in group if start is not None)
            shown = list(dict.fromkeys(start.prompt for start in group if start is not None))[:2]
            name = start.environment or self._environment_name
            logger.warning(
                f"{len(different)} of {groups} groups did not start from the same observation: after "
                f"reset(seed={start.seed}) the environment {name} said {shown[0]!r} to one member and {shown[-1]!r} to "
                "another. A group's returns are compared as if only the answers differed: derive all randomness of reset "
                "from its seed. The metric groups_with_different_starts goes on counting."
            )

    @property
    def _environment_name(self) -> str:
        return self.environment if isinstance(self.environment, str) else getattr(self.environment, "__name__", "given")

    def _training_records(
        self, trajectories: list[Trajectory], advantages: torch.Tensor, first: int
    ) -> list[dict[str, Any]]:
        """Of this process; ``first`` is the place of its first episode among those of all."""
        records = []
        for index, (trajectory, row) in enumerate(zip(trajectories, advantages.tolist()), start=first):
            group, member = divmod(index, self.num_generations)
            records.append(episode_record(trajectory, row, step=self.state.global_step, group=group, member=member))
        return records
