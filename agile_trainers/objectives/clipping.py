"""Importance ratios and clipping of single tokens, as TRL's losses compute them."""

from __future__ import annotations

import torch

_TWO_SIDED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


def importance_ratios(log_ratio: torch.Tensor, mask: torch.Tensor, per_sequence: bool) -> torch.Tensor:
    """Compute the ratio of each token, which is that of its whole episode with ``per_sequence``.

    Args:
        log_ratio: (B, T), log-probability under the policy minus that under the policy that the update started from.
        mask: (B, T) bool, tokens that enter the loss.
        per_sequence: Use the geometric mean over the episode's tokens (GSPO).

    Returns:
        (B, T).
    """
    if per_sequence:
        mean = (log_ratio * mask).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
        log_ratio = mean.expand_as(log_ratio)
    return log_ratio.exp()


def is_clipped(
    ratios: torch.Tensor,
    advantages: torch.Tensor,
    loss_type: str,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None = None,
) -> torch.Tensor:
    """Tell which tokens TRL's loss clips.

    With ``grpo``, ``bnpo``, ``dr_grpo``, ``dapo`` and ``luspo`` these are the tokens whose ratio gets no gradient: above
    ``1 + epsilon_high`` with a positive advantage, below ``1 - epsilon_low`` with a negative one, and above ``delta`` (and
    ``1 + epsilon_high``) with a negative one. With ``cispo`` they are those whose weight is cut to ``epsilon_high``. Other
    losses do not clip.

    Args:
        ratios: (B, T), of :func:`importance_ratios`.
        advantages: (B, T).
        loss_type: TRL's.
        epsilon_low: TRL's ``epsilon``.
        epsilon_high: TRL's.
        delta: TRL's bound for two-sided clipping.

    Returns:
        (B, T) bool. Tokens of advantage 0 have no gradient either way and are not clipped.
    """
    if loss_type == "cispo":
        return (ratios > epsilon_high) & (advantages != 0)
    if loss_type not in _TWO_SIDED:
        return torch.zeros_like(ratios, dtype=torch.bool)
    bound = float("inf") if delta is None else delta
    above = (ratios > min(1 + epsilon_high, bound)) & (advantages > 0)
    below = (ratios < 1 - epsilon_low) & (advantages < 0)
    cut = (ratios > max(1 + epsilon_high, bound)) & (advantages < 0)
    return above | below | cut
