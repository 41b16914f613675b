"""Weights and metrics for the drift between the policy that sampled a batch and the policy that its update starts from.

With ``batches_ahead=n`` a batch is played by a *snapshot* of the policy that is n batches old, and trained from *prox*, the
policy as it is when the update starts. Both score the tokens in the trainer, so that ``log_ratio = prox - snapshot`` holds
no difference between sampler and trainer. That difference is a matter of its own
(:mod:`~agile_trainers.objectives.mismatch`).

Two weights make the expected gradient that of prox, if they are not clipped and the baseline does not depend on the episode:
the product of all ratios of the episode, and, for each reward, the product up to the turn that it was given for (Precup et
al., 2000, "Eligibility traces for off-policy policy evaluation"; per-decision importance sampling). A ratio of a token or of
a turn alone leaves the states distributed as under the snapshot, and later answers as the snapshot gave them.
"""

from __future__ import annotations

import torch

from agile_trainers.objectives import mismatch
from agile_trainers.objectives.returns import discounted_returns
from agile_trainers.objectives.segments import pool_to_turns, spread_to_tokens

MODES = (*mismatch.MODES, "decision")
"""Modes of :func:`drift_weights`: those of the mismatch, and the product of ratios up to the end of the token's turn."""


def drift_weights(
    log_ratio: torch.Tensor, mask: torch.Tensor, turn_ids: torch.Tensor, mode: str, clip_max: float | None = None
) -> torch.Tensor:
    """Compute the weight of each token of a batch that an earlier policy sampled. It multiplies the token's loss.

    Args:
        log_ratio: (B, T), log-probability under prox minus that under the snapshot. Values outside the mask have no
            influence.
        mask: (B, T) bool, the tokens that count.
        turn_ids: (B, T) int64.
        mode: One of ``MODES``. ``"sequence_truncate"`` without a bound is exact with any advantage whose baseline does not
            depend on the episode. ``"decision"`` is exact with advantages that were computed from
            :func:`decision_rewards`.
        clip_max: Largest ratio; it is reduced to this value, or to 0 in the ``mask`` modes. Default: no bound.

    Returns:
        (B, T) float32; 1 on tokens outside the mask.

    Raises:
        ValueError: For another mode.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(map(repr, MODES))}, got {mode!r}.")
    if mode == "decision":
        turns = max(int(turn_ids.max()) + 1, 1)
        weights = spread_to_tokens(decision_weights(log_ratio, mask, turn_ids, turns, clip_max), turn_ids)
        return torch.where(mask, weights, 1.0)
    none = torch.zeros_like(log_ratio)
    return mismatch.importance_weights(log_ratio, none, turn_ids, mask, mode=mode, highest=clip_max).weights


def decision_weights(
    log_ratio: torch.Tensor, mask: torch.Tensor, turn_ids: torch.Tensor, turns: int, clip_max: float | None = None
) -> torch.Tensor:
    """Compute the weight of each turn's reward: the product of the ratios of all tokens up to the end of that turn.

    With ``w`` the weights, ``sum over t' >= t of w[t'] * r[t']`` takes the place of the return from turn t on, before
    returns are computed. Ratios of later turns are left out, since they have the mean 1 whatever happened before; this is
    why it varies less than the product over the episode. A baseline b of turn t must be weighted too, by ``w[t]``:
    the gradient of prox has the mean 0 under prox, not under the snapshot. :func:`decision_rewards` does both.

    Args:
        log_ratio: (B, T), log-probability under prox minus that under the snapshot. Values outside the mask have no
            influence.
        mask: (B, T) bool, the tokens that count.
        turn_ids: (B, T) int64. The turns must come one after another: with calls at once, an answer that is counted as a
            later turn may have come before the reward.
        turns: K.
        clip_max: Bound that larger weights are reduced to. Default: none.

    Returns:
        (B, K) float32. Turns after the last one have its weight.
    """
    gap = torch.where(mask, log_ratio, 0.0).float()
    weights = pool_to_turns(gap, turn_ids, turns, "sum").cumsum(dim=1).exp()
    return weights if clip_max is None else weights.clamp(max=clip_max)


def decision_rewards(
    turn_rewards: torch.Tensor,
    turn_mask: torch.Tensor,
    weights: torch.Tensor,
    gamma: float,
    values: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute rewards whose returns estimate the returns of prox, for a credit rule that knows nothing of the drift.

    The discounted return from turn t on of the result is ``sum over t' >= t of gamma^(t'-t) * w[t'] / w[t] * r[t']``: each
    reward is weighted by the ratios of the turns after t. Multiply the rule's advantages by ``w[t]``, or the loss by
    :func:`drift_weights` in the mode ``"decision"``, and the reward is weighted by ``w[t']`` and the baseline by ``w[t]``.

    The rule must use returns from the turn on. The sum over the whole episode contains earlier rewards, whose weights do
    not contain the turn's answer; advantages of whole trajectories need the weight of the whole sequence.

    ``values`` reduce the variance without a bias (doubly robust: Jiang and Li, 2016). They are what a turn is expected to
    earn before its answer is given; its ratio then weighs the difference to it alone.

    Args:
        turn_rewards: (B, K).
        turn_mask: (B, K) bool, the turns that happened; they come first in every row.
        weights: (B, K), of :func:`decision_weights`.
        gamma: Discount per turn, in [0, 1].
        values: (B, K), estimates of the return from each turn on that do not depend on the turn's answer and what comes
            after it, such as a mean over other episodes. Default: 0.

    Returns:
        (B, K) in the dtype of ``turn_rewards``, 0 where no turn happened. ``turn_rewards`` if all weights are equal.
    """
    weights = weights.double()
    known = torch.where(turn_mask, torch.zeros_like(weights) if values is None else values.double(), 0.0)
    surprises = weights * (turn_rewards + gamma * _of_next(known) - known)
    returns = (
        discounted_returns(surprises, turn_mask, gamma) / weights.clamp(min=torch.finfo(weights.dtype).tiny) + known
    )
    return torch.where(turn_mask, returns - gamma * _of_next(returns), 0.0).to(turn_rewards.dtype)


def _of_next(values: torch.Tensor) -> torch.Tensor:
    """Give each turn the value of the next, (B, K); the last one gets 0."""
    return torch.nn.functional.pad(values[:, 1:], (0, 1))


def dppo_mask(
    log_probs: torch.Tensor,
    snapshot_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    threshold: float,
) -> torch.Tensor:
    """Compute which tokens DPPO trains, taking the snapshot for its behaviour policy and prox for the current one.

    A token is left out if its probability has moved by more than the threshold, and its advantage would move it further
    (Qi et al., 2026, "Rethinking the Trust Region in LLM Reinforcement Learning", https://arxiv.org/abs/2602.04879, eq. 12
    with the binary total variation, eq. 13). The loss of the others has their own, unclipped ratio as its weight (eq. 11):
    that of :func:`drift_weights` in the mode ``"token_truncate"`` without a bound. In the paper the current policy is the
    one that is being updated, and the mask changes from one step of an update to the next; this one does not.

    Args:
        log_probs: (B, T), under prox.
        snapshot_log_probs: (B, T), under the snapshot.
        advantages: (B, T).
        mask: (B, T) bool, the tokens that count. Values elsewhere have no influence.
        threshold: Largest absolute change of a sampled token's probability that is trained further; the authors' script
            has .15.

    Returns:
        (B, T) bool, True on the tokens that are trained; False outside the mask.
    """
    moved = log_probs.float().exp() - snapshot_log_probs.float().exp()
    return mask & ~((moved.abs() > threshold) & (moved * advantages > 0))


def effective_sample_size(log_weights: torch.Tensor) -> float:
    """Compute how many equally weighted samples estimate a mean as well as these: ``(sum w)^2 / sum w^2`` (Kish, 1965).

    Args:
        log_weights: (N,), logarithms of the weights; -inf for a weight of 0. A common factor has no influence.

    Returns:
        Between 1 and N; 0 if no weight is above 0.
    """
    if not (log_weights > -torch.inf).any():
        return 0.0
    return 1.0 / log_weights.double().softmax(dim=0).square().sum().item()


def drift_metrics(log_ratio: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """Measure the drift of a batch, before anything is clipped.

    Args:
        log_ratio: (B, T), log-probability under prox minus that under the snapshot. Values outside the mask have no
            influence.
        mask: (B, T) bool, the tokens that count.

    Returns:
        Under ``drift/``: ``kl``, the k3 estimate of KL(snapshot || prox) in nats a token
        (http://joschu.net/blog/kl-approx.html); ``ratio/min``, ``ratio/mean`` and ``ratio/max`` of the tokens' ratios;
        ``effective_sample_size``, of the episodes weighted by the product of their ratios, as a share of their number. Empty
        without tokens.
    """
    if not mask.any():
        return {}
    gap = log_ratio[mask].double()
    ratio = gap.exp()
    episodes = torch.where(mask, log_ratio, 0.0).double().sum(dim=1)[mask.any(dim=1)]
    values = {
        "kl": (ratio - 1 - gap).mean().item(),
        "ratio/min": ratio.min().item(),
        "ratio/mean": ratio.mean().item(),
        "ratio/max": ratio.max().item(),
        "effective_sample_size": effective_sample_size(episodes) / len(episodes),
    }
    return {f"drift/{name}": value for name, value in values.items()}
