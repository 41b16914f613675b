"""Discounted returns and generalized advantage estimates of turns, and the loss of their values."""

from __future__ import annotations

from functools import partial

import torch

from agile_trainers.objectives.segments import spread_to_tokens


def discounted_returns(
    turn_rewards: torch.Tensor, turn_mask: torch.Tensor, gamma: float, rewarded: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute the discounted return from each turn on, ``G_k = r_k + gamma * G_{k+1}``.

    The discount is per turn and does not depend on the number of tokens. A turn is a call of the model, in the order in
    which calls were submitted. With calls at once, the return of call k is the sum of all rewards that were not given before
    it was submitted, whichever call they belong to: its answer can act on these only, and on each of these.

    Args:
        turn_rewards: (B, K).
        turn_mask: (B, K) bool, the turns that happened; they come first in every row.
        gamma: Discount per turn, in [0, 1]; 1 where calls were made at once.
        rewarded: (B, K) int64, the number of calls whose rewards had been given when call k was submitted: rewards from
            this index on are in its return. Default: k, as in an episode whose turns come one after another.

    Returns:
        (B, K), 0 where no turn happened.

    Raises:
        ValueError: If ``rewarded`` leaves a call's own reward out, or differs from k while gamma is not 1.
    """
    rewards = torch.where(turn_mask, turn_rewards, turn_rewards.new_zeros(()))
    returns = torch.zeros_like(rewards)
    running = rewards.new_zeros(rewards.size(0))
    for k in range(rewards.size(1) - 1, -1, -1):
        running = rewards[:, k] + gamma * running
        returns[:, k] = running
    if rewarded is not None:
        returns = returns.gather(1, _first_rewards(rewarded, turn_mask, gamma))
    return torch.where(turn_mask, returns, returns.new_zeros(()))


def _first_rewards(rewarded: torch.Tensor, turn_mask: torch.Tensor, gamma: float) -> torch.Tensor:
    """Check ``rewarded`` (see :func:`discounted_returns`), and replace it by k where no turn happened."""
    index = torch.arange(turn_mask.size(1), device=turn_mask.device)
    first = torch.where(turn_mask, rewarded, index)
    if wrong := _example((first < 0) | (first > index)):
        raise ValueError(
            f"rewarded[{wrong[0]}, {wrong[1]}] is {int(first[wrong])}, and a call's return has at least its own reward. "
            "Pass the number of calls whose rewards had been given when the call was submitted, from 0 to its own index."
        )
    if gamma != 1.0 and (wrong := _example(first != index)):
        raise ValueError(
            f"gamma={gamma} has no meaning with calls at once: {int(first[wrong])} rewards had been given when call "
            f"{wrong[1]} of episode {wrong[0]} was submitted. A discount per call needs calls that come one after another. "
            "Set gamma=1.0."
        )
    return first


def _example(wrong: torch.Tensor) -> tuple[int, int] | None:
    """Return the row and column of the first True, or None."""
    places = wrong.nonzero()
    return (int(places[0, 0]), int(places[0, 1])) if len(places) else None


def gae(
    turn_rewards: torch.Tensor,
    values: torch.Tensor,
    final_values: torch.Tensor,
    turn_mask: torch.Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    following: torch.Tensor | None = None,
    rewarded: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute generalized advantage estimates over turns (Schulman et al., 2016, eq. 16; a turn is one step).

    ``A_k = delta_k + gamma * lambda * A_{k+1}`` with ``delta_k = r_k + gamma * V(s_{k+1}) - V(s_k)``; after the last
    turn, ``V`` is ``final_values`` and ``A`` is 0.

    In an episode of several paths, a step leads from call k to ``j = following[k]``, the next call on its path:
    ``A_k = (rewards from rewarded[k] up to rewarded[j], discounted) + gamma^(j-k) * V(s_j) - V(s_k)
    + gamma^(j-k) * lambda * A_j``. Lambda counts steps on the path, gamma counts calls. A call without a next one gets
    the plain return of the rest of the episode minus ``V(s_k)``: no later prompt contains its answer, so that no later value
    says what the answer was worth.

    With ``weights`` an episode of another policy is weighted per decision, and each turn's ``delta`` counts ``weights[k]``
    times: ``A_k = sum over j >= k of (gamma * lambda)^(j-k) * weights[j] * delta_j``. At lambda 1 the gradient has the
    expectation of ``sum over j >= k of gamma^(j-k) * weights[j] * r_j - weights[k] * V(s_k)``, and values of later turns
    reduce its variance (doubly robust: Jiang and Li, 2016). It is exact with any values that do not depend on the turn's
    answer and what comes after it, such as means over other episodes.

    Args:
        turn_rewards: (B, K).
        values: (B, K), V(s_k) before turn k's action.
        final_values: (B,), the value after the last turn: V(final state) for an episode truncated by a limit, 0 for one
            that the environment ended. In an episode of several paths it is biased for calls that the final state does not
            contain; they get it as well, as the last part of their return.
        turn_mask: (B, K) bool, the turns that happened; they come first in every row.
        gamma: Discount per turn, in [0, 1]; 1 where calls were made at once.
        gae_lambda: Lambda per turn, in [0, 1].
        following: (B, K) int64, the index of the next call on the path; K, or any call that did not happen, for none.
            Default: k + 1. It is the first later call whose parent is call k, and a parent is one call: the longest whose
            prompt and answer a prompt begins with, the last of equals. Were it every call that fits, a value would be
            bootstrapped from by siblings that were thrown away, which it says nothing of.
        rewarded: (B, K) int64, see :func:`discounted_returns`. Default: k.
        weights: (B, K), of :func:`~agile_trainers.objectives.drift.decision_weights`. Default: 1.

    Returns:
        (B, K), 0 where no turn happened. Without weights, ``A_k + V(s_k)`` is the lambda return, the critic's target.

    Raises:
        ValueError: If a next call does not come later, or as :func:`discounted_returns` does.
    """
    weights = torch.ones_like(values) if weights is None else weights.to(values.dtype)
    if following is None and rewarded is None:
        return _gae_one_by_one(turn_rewards, values, final_values, turn_mask, gamma, gae_lambda, weights, None)
    index = torch.arange(values.size(1), device=values.device)
    rewards = torch.where(turn_mask, turn_rewards, turn_rewards.new_zeros(()))
    following = (index + 1).expand_as(values) if following is None else following
    first = _first_rewards(index.expand_as(values) if rewarded is None else rewarded, turn_mask, gamma)
    if wrong := _example(turn_mask & (following <= index)):
        raise ValueError(
            f"following[{wrong[0]}, {wrong[1]}] is {int(following[wrong])}, but the next call on a path comes later. Pass "
            f"its index, or {len(index)} for none."
        )
    # The end of the episode is a call behind the last one, whose value is `final_values` and whose advantage is 0.
    later = following.clamp(0, len(index) - 1)
    goes_on = (following < len(index)) & turn_mask.gather(1, later)
    end = turn_mask.sum(dim=1, keepdim=True)
    next_values = torch.where(goes_on, values.gather(1, later), final_values[:, None])
    last = torch.where(goes_on, first.gather(1, later), end)
    next_values = weights.gather(1, (last - 1).clamp(min=0)) * next_values
    discounts = gamma ** (torch.where(goes_on, following, end) - index).clamp(min=0).double()
    decays = (discounts * gae_lambda).to(values.dtype)
    discounts = discounts.to(values.dtype)
    advantages = torch.zeros_like(values)
    for k in range(len(index) - 1, -1, -1):
        step = (index >= first[:, k, None]) & (index < last[:, k, None])
        discounted = gamma ** (index - k).clamp(min=0).to(rewards.dtype) * weights * rewards
        reward = torch.where(step, discounted, 0.0).sum(dim=1)
        delta = reward + discounts[:, k] * next_values[:, k] - weights[:, k] * values[:, k]
        after = torch.where(goes_on[:, k], advantages.gather(1, later[:, k, None])[:, 0], 0.0)
        advantages[:, k] = torch.where(turn_mask[:, k], delta + decays[:, k] * after, 0.0)
    return advantages


def _gae_one_by_one(
    turn_rewards: torch.Tensor,
    values: torch.Tensor,
    final_values: torch.Tensor,
    turn_mask: torch.Tensor,
    gamma: float,
    gae_lambda: float,
    weights: torch.Tensor,
    traces: torch.Tensor | None,
) -> torch.Tensor:
    """Compute :func:`gae` of turns one after another. Each turn's ``traces`` (B, K) multiply what comes after it."""
    advantages = torch.zeros_like(values)
    running, next_values = torch.zeros_like(final_values), final_values
    for k in range(values.size(1) - 1, -1, -1):
        happened = turn_mask[:, k]
        delta = turn_rewards[:, k] + gamma * next_values - values[:, k]
        after = gamma * gae_lambda * (running if traces is None else traces[:, k] * running)
        running = torch.where(happened, weights[:, k] * delta + after, running)
        next_values = torch.where(happened, values[:, k], next_values)
        advantages[:, k] = torch.where(happened, running, 0.0)
    return advantages


def vtrace_targets(
    turn_rewards: torch.Tensor,
    values: torch.Tensor,
    final_values: torch.Tensor,
    turn_mask: torch.Tensor,
    ratios: torch.Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    following: torch.Tensor | None = None,
    rewarded: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the critic's targets from episodes of another policy, over turns (V-trace: Espeholt et al., 2018, eq. 1).

    ``V(s_k) + sum over j >= k of (gamma * lambda)^(j-k) * ratios[k] * ... * ratios[j] * delta_j``, with the deltas of
    :func:`gae`. Without a bound on the ratios its expectation, of the other policy's episodes that reach ``s_k``, is that of
    the lambda return of the policy's own. With all ratios 1 it is the lambda return. On paths the weights of :func:`gae` are
    products of the ratios from turn k on.

    Args:
        turn_rewards: (B, K).
        values: (B, K), see :func:`gae`.
        final_values: (B,).
        turn_mask: (B, K) bool.
        ratios: (B, K), of :func:`~agile_trainers.objectives.drift.turn_ratios`. A bound on them is both of V-trace's.
        gamma: Discount per turn, in [0, 1].
        gae_lambda: Lambda per turn, in [0, 1].
        following: (B, K) int64. Default: k + 1.
        rewarded: (B, K) int64. Default: k.

    Returns:
        (B, K), 0 where no turn happened.
    """
    ratios, episodes = ratios.to(values.dtype), (turn_rewards, values, final_values, turn_mask)
    if following is None and rewarded is None:
        surprises = _gae_one_by_one(*episodes, gamma, gae_lambda, ratios, ratios)
    else:
        index, surprises = torch.arange(values.size(1), device=values.device), torch.zeros_like(values)
        surprise = partial(gae, *episodes, gamma=gamma, gae_lambda=gae_lambda, following=following, rewarded=rewarded)
        for k in range(values.size(1)):
            surprises[:, k] = surprise(weights=torch.where(index >= k, ratios, 1.0).cumprod(dim=1))[:, k]
    return torch.where(turn_mask, values + surprises, 0.0)


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
