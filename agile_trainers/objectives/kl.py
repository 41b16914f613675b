"""KL penalties against the reference policy, for use in rewards and advantages.

Both forms use the plain log-ratio ``log pi - log ref`` of the tokens that were sampled: an unbiased estimate of KL(policy ||
reference) whose score-function gradient is the KL's own. (k3, which TRL's loss uses, has the same mean but would have the
wrong gradient inside a reward.)
"""

from __future__ import annotations

import torch

from agile_trainers.objectives.segments import pool_to_turns, spread_to_tokens


def turn_log_ratio(
    log_probs: torch.Tensor, reference: torch.Tensor, turn_ids: torch.Tensor, turns: int
) -> torch.Tensor:
    """Sum the log-ratios of each turn's tokens; the expectation is the turn's KL divergence.

    Args:
        log_probs: (B, T), of the policy that sampled.
        reference: (B, T).
        turn_ids: (B, T) int64.
        turns: K.

    Returns:
        (B, K), 0 where no turn happened.
    """
    return pool_to_turns(log_probs - reference, turn_ids, turns, "sum")


def token_kl_penalty(
    log_probs: torch.Tensor, reference: torch.Tensor, turn_ids: torch.Tensor, unit: str
) -> torch.Tensor:
    """Compute the KL penalty of each token, which ``beta`` scales and the advantage is reduced by, as a constant.

    Args:
        log_probs: (B, T), of the policy that sampled.
        reference: (B, T).
        turn_ids: (B, T) int64.
        unit: What the importance ratio spans: ``"token"``, ``"turn"`` or ``"sequence"``. That is one action, whose
            log-ratio is the sum over its tokens, and the divergence whose gradient this is: of the next token given the
            tokens before it, of the turn given the turns before it, or of the whole episode.

    Returns:
        (B, T), 0 outside actions.
    """
    ratio = torch.where(turn_ids >= 0, log_probs - reference, 0.0).detach()
    if unit == "token":
        return ratio
    ids = turn_ids if unit == "turn" else turn_ids.clamp(max=0)
    turns = max(int(ids.max()) + 1, 1)
    return spread_to_tokens(pool_to_turns(ratio, ids, turns, "sum"), ids)
