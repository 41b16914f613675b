"""Chooses the groups of a batch whose rewards vary most."""

from __future__ import annotations

import torch


def group_variances(rewards: torch.Tensor) -> torch.Tensor:
    """Compute the variance of each group's rewards.

    Args:
        rewards: (groups, members), NaN for members that do not count.

    Returns:
        (groups,) float64, with divisor n - 1; 0 for groups of less than two members that count, and where the spread is
        that of rounding (a standard deviation of at most ``1e-6 * max(1, |mean|)``).
    """
    values = rewards.double()
    there = ~values.isnan()
    count = there.sum(dim=1)
    mean = values.nansum(dim=1) / count.clamp(min=1)
    squares = torch.where(there, (values - mean[:, None]) ** 2, 0.0).sum(dim=1)
    variance = squares / (count - 1).clamp(min=1)
    return torch.where(variance.sqrt() > 1e-6 * mean.abs().clamp(min=1.0), variance, 0.0)


def top_share(variances: torch.Tensor, share: float) -> torch.Tensor:
    """Choose the fewest groups, from the largest variance down, that hold a share of the sum of variances (RAGEN-2).

    Wang et al., 2026 (https://huggingface.co/papers/2604.06268). Their code sums standard deviations instead of variances
    in its linear top-p mode, which otherwise is this rule.

    Args:
        variances: (groups,), not negative.
        share: In (0, 1].

    Returns:
        (groups,) bool. A group without variance is never chosen; of equal variances the first are.
    """
    order = variances.argsort(descending=True, stable=True)
    ordered = variances[order].double()
    # A group is needed if those before it hold less than the share, up to rounding.
    before = ordered.cumsum(dim=0) - ordered
    needed = (before < share * ordered.sum() * (1 - 1e-9)) & (ordered > 0)
    return torch.zeros_like(variances, dtype=torch.bool).index_put((order,), needed)
