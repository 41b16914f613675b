"""GAE with the exact value function is an unbiased estimate of the policy gradient, whatever lambda: over all episodes."""

from __future__ import annotations

import pytest
import torch
from enumerated import (
    EPISODES,
    GAMMA,
    LEVELS,
    TURN_IDS,
    estimate,
    exact_gradient,
    exact_return_gradient,
    grpo,
    relative_error,
    turn_rewards,
)

from agile_trainers.objectives.returns import gae, token_gae


def exact_values(table, gamma):
    """(8, 4): before each token of each episode, the expected discounted return of the turns from this one on."""
    rewards, probability = turn_rewards(EPISODES), table.probability().detach()
    first, second = rewards[:, 0] + gamma * rewards[:, 1], rewards[:, 1]

    def expected(returns, known):
        same = (EPISODES[:, None, :known] == EPISODES[None, :, :known]).all(-1) * probability
        return (same @ returns) / same.sum(1)

    return torch.stack([expected(first, 0), torch.full((8,), 99.0), expected(second, 1), expected(second, 2)], 1)


def turn_gae(table, gamma, gae_lambda):
    values = exact_values(table, gamma)[:, [0, 2]]
    mask = torch.ones(8, 2) > 0
    return gae(turn_rewards(EPISODES), values, torch.zeros(8), mask, gamma=gamma, gae_lambda=gae_lambda), values


@pytest.mark.parametrize("gae_lambda", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("level", LEVELS, ids=["token", "turn-mean", "turn-sum"])
def test_turn_gae_estimates_the_exact_policy_gradient(embedded_model, tmp_path, table, level, gae_lambda):
    trainer = grpo(embedded_model, tmp_path, 2, **level)
    advantages, _ = turn_gae(table, 1.0, gae_lambda)
    rows = [estimate(trainer, table, EPISODES[[i]], advantages[[i]]) for i in range(8)]
    estimated = sum(p * row for p, row in zip(table.probability().detach(), rows))
    assert relative_error(estimated, exact_return_gradient(table)) < 1e-5


@pytest.mark.parametrize("gae_lambda", [0.0, 0.6, 1.0])
def test_discounted(embedded_model, tmp_path, table, gae_lambda):
    trainer = grpo(embedded_model, tmp_path, 2)
    advantages, _ = turn_gae(table, GAMMA, gae_lambda)
    rows = [estimate(trainer, table, EPISODES[[i]], advantages[[i]]) for i in range(8)]
    estimated = sum(p * row for p, row in zip(table.probability().detach(), rows))
    assert relative_error(estimated, exact_gradient(table, GAMMA)) < 1e-5


@pytest.mark.parametrize("gae_lambda", [0.0, 0.6, 1.0])
def test_token_gae_estimates_the_exact_policy_gradient(embedded_model, tmp_path, table, gae_lambda, monkeypatch):
    trainer = grpo(embedded_model, tmp_path, 2)
    advantages, values = turn_gae(table, 1.0, gae_lambda)
    by_token = token_gae(advantages + values, exact_values(table, 1.0), TURN_IDS.expand(8, -1))
    # Each token an advantage of its own, by way of a turn of its own.
    monkeypatch.setattr("enumerated.TURN_IDS", torch.tensor([0, -1, 1, 2]))
    rows = [estimate(trainer, table, EPISODES[[i]], by_token[[i]][:, TURN_IDS >= 0]) for i in range(8)]
    estimated = sum(p * row for p, row in zip(table.probability().detach(), rows))
    assert relative_error(estimated, exact_return_gradient(table)) < 1e-5


def test_advantages_of_a_state_average_to_zero(table):
    """With the exact values: what an action is better, another is worse."""
    advantages, _ = turn_gae(table, 1.0, 0.6)
    probability = table.probability().detach()
    assert (probability @ advantages[:, 0]).abs() < 1e-6
    for a in (0, 1):
        rows = EPISODES[:, 0] == a
        assert (probability[rows] @ advantages[rows, 1]).abs() < 1e-6
