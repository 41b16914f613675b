"""How far a critic is off: its loss, and what is logged about it."""

from __future__ import annotations

import torch


def value_errors(
    values: torch.Tensor, old_values: torch.Tensor, targets: torch.Tensor, clip_range: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Half the squared error of each value, clipped as the policy's ratio is.

    Without ``clip_range``, ``(V - R)^2 / 2``. With it, the larger of that and the same of ``V`` held within
    ``clip_range`` of ``V_old`` (the value loss of OpenAI baselines' PPO2, which the PPO paper does not describe): a value
    that has moved that far towards its target gets no gradient.

    Args:
        values: Any shape, with gradient.
        old_values: Same shape, of the critic when the batch was drawn.
        targets: Same shape, lambda returns.
        clip_range: In units of the return; None does not clip.

    Returns:
        The losses, and a bool tensor telling which of them were clipped; both of the same shape.
    """
    losses = (values - targets) ** 2 / 2
    if clip_range is None:
        return losses, torch.zeros_like(losses, dtype=torch.bool)
    held = old_values + (values - old_values).clamp(-clip_range, clip_range)
    clipped = (held - targets) ** 2 / 2
    return torch.maximum(losses, clipped), clipped > losses


def explained_variance(values: torch.Tensor, targets: torch.Tensor) -> float:
    """``1 - Var(targets - values) / Var(targets)``: 1 is a perfect critic, 0 one that knows the mean only, below 0 worse.

    Args:
        values: (N,).
        targets: (N,).

    Returns:
        A float; NaN if there are fewer than two targets or they do not differ (spread below 1e-6 max(1, |mean|)).
    """
    targets, errors = targets.double(), (targets - values).double()
    if targets.numel() < 2 or targets.std() <= 1e-6 * max(1.0, abs(targets.mean().item())):
        return float("nan")
    return (1 - errors.var() / targets.var()).item()
