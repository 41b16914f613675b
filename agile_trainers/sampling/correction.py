"""Computes importance weights that correct the loss for the training-inference mismatch."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator

from agile_trainers.objectives.mismatch import importance_weights, mismatch_metrics
from agile_trainers.types import TurnBatch


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
