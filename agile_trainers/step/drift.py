"""Corrects a batch that an earlier policy played (``batches_ahead``) for the drift to the policy that it trains."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator

from agile_trainers.objectives.drift import drift_metrics, drift_weights


def corrected_drift(
    args: Any,
    log_probs: torch.Tensor,
    snapshot: torch.Tensor,
    turn_ids: torch.Tensor,
    mask: torch.Tensor,
    accelerator: Accelerator,
) -> tuple[torch.Tensor | None, dict[str, float]]:
    """Weigh the tokens of a batch by ``drift_correction``, and measure the drift.

    Both log-probabilities are the trainer's own: the sampler's depend in their last bits on the batch that it computed.

    Args:
        args: A ``MultiTurnConfig``.
        log_probs: (B, T), under the policy that the update starts from.
        snapshot: (B, T), under the policy that played the episodes.
        turn_ids: (B, T) int64.
        mask: (B, T) bool, the tokens that were scored and are trained on.
        accelerator: Gathers for the metrics.

    Returns:
        The weights (B, T), None without a correction; and metrics under ``drift/``, over all processes.
    """
    log_ratio = torch.where(mask, log_probs - snapshot, 0.0)
    ours, counted = (
        accelerator.gather(accelerator.pad_across_processes(column, dim=1)) for column in (log_ratio, mask.long())
    )
    metrics = drift_metrics(ours, counted.bool())
    if args.drift_correction is None:
        return None, metrics
    return drift_weights(log_ratio, mask, turn_ids, args.drift_correction, args.drift_clip_max), metrics
