"""Turn and token GAE, and the value loss, against numbers made by hand and a loop that knows no tensors."""

from __future__ import annotations

import math
import random

import pytest
import torch

from agile_trainers.objectives.returns import discounted_returns, gae, token_gae
from agile_trainers.objectives.value_loss import explained_variance, value_errors

# Three episodes of unequal length. The first ended by itself after 3 turns, the second was cut short after 2 and its
# final state is worth 4, the third ended after 1. gamma 0.5, lambda 0.5, so gamma * lambda = 0.25.
REWARDS = torch.tensor([[1.0, 0.0, 2.0], [1.0, 1.0, 9.0], [3.0, 9.0, 9.0]])
VALUES = torch.tensor([[2.0, 4.0, 1.0], [1.0, 2.0, 9.0], [1.0, 9.0, 9.0]])
FINAL = torch.tensor([0.0, 4.0, 0.0])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]]) > 0
# deltas      1 + .5*4 - 2 = 1        0 + .5*1 - 4 = -3.5      2 + 0 - 1 = 1
#             1 + .5*2 - 1 = 1        1 + .5*4 - 2 = 1
#             3 + 0 - 1 = 2
# advantages  1 + .25*-3.25 = .1875   -3.5 + .25*1 = -3.25     1
#             1 + .25*1 = 1.25        1
#             2
BY_HAND = torch.tensor([[0.1875, -3.25, 1.0], [1.25, 1.0, 0.0], [2.0, 0.0, 0.0]])


def test_the_table():
    assert torch.equal(gae(REWARDS, VALUES, FINAL, MASK, gamma=0.5, gae_lambda=0.5), BY_HAND)


def test_what_stands_beyond_the_last_turn_plays_no_part():
    rewards, values = (torch.where(MASK, x, float("nan")) for x in (REWARDS, VALUES))
    assert torch.equal(gae(rewards, values, FINAL, MASK, gamma=0.5, gae_lambda=0.5), BY_HAND)


def test_no_turn_at_all():
    nothing = gae(REWARDS, VALUES, FINAL, torch.zeros_like(MASK), gamma=0.5, gae_lambda=0.5)
    assert torch.equal(nothing, torch.zeros(3, 3))


def test_one_turn_is_its_reward_and_what_follows_minus_the_value():
    mask = torch.ones(3, 1) > 0
    advantages = gae(REWARDS[:, :1], VALUES[:, :1], FINAL, mask, gamma=0.9, gae_lambda=0.3)
    torch.testing.assert_close(advantages[:, 0], torch.tensor([1 - 2, 1 + 0.9 * 4 - 1, 3 - 1.0]))


def test_lambda_one_is_the_return_minus_the_value():
    """Whatever the critic says of the states between; the final state of an episode cut short is worth a last reward."""
    advantages = gae(REWARDS, VALUES, FINAL, MASK, gamma=0.7, gae_lambda=1.0)
    rewards = REWARDS.clone()
    rewards[1, 1] += 0.7 * FINAL[1]
    expected = torch.where(MASK, discounted_returns(rewards, MASK, 0.7) - VALUES, 0.0)
    torch.testing.assert_close(advantages, expected)


def test_lambda_zero_is_the_one_step_error():
    following = torch.tensor([[4.0, 1.0, 0.0], [2.0, 4.0, 0.0], [0.0, 0.0, 0.0]])
    expected = torch.where(MASK, REWARDS + 0.7 * following - VALUES, 0.0)
    torch.testing.assert_close(gae(REWARDS, VALUES, FINAL, MASK, gamma=0.7, gae_lambda=0.0), expected)


def test_token_gae_is_gae_over_tokens_with_the_reward_on_the_turns_last():
    """Against the definition, token by token: discount and lambda act only between turns."""
    generator = random.Random(0)
    lengths, gamma, gae_lambda = [3, 1, 4], 0.6, 0.7
    rewards = [generator.gauss(0, 1) for _ in lengths]
    turn_of = [k for k, length in enumerate(lengths) for _ in range(length)]
    values = [generator.gauss(0, 1) for _ in turn_of]
    final = 0.8
    expected, running, following = [], 0.0, final
    for t in reversed(range(len(turn_of))):
        last = t + 1 == len(turn_of) or turn_of[t + 1] != turn_of[t]
        reward, discount, decay = (rewards[turn_of[t]], gamma, gae_lambda) if last else (0.0, 1.0, 1.0)
        running = reward + discount * following - values[t] + discount * decay * running
        following = values[t]
        expected.append(running)

    # The same episode with observations between the turns.
    turn_ids = torch.tensor([[0, 0, 0, -1, -1, 1, -1, 2, 2, 2, 2, -1]])
    token_values = torch.full((1, 12), float("nan"))
    token_values[turn_ids >= 0] = torch.tensor(values)
    starts = token_values[:, [0, 5, 7]]
    turn_advantages = gae(
        torch.tensor([rewards]),
        starts,
        torch.tensor([final]),
        torch.ones(1, 3) > 0,
        gamma=gamma,
        gae_lambda=gae_lambda,
    )
    advantages = token_gae(turn_advantages + starts, token_values, turn_ids)
    torch.testing.assert_close(advantages[turn_ids >= 0], torch.tensor(expected[::-1]))
    assert (advantages[turn_ids < 0] == 0).all()


def test_length_is_not_paid_for():
    """Equal rewards at unequal lengths: no token of either turn gets more than the reward."""
    turn_ids = torch.tensor([[0, 0, -1, -1], [0, 0, 0, 0]])
    advantages = token_gae(torch.ones(2, 1), torch.zeros(2, 4), turn_ids)
    assert torch.equal(advantages, (turn_ids >= 0).float())


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient", "clipped"),
    [
        (1.1, 1.0, 2.0, 0.405, -0.9, False),  # moved less than 0.5: the plain error
        (1.8, 1.0, 2.0, 0.125, 0.0, True),  # moved 0.8 towards the target: held at 1.5
        (0.2, 1.0, 2.0, 1.62, -1.8, False),  # moved 0.8 away from it: the plain error is the larger one
        (2.6, 1.0, 2.0, 0.18, 0.6, False),  # moved past it, so far that the plain error is the larger one
    ],
)
def test_value_clipping_by_hand(value, old, target, loss, gradient, clipped):
    values = torch.tensor([value], requires_grad=True)
    losses, was_clipped = value_errors(values, torch.tensor([old]), torch.tensor([target]), 0.5)
    losses.sum().backward()
    assert losses.item() == pytest.approx(loss)
    assert values.grad.item() == pytest.approx(gradient)
    assert was_clipped.item() is clipped


def test_no_clipping_is_half_the_squared_error():
    losses, clipped = value_errors(torch.tensor([3.0]), torch.tensor([-9.0]), torch.tensor([1.0]), None)
    assert losses.item() == 2.0 and not clipped.any()


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0, 2.0, 3.0], 1.0), ([5.0, 5.0, 5.0], 0.0), ([2.0, 3.0, 4.0], 1.0), ([3.0, 2.0, 1.0], -3.0)],
)
def test_explained_variance_by_hand(values, expected):
    assert explained_variance(torch.tensor(values), torch.tensor([1.0, 2.0, 3.0])) == pytest.approx(expected)


@pytest.mark.parametrize("targets", [[], [1.0], [2.0, 2.0 + 1e-7]])
def test_explained_variance_of_equal_targets_is_undefined(targets):
    assert math.isnan(explained_variance(torch.zeros(len(targets)), torch.tensor(targets)))
