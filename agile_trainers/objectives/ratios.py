"""Turn-level importance ratios as a change of variables on the log-probabilities.

TRL's loss uses ``exp(logp - old_logp)`` per token. Passing ``old + pool(logp - old)`` instead of ``logp`` gives the
turn's ratio, for every ``loss_type``, without copying the loss. With one turn, mean pooling is the sequence ratio of
GSPO (Zheng et al., 2025, eq. 7); with a turn per token it is the token ratio.
"""

from __future__ import annotations

import torch

from agile_trainers.objectives.segments import Reduction, pool_to_turns, spread_to_tokens


def pool_log_probs(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, turn_ids: torch.Tensor, num_turns: int, pooling: Reduction
) -> torch.Tensor:
    """Return log-probabilities whose ratio to ``old_log_probs`` is the same on all tokens of a turn.

    Args:
        log_probs: (B, T), with gradient.
        old_log_probs: (B, T), of the policy that sampled; treated as a constant.
        turn_ids: (B, T) int64.
        num_turns: K.
        pooling: ``"mean"`` (geometric mean of the turn's token ratios) or ``"sum"`` (their product). With ``"sum"`` the
            loss must divide each token's advantage by its turn's length, or a turn's gradient counts that many times.

    Returns:
        (B, T) float32, or float64 if ``log_probs`` are; on tokens outside actions ``log_probs`` itself.
    """
    log_probs = log_probs.to(torch.promote_types(log_probs.dtype, torch.float32))
    old_log_probs = old_log_probs.detach().to(log_probs.dtype)
    pooled = spread_to_tokens(pool_to_turns(log_probs - old_log_probs, turn_ids, num_turns, pooling), turn_ids)
    return torch.where(turn_ids >= 0, old_log_probs + pooled, log_probs)
