"""The critic's loss and its explained variance."""

from __future__ import annotations

import torch


def value_errors(
    values: torch.Tensor, old_values: torch.Tensor, targets: torch.Tensor, clip_range: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute half the squared error of each value, with PPO's optional clipping.

    Without ``clip_range`` the loss is ``(V - R)^2 / 2``. With it, the loss is the maximum of that and the same error of
    ``V`` clipped to within ``clip_range`` of ``V_old`` (the value loss of OpenAI baselines' PPO2; the PPO paper does not
    describe it). A value that has already moved that far towards its target gets no gradient.

    Args:
        values: Any shape, with gradient.
        old_values: Same shape, of the critic when the batch was drawn.
        targets: Same shape, lambda returns.
        clip_range: In units of the return; None does not clip.

    Returns:
        The losses, and a bool tensor that is True where the loss was clipped; both of the same shape.
    """
    losses = (values - targets) ** 2 / 2
    if clip_range is None:
        return losses, torch.zeros_like(losses, dtype=torch.bool)
    held = old_values + (values - old_values).clamp(-clip_range, clip_range)
    clipped = (held - targets) ** 2 / 2
    return torch.maximum(losses, clipped), clipped > losses


def explained_variance(values: torch.Tensor, targets: torch.Tensor) -> float:
    """Compute ``1 - Var(targets - values) / Var(targets)``: 1 for a perfect critic, 0 for the mean, below 0 if worse.

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
