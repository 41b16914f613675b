"""Weighs the tokens of a batch that another policy played: an earlier one (drift), or an engine (mismatch)."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator

from agile_trainers.objectives.drift import (
    DECISION,
    decision_weights,
    drift_metrics,
    drift_weights,
)
from agile_trainers.objectives.mismatch import importance_weights, mismatch_metrics
from agile_trainers.step.log_probs import BatchLogProbs
from agile_trainers.types import TurnBatch


def weights_of_turns(args: Any, batch: TurnBatch, log_probs: BatchLogProbs | None) -> torch.Tensor | None:
    """Weigh the rewards of a batch that an earlier policy played, per decision.

    The products run over every token that was sampled, also of episodes that ``mask_truncated_completions`` leaves out: what
    a reward depends on does not change with what is trained.

    Args:
        args: A ``MultiTurnConfig``.
        batch: The episodes of this process.
        log_probs: Their log-probabilities, of all rows.

    Returns:
        (B, K); None without this correction, and where the policy itself played.
    """
    if args.drift_correction != DECISION or log_probs is None or log_probs.snapshot is None:
        return None
    assert log_probs.old is not None
    log_ratio, turns = log_probs.old - log_probs.snapshot, batch.turn_mask.size(1)
    return decision_weights(log_ratio, batch.valid_mask, batch.turn_ids, turns, args.drift_clip_max)


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
        The weights (B, T), None without a correction or with one of :func:`weights_of_turns`; and metrics under ``drift/``,
        over all processes.
    """
    log_ratio, mode = torch.where(mask, log_probs - snapshot, 0.0), args.drift_correction
    ours, counted = (
        accelerator.gather(accelerator.pad_across_processes(column, dim=1)) for column in (log_ratio, mask.long())
    )
    metrics = drift_metrics(ours, counted.bool())
    if mode is None or mode == DECISION:
        return None, metrics
    return drift_weights(log_ratio, mask, turn_ids, mode, args.drift_clip_max), metrics


def mismatch_weights(
    args: Any, batch: TurnBatch, log_probs: torch.Tensor, mask: torch.Tensor, accelerator: Accelerator
) -> tuple[torch.Tensor, dict[str, float]]:
    """Compute the importance weight of each token by ``vllm_importance_sampling_mode``.

    Args:
        args: A ``MultiTurnConfig``.
        batch: The episodes of this process.
        log_probs: (B, T), under the trainer's policy.
        mask: (B, T) bool, the tokens that were scored and are trained on.
        accelerator: Gathers the columns for the metrics.

    Returns:
        The weights (B, T), and metrics of the mismatch and of the weights over all processes.
    """
    correction = importance_weights(
        log_probs,
        batch.sampling_logprobs,
        batch.turn_ids,
        mask,
        mode=args.vllm_importance_sampling_mode,
        lowest=args.vllm_importance_sampling_clip_min,
        highest=args.vllm_importance_sampling_clip_max,
    )
    columns = (log_probs, batch.sampling_logprobs, correction.weights, correction.clipped.long(), mask.long())
    ours, theirs, weights, clipped, counted = (
        accelerator.gather(accelerator.pad_across_processes(column, dim=1)) for column in columns
    )
    return correction.weights, mismatch_metrics(ours, theirs, weights, clipped.bool(), counted.bool())
