"""Turn and token GAE, and the value loss, against numbers made by hand and a loop that knows no tensors."""

from __future__ import annotations

import math
import random

import pytest
import torch

from agile_trainers.objectives.returns import discounted_returns, explained_variance, gae, token_gae, value_errors

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


# A forest of five calls, gamma 1, lambda 0.5. Call 0 asks two helpers at once (1 and 2) and goes on with call 3, whose
# prompt contains it; call 4 follows call 1. When call 3 was submitted, the rewards of calls 0 and 1 had been given.
FOREST = {"following": torch.tensor([[3, 4, 5, 5, 5]]), "rewarded": torch.tensor([[0, 1, 1, 2, 4]])}
CALLS = torch.tensor([[1.0, 2.0, 4.0, 8.0, 16.0]])


@pytest.mark.parametrize("final", [0.0, 32.0])
def test_a_forest_by_hand(final):
    """A call without a next one (2, 3 and 4) gets the rest of the episode: no later value, whatever lambda is."""
    values = torch.tensor([[3.0, 5.0, 7.0, 9.0, 11.0]])
    options = {"gamma": 1.0, "gae_lambda": 0.5, **FOREST}
    advantages = gae(CALLS, values, torch.tensor([final]), torch.ones(1, 5) > 0, **options)
    last = 16 + final - 11
    third = 8 + 16 + 4 + final - 9
    expected = [1 + 2 + 9 - 3 + 0.5 * third, 2 + 4 + 8 + 11 - 5 + 0.5 * last, 2 + 4 + 8 + 16 + final - 7, third, last]
    assert advantages.tolist() == [expected]
    returns = discounted_returns(CALLS, torch.ones(1, 5) > 0, 1.0, FOREST["rewarded"])
    assert returns.tolist() == [[31.0, 30.0, 30.0, 28.0, 16.0]]


def test_a_rewritten_history_is_discounted_by_the_calls_between():
    """Gamma 1/2, lambda 1/2. Call 0 goes on with call 2, gamma^2 away; call 1, a summary's, has no next one."""
    options = {"gamma": 0.5, "gae_lambda": 0.5, "following": torch.tensor([[2, 3, 3]])}
    advantages = gae(CALLS[:, :3], VALUES[:1], torch.tensor([8.0]), MASK[:1], **options)
    last = 4 + 0.5 * 8 - 1
    assert advantages.tolist() == [[1 + 0.5 * 2 + 0.25 * 1 - 2 + 0.25 * 0.5 * last, 2 + 0.5 * 4 + 0.25 * 8 - 4, last]]


def test_lambda_one_is_the_return_minus_the_value_on_every_path():
    advantages = gae(CALLS, CALLS**2, torch.zeros(1), torch.ones(1, 5) > 0, gamma=1.0, gae_lambda=1.0, **FOREST)
    returns = discounted_returns(CALLS, torch.ones(1, 5) > 0, 1.0, FOREST["rewarded"])
    torch.testing.assert_close(advantages, returns - CALLS**2)


@pytest.mark.parametrize("none", [3, 7])
@pytest.mark.parametrize("gamma", [0.0, 0.7, 1.0])
def test_one_path_said_aloud_is_the_same_to_the_bit(gamma, none):
    """Also where rows of other processes made the batch wider, so that "none" is the index of a call that did not happen."""
    torch.manual_seed(0)
    mask = torch.arange(7) < torch.tensor([[3], [2], [1], [0]])
    rewards, values = (torch.where(mask, torch.randn(4, 7), float("nan")) for _ in range(2))
    following = torch.where(torch.arange(1, 8) < mask.sum(1, keepdim=True), torch.arange(1, 8), none)
    calls = {"following": following, "rewarded": torch.arange(7).expand(4, 7) * mask}
    inputs, options = (rewards, values, torch.randn(4), mask), {"gamma": gamma, "gae_lambda": 0.9}
    plain = gae(*inputs, **options)
    assert plain[mask].abs().min() > 0
    for given in (calls, {"following": calls["following"]}, {"rewarded": calls["rewarded"]}):
        assert torch.equal(gae(*inputs, **options, **given), plain)
    returns = discounted_returns(rewards, mask, gamma)
    assert torch.equal(discounted_returns(rewards, mask, gamma, calls["rewarded"]), returns)


def test_what_no_forest_can_have_is_refused():
    mask, options = torch.ones(1, 5) > 0, {"gamma": 0.9, "gae_lambda": 1.0}
    with pytest.raises(ValueError, match=r"gamma=0\.9.*1 rewards had been given when call 2 of episode 0.*gamma=1\.0"):
        discounted_returns(CALLS, mask, 0.9, FOREST["rewarded"])
    with pytest.raises(ValueError, match=r"gamma=0\.9"):
        gae(CALLS, CALLS, torch.zeros(1), mask, **options, **FOREST)
    with pytest.raises(ValueError, match=r"rewarded\[0, 1\] is 2"):
        discounted_returns(CALLS, mask, 1.0, torch.tensor([[0, 2, 2, 3, 4]]))
    with pytest.raises(ValueError, match=r"following\[0, 1\] is 1"):
        gae(CALLS, CALLS, torch.zeros(1), mask, **options, following=torch.tensor([[1, 1, 3, 4, 5]]))


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
