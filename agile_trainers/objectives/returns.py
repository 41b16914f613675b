"""Returns of turns."""

from __future__ import annotations

import torch


def discounted_returns(turn_rewards: torch.Tensor, turn_mask: torch.Tensor, gamma: float) -> torch.Tensor:
    """Discounted return from each turn on, ``G_k = r_k + gamma * G_{k+1}``.

    The discount is per turn; a turn's length in tokens plays no part.

    Args:
        turn_rewards: (B, K).
        turn_mask: (B, K) bool, the turns that happened; they come first in every row.
        gamma: Discount per turn, in [0, 1].

    Returns:
        (B, K), 0 where no turn happened.
    """
    rewards = torch.where(turn_mask, turn_rewards, turn_rewards.new_zeros(()))
    returns = torch.zeros_like(rewards)
    running = rewards.new_zeros(rewards.size(0))
    for k in range(rewards.size(1) - 1, -1, -1):
        running = rewards[:, k] + gamma * running
        returns[:, k] = running
    return torch.where(turn_mask, returns, returns.new_zeros(()))
