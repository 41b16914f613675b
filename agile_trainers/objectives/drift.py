"""Weights and metrics for the drift between the policy that sampled a batch and the policy that its update starts from.

With ``batches_ahead=n`` a batch is played by a *snapshot* of the policy that is n batches old, and trained from *prox*, the
policy as it is when the update starts. Both score the tokens in the trainer, so that ``log_ratio = prox - snapshot`` holds
no difference between sampler and trainer. That difference is a matter of its own
(:mod:`~agile_trainers.objectives.mismatch`).

Two weights make the expected gradient that of prox, if they are not clipped and the baseline does not depend on the episode:
the product of all ratios of the episode, and, for each reward, the product up to the turn that it was given for (Precup et
al., 2000, "Eligibility traces for off-policy policy evaluation"; per-decision importance sampling). A ratio of a token or of
a turn alone leaves the states distributed as under the snapshot, and later answers as the snapshot gave them.

Most weights multiply the loss of a token. The weights per decision are one for each reward of a return, and are applied
where returns are computed, by :func:`~agile_trainers.objectives.returns.gae`. A critic's targets begin in the turn's own
state, whatever led there, and need the product of the ratios from that turn on
(:func:`~agile_trainers.objectives.returns.vtrace_targets`).
"""

from __future__ import annotations

import torch

from agile_trainers.objectives import mismatch
from agile_trainers.objectives.segments import pool_to_turns

DECISION = "decision_truncate"
"""Correction by :func:`decision_weights`, in the credit."""
CORRECTIONS = (*mismatch.MODES, DECISION)
"""Corrections of drift by name: those of :func:`drift_weights`, whose names are the mismatch's, and one more."""


def drift_weights(
    log_ratio: torch.Tensor, mask: torch.Tensor, turn_ids: torch.Tensor, mode: str, clip_max: float | None = None
) -> torch.Tensor:
    """Compute the weight of each token of a batch that an earlier policy sampled. It multiplies the token's loss.

    Args:
        log_ratio: (B, T), log-probability under prox minus that under the snapshot. Values outside the mask have no
            influence.
        mask: (B, T) bool, the tokens that count.
        turn_ids: (B, T) int64.
        mode: One of the mismatch's modes (:data:`agile_trainers.objectives.mismatch.MODES`). ``"sequence_truncate"`` without
            a bound is exact with any advantage whose baseline does not depend on the episode.
        clip_max: Largest ratio; it is reduced to this value, or to 0 in the ``mask`` modes. Default: no bound.

    Returns:
        (B, T) float32; 1 on tokens outside the mask.

    Raises:
        ValueError: For another mode.
    """
    none = torch.zeros_like(log_ratio)
    return mismatch.importance_weights(log_ratio, none, turn_ids, mask, mode=mode, highest=clip_max).weights


def decision_weights(
    log_ratio: torch.Tensor, mask: torch.Tensor, turn_ids: torch.Tensor, turns: int, clip_max: float | None = None
) -> torch.Tensor:
    """Compute the weight of each turn's reward: the product of the ratios of all tokens up to the end of that turn.

    With ``w`` the weights, ``sum over t' >= t of w[t'] * r[t']`` takes the place of the return from turn t on. Ratios of
    later turns are left out, since they have the mean 1 whatever happened before; this is why it varies less than the
    product over the episode. A baseline b of turn t must be weighted too, by ``w[t]``: the gradient of prox has the mean 0
    under prox, not under the snapshot. :func:`~agile_trainers.objectives.returns.gae` does both.

    The sum over the whole episode contains earlier rewards, whose weights do not contain the turn's answer: advantages of
    whole trajectories need the weight of the whole sequence.

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
    weights = _turn_log_ratios(log_ratio, mask, turn_ids, turns).cumsum(dim=1).exp()
    return weights if clip_max is None else weights.clamp(max=clip_max)


def turn_ratios(
    log_ratio: torch.Tensor, mask: torch.Tensor, turn_ids: torch.Tensor, turns: int, clip_max: float | None = None
) -> torch.Tensor:
    """Compute each turn's own ratio: the product of the ratios of its tokens, for the targets of a critic.

    Args:
        log_ratio: (B, T), see :func:`decision_weights`.
        mask: (B, T) bool, the tokens that count.
        turn_ids: (B, T) int64.
        turns: K.
        clip_max: Bound that larger ratios are reduced to. Default: none.

    Returns:
        (B, K) float32, 1 for turns that did not happen.
    """
    ratios = _turn_log_ratios(log_ratio, mask, turn_ids, turns).exp()
    return ratios if clip_max is None else ratios.clamp(max=clip_max)


def _turn_log_ratios(log_ratio: torch.Tensor, mask: torch.Tensor, turn_ids: torch.Tensor, turns: int) -> torch.Tensor:
    return pool_to_turns(torch.where(mask, log_ratio, 0.0).float(), turn_ids, turns, "sum")


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
