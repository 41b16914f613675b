"""Discounted returns and generalized advantage estimates of turns."""

from __future__ import annotations

import torch

from agile_trainers.objectives.segments import spread_to_tokens


def discounted_returns(turn_rewards: torch.Tensor, turn_mask: torch.Tensor, gamma: float) -> torch.Tensor:
    """Compute the discounted return from each turn on, ``G_k = r_k + gamma * G_{k+1}``.

    The discount is per turn and does not depend on the number of tokens.

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


def gae(
    turn_rewards: torch.Tensor,
    values: torch.Tensor,
    final_values: torch.Tensor,
    turn_mask: torch.Tensor,
    *,
    gamma: float,
    gae_lambda: float,
) -> torch.Tensor:
    """Compute generalized advantage estimates over turns (Schulman et al., 2016, eq. 16; a turn is one step).

    ``A_k = delta_k + gamma * lambda * A_{k+1}`` with ``delta_k = r_k + gamma * V(s_{k+1}) - V(s_k)``; after the last
    turn, ``V`` is ``final_values`` and ``A`` is 0.

    Args:
        turn_rewards: (B, K).
        values: (B, K), V(s_k) before turn k's action.
        final_values: (B,), the value after the last turn: V(final state) for an episode truncated by a limit, 0 for one
            that the environment ended.
        turn_mask: (B, K) bool, the turns that happened; they come first in every row.
        gamma: Discount per turn, in [0, 1].
        gae_lambda: Lambda per turn, in [0, 1].

    Returns:
        (B, K), 0 where no turn happened. ``A_k + V(s_k)`` is the lambda return, the critic's target.
    """
    advantages = torch.zeros_like(values)
    running, following = torch.zeros_like(final_values), final_values
    for k in range(values.size(1) - 1, -1, -1):
        happened = turn_mask[:, k]
        delta = turn_rewards[:, k] + gamma * following - values[:, k]
        running = torch.where(happened, delta + gamma * gae_lambda * running, running)
        following = torch.where(happened, values[:, k], following)
        advantages[:, k] = torch.where(happened, running, 0.0)
    return advantages


def token_gae(lambda_returns: torch.Tensor, token_values: torch.Tensor, turn_ids: torch.Tensor) -> torch.Tensor:
    """Compute advantages of single tokens: the reward is on a turn's last token, discount and lambda are 1 inside a turn.

    Inside a turn the sum of the deltas telescopes. A token's advantage is therefore the lambda return of its turn (see
    :func:`gae`) minus the value before that token, independent of the turn's length.

    Args:
        lambda_returns: (B, K).
        token_values: (B, T), the value of the state in which the token was chosen, read at the token before it.
        turn_ids: (B, T) int64.

    Returns:
        (B, T), 0 outside actions.
    """
    return torch.where(turn_ids >= 0, spread_to_tokens(lambda_returns, turn_ids) - token_values, 0.0)
