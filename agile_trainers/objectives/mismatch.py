"""Importance weights and metrics for the mismatch between the sampler's and the trainer's log-probabilities.

A token from the sampler is weighted by ``pi_trainer / pi_sampler``, truncated or masked to limit the variance (Yao et al.,
2025, https://fengyao.notion.site/off-policy-rl). Modes, bounds and metric names are TRL's; the turn modes apply the same
rule to the tokens of one turn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from agile_trainers.objectives.segments import pool_to_turns, spread_to_tokens

UNITS = ("token", "turn", "sequence")
MODES = tuple(f"{unit}_{bound}" for unit in UNITS for bound in ("truncate", "mask"))
"""Correction modes: the unit over which log-ratios are summed, and ``truncate`` (to the bound) or ``mask`` (to 0)."""


@dataclass
class Correction:
    """Importance weights of a batch."""

    weights: torch.Tensor
    """(B, T) float32; 1 on tokens outside the mask."""
    clipped: torch.Tensor
    """(B, T) bool, tokens whose ratio was out of bounds."""


def importance_weights(
    log_probs: torch.Tensor,
    sampling_log_probs: torch.Tensor,
    turn_ids: torch.Tensor,
    mask: torch.Tensor,
    *,
    mode: str,
    lowest: float | None = None,
    highest: float | None = None,
) -> Correction:
    """Compute the importance weight of each token of a batch that was drawn from another distribution.

    Args:
        log_probs: (B, T), of the trainer's policy as it was then.
        sampling_log_probs: (B, T), as the sampler reported them.
        turn_ids: (B, T) int64.
        mask: (B, T) bool, the tokens that count. Values elsewhere have no influence.
        mode: One of ``MODES``. The ratio is the product over the token, its turn or the whole episode.
        lowest: Lower bound of the ratio. Default: none.
        highest: Upper bound of the ratio. Default: none.

    Raises:
        ValueError: For another mode.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(map(repr, MODES))}, got {mode!r}.")
    unit, bound = mode.split("_")
    log_ratio = torch.where(mask, log_probs - sampling_log_probs, 0.0).float()
    if unit != "token":
        ids = torch.where(mask, turn_ids if unit == "turn" else 0, -1)
        log_ratio = spread_to_tokens(pool_to_turns(log_ratio, ids, max(int(ids.max()) + 1, 1), "sum"), ids)
    ratio = log_ratio.exp()
    low, high = -math.inf if lowest is None else lowest, math.inf if highest is None else highest
    clipped = mask & ((ratio < low) | (ratio > high))
    weights = ratio.clamp(low, high) if bound == "truncate" else ratio.masked_fill(clipped, 0.0)
    return Correction(torch.where(mask, weights, 1.0), clipped)


def mismatch_metrics(
    log_probs: torch.Tensor,
    sampling_log_probs: torch.Tensor,
    weights: torch.Tensor,
    clipped: torch.Tensor,
    mask: torch.Tensor,
) -> dict[str, float]:
    """Measure the training-inference mismatch over the tokens of a batch.

    Args:
        log_probs: (B, T), of the trainer.
        sampling_log_probs: (B, T), of the sampler.
        weights: (B, T), of :func:`importance_weights`.
        clipped: (B, T) bool, likewise.
        mask: (B, T) bool, the tokens that count.

    Returns:
        Under ``sampling/``: ``sampling_logp_difference/p95`` of the absolute difference in nats; ``kl``, the k3 estimate of
        KL(sampler || trainer) per token (http://joschu.net/blog/kl-approx.html); ``importance_sampling_ratio/min``,
        ``/mean`` and ``/max`` of the weights; ``clipped``, the share of tokens out of bounds. Empty without
        tokens.
    """
    if not mask.any():
        return {}
    log_ratio = (log_probs - sampling_log_probs)[mask].double()
    difference, weights = log_ratio.abs(), weights[mask]
    # `torch.quantile` takes no more than 16 million elements.
    p95 = difference.kthvalue(math.ceil(0.95 * len(difference))).values
    values = {
        "sampling_logp_difference/p95": p95,
        "kl": (log_ratio.exp() - 1 - log_ratio).mean(),
        "importance_sampling_ratio/min": weights.min(),
        "importance_sampling_ratio/mean": weights.mean(),
        "importance_sampling_ratio/max": weights.max(),
        "clipped": clipped[mask].double().mean(),
    }
    return {f"sampling/{name}": value.item() for name, value in values.items()}
