"""Logs generation batches: metrics and TRL's tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from transformers.utils import logging

from agile_trainers.checkpoints.disclosure import masked
from agile_trainers.monitor.reporting import (
    environment_summaries,
    health_metrics,
    outcomes_of,
    seeds_alike,
    task_of,
    training_summary,
)
from agile_trainers.monitor.rollout_log import shown_messages
from agile_trainers.objectives.advantages import pool_over_turns
from agile_trainers.rollout.metrics import (
    demonstration_metrics,
    differing_groups,
    environments_with_success,
    episode_metrics,
    start_of,
    with_success,
)
from agile_trainers.step.reward import Rewards, share_without_spread
from agile_trainers.types import Trajectory, as_text

logger = logging.get_logger(__name__)


class EpisodeLog:
    """The log of a run's episodes.

    Args:
        args: A ``MultiTurnConfig`` for episodes.
        rewards: The run's reward functions.
        reports_success: Names of environments that are known to report success; grows while episodes are played.
        environment: The trainer's argument, for its name in warnings.
        note: Takes evidence for the diagnosis: the name of a finding and a sentence.
    """

    def __init__(
        self,
        args: Any,
        rewards: Rewards,
        reports_success: set[str | None],
        environment: Any,
        note: Callable[[str, str | None], None],
    ) -> None:
        self._rewards, self._reports_success, self._note = rewards, reports_success, note
        self._members, self._by_batch = args.num_generations, args.scale_rewards == "batch"
        self._name = environment if isinstance(environment, str) else getattr(environment, "__name__", "given")

    def summarize(
        self,
        trajectories: Sequence[Trajectory],
        rewards: torch.Tensor,
        seconds: float,
        discarded: Sequence[tuple[int, Trajectory]] = (),
    ) -> tuple[dict[str, float], int]:
        """Compute the metrics of a generation batch, and note what speaks against its environment.

        Args:
            trajectories: The episodes of this process.
            rewards: (B, F) of all processes, NaN where a function gave none.
            seconds: Wall time of the rollout on this process.
            discarded: Index and episode of this process's groups that were replaced. Only their tokens count.

        Returns:
            The metrics, and the number of tokens of all episodes.
        """
        shown = gather_object([trajectory.demonstration for trajectory in trajectories])
        rows = gather_object([episode_metrics(trajectory) for trajectory in trajectories])
        members, demonstrated = self._members, {}
        if any(shown):
            # An expert's episodes say nothing of the policy.
            demonstrated = demonstration_metrics(rows, shown, self._members)
            # In every group at the same places, also where the policy took one: all groups are of one size.
            experts = {place % members for place, expert in enumerate(shown) if expert} if members > 1 else set()
            own = [place for place, expert in enumerate(shown) if not expert and place % members not in experts]
            first = PartialState().process_index * len(trajectories)
            trajectories = [trajectories[place - first] for place in own if 0 <= place - first < len(trajectories)]
            rows, rewards, members = [rows[place] for place in own], rewards[own], max(1, members - len(experts))
        per_episode = self._rewards.totals(rewards)
        unused = gather_object([episode_metrics(trajectory) for _, trajectory in discarded])
        known = self._reports_success
        known |= environments_with_success(rows)
        summary = training_summary(rows, max(gather_object([seconds])), unused, known)
        summary |= self._rewards.summary(rewards) | demonstrated
        summary |= environment_summaries(rows, per_episode.tolist(), known)
        compared = members if members > 1 else len(rows)
        group_size = len(rows) if self._by_batch else compared
        summary["frac_reward_zero_std"] = share_without_spread(per_episode, group_size)
        tasks = gather_object([task_of(trajectory) for trajectory in trajectories])
        summary |= health_metrics(with_success(rows, known), per_episode.tolist(), tasks, compared, members)
        alike = seeds_alike(gather_object([outcomes_of(trajectory) for trajectory in trajectories]), members)
        if alike is not None:
            summary["seeds_alike"] = alike
        if self._members > 1:
            summary["groups_with_different_starts"] = self._compare_starts(trajectories, members)
        failed = next((trajectory for trajectory in trajectories if trajectory.error is not None), None)
        error = None if failed is None else ": ".join(filter(None, (failed.environment_name, failed.error)))
        error = next(filter(None, gather_object([error])), None)
        if error is not None:
            self._note("environment_failing", error)
        return summary, sum(row["tokens"] for row in [*rows, *unused])

    def fill_tables(
        self,
        tables: dict[str, Any],
        trajectories: Sequence[Trajectory],
        rewards: torch.Tensor,
        advantages: torch.Tensor,
        turn_mask: torch.Tensor,
    ) -> None:
        """Add a generation batch to TRL's table of completions, with secrets of known forms masked.

        Args:
            tables: TRL's ``_logs``.
            trajectories: The episodes of this process.
            rewards: (B, F) of all processes.
            advantages: (B, K) of all processes.
            turn_mask: (B, K) bool, of all processes.
        """
        for index, name in enumerate(self._rewards.names):
            tables["rewards"][name].extend(rewards[:, index].tolist())
        # Trackers get the tables.
        tables["prompt"].extend(masked(gather_object([as_text(trajectory.prompt) for trajectory in trajectories])))
        tables["completion"].extend(masked(gather_object([shown_messages(trajectory) for trajectory in trajectories])))
        for name, values in self._rewards.drain_columns(len(trajectories)).items():
            tables["extra"][name].extend(masked(values))
        tables["advantages"].extend(pool_over_turns(advantages, turn_mask)[:, 0].tolist())

    def _compare_starts(self, trajectories: Sequence[Trajectory], size: int) -> float:
        """Return the share of groups, of all ranks, whose members started differently, and note the first."""
        starts = gather_object([start_of(trajectory) for trajectory in trajectories])
        different, groups = differing_groups(starts, size), len(starts) // size
        if different:
            group = starts[different[0] * size :][:size]
            start = next(start for start in group if start is not None)
            shown = list(dict.fromkeys(start.prompt for start in group if start is not None))[:2]
            name = start.environment or self._name
            self._note(
                "environment_ignores_seed",
                f"{len(different)} of {groups} groups did not start from the same observation: with "
                f"seed={start.seed} the environment {name} said {shown[0]!r} to one member and {shown[-1]!r} to another.",
            )
        return len(different) / groups
