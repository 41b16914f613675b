"""Group-relative advantages: by hand, against TRL's own formula, and their invariances."""

import math

import pytest
import torch
from trl.trainer.utils import nanstd

from agile_trainers.objectives.advantages import group_advantages, pool_over_turns, whiten
from agile_trainers.objectives.returns import discounted_returns

NEVER = torch.zeros(4, dtype=torch.bool)
REWARDS = torch.tensor([[0.0, 1.0], [0.0, 3.0], [2.0, 0.0], [4.0, 0.0]])
MASK = torch.tensor([[True, True], [True, True], [True, False], [True, True]])


def test_discounted_returns_by_hand():
    rewards = torch.tensor([[1.0, 2.0, 4.0], [5.0, 9.0, 9.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    assert discounted_returns(rewards, mask, 0.5).tolist() == [[3.0, 4.0, 4.0], [5.0, 0.0, 0.0]]
    assert discounted_returns(rewards, mask, 0.0).tolist() == [[1.0, 2.0, 4.0], [5.0, 0.0, 0.0]]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_trajectory_advantages_are_trls(scale):
    rewards, size = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), 4
    result = group_advantages(
        rewards, torch.ones(12, 3) > 0, torch.zeros(12) > 0, group_size=size, granularity="trajectory", scale=scale
    )
    returns = rewards.sum(1)
    grouped = returns.view(-1, size)
    centred = returns - grouped.mean(1).repeat_interleave(size)
    std = nanstd(grouped, dim=1).repeat_interleave(size) if scale == "group" else nanstd(returns)
    expected = centred if scale == "none" else centred / (std + 1e-4)
    torch.testing.assert_close(result.advantages, expected[:, None].expand(-1, 3), rtol=1e-5, atol=1e-6)
    assert result.groups_without_signal == 0.0


def test_turn_advantages_by_hand():
    """Groups of two. Returns to go: rows 0, 1: (1, 1), (3, 3); rows 2, 3: (2, -), (4, 0); turn 1 of row 3 is alone."""
    result = group_advantages(REWARDS, MASK, NEVER, group_size=2, scale="none")
    assert result.advantages.tolist() == [[-1.0, -1.0], [1.0, 1.0], [-1.0, 0.0], [1.0, 0.0]]
    assert result.lonely_turns == pytest.approx(1 / 7)


def test_turn_credit_reward_sees_only_the_turns_own_reward():
    result = group_advantages(REWARDS, MASK, NEVER, group_size=2, turn_credit="reward", scale="none")
    # A terminal reward teaches turn 0 of the first group nothing: that is what "reward" means.
    assert result.advantages.tolist() == [[0.0, -1.0], [0.0, 1.0], [-1.0, 0.0], [1.0, 0.0]]


def test_group_scale_divides_by_the_sample_deviation():
    result = group_advantages(REWARDS[:2], MASK[:2], NEVER[:2], group_size=2)
    expected = 1 / (math.sqrt(2) + 1e-4)
    torch.testing.assert_close(result.advantages, torch.tensor([[-expected] * 2, [expected] * 2]))


def test_failed_episodes_are_left_out_of_every_statistic():
    failed = torch.tensor([False, False, False, True])
    rewards = torch.tensor([[1.0], [2.0], [6.0], [1e6]])
    result = group_advantages(rewards, torch.ones(4, 1) > 0, failed, group_size=4, scale="none")
    assert result.advantages.flatten().tolist() == [-2.0, -1.0, 3.0, 0.0]
    for granularity in ("turn", "trajectory"):
        alone = group_advantages(
            rewards[:2], torch.ones(2, 1) > 0, torch.tensor([False, True]), group_size=2, granularity=granularity
        )
        assert alone.advantages.tolist() == [[0.0], [0.0]] and alone.groups_without_signal == 1.0


def test_equal_rewards_of_rounding_size_spread_give_exactly_zero():
    rewards = torch.tensor([[0.1 + 0.2], [0.3], [0.3], [0.1 + 0.2]], dtype=torch.float64) * 1e3
    result = group_advantages(rewards, torch.ones(4, 1) > 0, NEVER, group_size=4)
    assert result.advantages.eq(0).all() and result.groups_without_signal == 1.0


def test_groups_do_not_mix():
    other = REWARDS.clone()
    other[2:] *= 17
    first, second = (group_advantages(r, MASK, NEVER, group_size=2).advantages[:2] for r in (REWARDS, other))
    assert torch.equal(first, second)


def test_whiten():
    advantages = torch.tensor([[1.0, 50.0], [2.0, 3.0]])
    mask = torch.tensor([[True, False], [True, True]])
    assert whiten(advantages, mask).tolist() == [[pytest.approx(-1.0), 0.0], [pytest.approx(0.0), pytest.approx(1.0)]]
    assert whiten(torch.full((2, 2), 5.0), mask).eq(0).all()
    assert whiten(advantages, torch.zeros(2, 2) > 0).eq(0).all()


def test_pool_over_turns_counts_each_turn_once():
    assert pool_over_turns(torch.tensor([[1.0, 3.0], [5.0, 9.0]]), MASK[1:3]).tolist() == [[2.0, 2.0], [5.0, 0.0]]


def test_leave_one_out_by_hand():
    """Returns 1, 2, 6: against the mean of the other two."""
    result = group_advantages(
        torch.tensor([[1.0], [2.0], [6.0]]), torch.ones(3, 1) > 0, NEVER[:3], group_size=3, scale="none",
        baseline="leave_one_out",
    )  # fmt: skip
    assert result.advantages.flatten().tolist() == [-3.0, -1.5, 4.5]


def test_a_lonely_turn_may_fall_back_to_its_trajectory():
    """Turn 1 of row 3 is alone; its episode, with 4 against 2, has advantage 1."""
    result = group_advantages(REWARDS, MASK, NEVER, group_size=2, scale="none", trajectory_fallback=True)
    assert result.advantages.tolist() == [[-1.0, -1.0], [1.0, 1.0], [-1.0, 0.0], [1.0, 1.0]]
    assert result.lonely_turns == pytest.approx(1 / 7)


def test_anchor_advantages_by_hand():
    """Returns to go of the group: (1, 1), (3, 3), (2, -), (4, 0); episodes: 1, 3, 2, 4, mean 2.5.

    State 5: turns 00, 10, 30 (1, 3, 4, mean 8/3). State 6: turns 01, 31 (1, 0, mean 1/2). State 7: turn 11 alone. Turn 20
    names none.
    """
    anchors = torch.tensor([[5, 6], [5, 7], [0, 0], [5, 6]])
    result = group_advantages(
        REWARDS, MASK, NEVER, group_size=4, granularity="anchor", scale="none", anchors=anchors, anchor_weight=0.5
    )
    expected = [
        [-1.5 + 0.5 * (1 - 8 / 3), -1.5 + 0.5 * 0.5],
        [0.5 + 0.5 * (3 - 8 / 3), 0.5],
        [-0.5, 0.0],
        [1.5 + 0.5 * (4 - 8 / 3), 1.5 + 0.5 * -0.5],
    ]
    torch.testing.assert_close(result.advantages, torch.tensor(expected))
    assert result.lonely_turns == pytest.approx(2 / 7)


def test_the_same_state_in_another_group_is_another_state():
    anchors = torch.full((4, 2), 5)
    one = group_advantages(REWARDS, MASK, NEVER, group_size=2, granularity="anchor", anchors=anchors)
    alone = group_advantages(REWARDS[:2], MASK[:2], NEVER[:2], group_size=2, granularity="anchor", anchors=anchors[:2])
    torch.testing.assert_close(one.advantages[:2], alone.advantages)


def test_anchors_that_are_the_turn_index_add_the_turn_advantage():
    anchors = torch.tensor([[1, 2]]).expand(4, 2)
    options = {"group_size": 4, "scale": "group", "baseline": "leave_one_out"}
    parts = [
        group_advantages(REWARDS, MASK, NEVER, granularity=granularity, **options).advantages
        for granularity in ("trajectory", "turn")
    ]
    both = group_advantages(REWARDS, MASK, NEVER, granularity="anchor", anchors=anchors, **options)
    torch.testing.assert_close(both.advantages, sum(parts))
