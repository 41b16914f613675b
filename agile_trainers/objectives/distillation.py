"""Divergence of the policy from a teacher: credit from the log-ratios of sampled tokens, and of whole distributions."""

from __future__ import annotations

import torch

IMMEDIATE, RETURN_TO_GO = "immediate", "return_to_go"
REVERSE, FORWARD = "distribution_reverse", "distribution_forward"
SAMPLED = (IMMEDIATE, RETURN_TO_GO)
"""Gradients that log-probabilities of sampled tokens are enough for."""
GRADIENTS = (*SAMPLED, REVERSE, FORWARD)
"""The gradients of a teacher.

With p the policy, q the teacher and s_t the state before token t, the sum over an episode's tokens descends, in expectation:

- ``immediate`` and ``distribution_reverse``: sum_t KL(p(.|s_t) || q(.|s_t)), the visited states held fixed;
- ``return_to_go``: KL(p || q) over whole episodes, which credits a token with the divergence of the states that it leads to;
- ``distribution_forward``: sum_t KL(q(.|s_t) || p(.|s_t)), the visited states held fixed.

No advantage is made of the divergence of whole distributions: it does not depend on the token that was sampled, so that its
expected gradient is 0.
"""


def teacher_credit(
    policy: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor, gradient: str
) -> torch.Tensor:
    """Credit each sampled token with log-ratios of the teacher over the policy that sampled.

    Args:
        policy: (B, T), log-probabilities under the policy, without gradient.
        teacher: (B, T), under the teacher.
        mask: (B, T) bool, the tokens that count; the tokens of an episode are in the order in which they were sampled.
        weights: (B, T), weight of each token's divergence.
        gradient: ``"immediate"`` or ``"return_to_go"``.

    Returns:
        (B, T): the weighted log-ratio of the token, or the sum of those from the token to the end of its episode; 0 where
        nothing counts.
    """
    ratios = torch.where(mask, weights * (teacher - policy), 0.0)
    if gradient == IMMEDIATE:
        return ratios
    return torch.where(mask, ratios.flip(1).cumsum(1).flip(1), 0.0)


def clipped_objective(
    log_ratio: torch.Tensor, credit: torch.Tensor, epsilon: float, epsilon_high: float
) -> torch.Tensor:
    """Compute PPO's clipped objective of each token (https://huggingface.co/papers/1707.06347, eq. 7).

    Args:
        log_ratio: (B, T), of the policy over the one that sampled, with gradient.
        credit: (B, T).
        epsilon: How far below 1 a ratio counts.
        epsilon_high: How far above 1.
    """
    ratio = log_ratio.exp()
    return torch.minimum(ratio * credit, ratio.clamp(1 - epsilon, 1 + epsilon_high) * credit)


def divergence(
    policy: torch.Tensor, teacher: torch.Tensor, kept: torch.Tensor | None, *, forward: bool
) -> torch.Tensor:
    """Compute the divergence of next-token distributions.

    Args:
        policy: (R, V), logits of the policy.
        teacher: (R, V), logits of the teacher, without gradient.
        kept: (R, V) bool, the tokens that both are renormalised over. None: all.
        forward: KL(teacher || policy) in place of KL(policy || teacher).

    Returns:
        (R,), in nats.
    """
    if kept is not None:
        policy, teacher = (logits.masked_fill(~kept, -torch.inf) for logits in (policy, teacher))
    policy, teacher = policy.log_softmax(dim=-1), teacher.log_softmax(dim=-1)
    ratio = teacher - policy if forward else policy - teacher
    if kept is not None:  # outside, it is the difference of two infinities
        ratio = torch.where(kept, ratio, 0.0)
    return ((teacher if forward else policy).exp() * ratio).sum(dim=-1)


def fading_coefficient(start: float, length: float | None, step: int, max_steps: int) -> float:
    """Return a coefficient that falls linearly to 0.

    Args:
        start: Its value before the first update.
        length: Number of updates after which it is 0; at most 1: their share of the run. None: it stays.
        step: Number of updates that were made.
        max_steps: Number of updates of the run.
    """
    if length is None:
        return start
    return start * max(1 - step / (length * max_steps if length <= 1 else length), 0.0)
