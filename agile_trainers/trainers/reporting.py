"""What a training step reports: numbers, and words when a run cannot learn."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from agile_trainers.rollout.metrics import summarize


def training_summary(rows: Sequence[dict[str, Any]], seconds: float, rewards: Sequence[float]) -> dict[str, float]:
    """Metrics of one generation batch.

    Args:
        rows: One row per episode, of all ranks.
        seconds: Wall time of the rollout on the slowest rank.
        rewards: Weighted sum of all reward functions for each episode, of all ranks.

    Returns:
        The metrics of :func:`~agile_trainers.rollout.metrics.summarize`, ``time/rollout``, ``rollout_tokens_per_second``,
        and under TRL's own names, for callbacks and dashboards made for it: ``reward``, ``reward_std``,
        ``completions/mean_length`` (action tokens of an episode).
    """
    tokens = sum(row["action_tokens"] for row in rows)
    return {
        **summarize(rows),
        "time/rollout": seconds,
        "rollout_tokens_per_second": tokens / seconds,
        "reward": fmean(rewards),
        "reward_std": stdev(rewards) if len(rewards) > 1 else 0.0,
        "completions/mean_length": tokens / len(rows),
    }


def degeneracies(
    summary: dict[str, float], advantage_std: float, errors: Sequence[str], truncated_are_masked: bool
) -> list[str]:
    """Warnings about a batch that teaches nothing, although its progress bar looks healthy.

    Args:
        summary: Of :func:`training_summary`.
        advantage_std: Spread of the batch's advantages.
        errors: What environments of this rank raised.
        truncated_are_masked: ``mask_truncated_completions``.
    """
    warnings = []
    failures = summary["stop/environment_error"] + summary["stop/environment_timeout"]
    if failures:
        first = f" First error: {errors[0]}" if errors else ""
        warnings.append(f"The environment failed in {failures:.0%} of the episodes; they are not trained on.{first}")
    cut = sum(summary[f"stop/{reason}"] for reason in ("truncated", "max_turns", "context_full"))
    if cut == 1.0 and truncated_are_masked:
        warnings.append(
            "Every episode was cut short and mask_truncated_completions=True: nothing is trained on. Raise max_turns or "
            "max_model_length."
        )
    if advantage_std == 0.0:
        warnings.append(
            "Every advantage is 0: the members of each group were rewarded alike, so there is nothing to learn from this "
            "batch. If it goes on, the task is too hard, too easy, or its reward is constant."
        )
    return warnings
