"""Turn-level importance ratios as a change of variables on the log-probabilities, and KL penalties.

TRL's loss uses ``exp(logp - old_logp)`` per token. Passing ``old + pool(logp - old)`` instead of ``logp`` gives the
turn's ratio, for every ``loss_type``, without copying the loss. With one turn, mean pooling is the sequence ratio of
GSPO (Zheng et al., 2025, eq. 7); with a turn per token it is the token ratio.

The penalties, for use in rewards and advantages, are plain log-ratios ``log pi - log ref`` of the tokens that were sampled:
an unbiased estimate of KL(policy || reference) whose score-function gradient is the KL's own. (k3, which TRL's loss uses,
has the same mean but would have the wrong gradient inside a reward.)
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
