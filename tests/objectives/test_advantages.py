"""Group-relative advantages: by hand, against TRL's own formula, and their invariances."""

import itertools
import math

import pytest
import torch
from trl.trainer.utils import nanstd

from agile_trainers.objectives.advantages import (
    group_advantages,
    pool_over_turns,
    whiten,
    with_advantage,
    zero_advantage_groups,
)
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


def test_turn_advantages_by_hand():
    """Groups of two. Returns to go: rows 0, 1: (1, 1), (3, 3); rows 2, 3: (2, -), (4, 0); turn 1 of row 3 is alone."""
    result = group_advantages(REWARDS, MASK, NEVER, group_size=2, scale="none")
    assert result.advantages.tolist() == [[-1.0, -1.0], [1.0, 1.0], [-1.0, 0.0], [1.0, 0.0]]
    assert result.uncompared_turns == pytest.approx(1 / 7)


def test_turn_credit_reward_sees_only_the_turns_own_reward():
    result = group_advantages(REWARDS, MASK, NEVER, group_size=2, turn_credit="reward", scale="none")
    # A terminal reward teaches turn 0 of the first group nothing: that is what "reward" means.
    assert result.advantages.tolist() == [[0.0, -1.0], [0.0, 1.0], [-1.0, 0.0], [1.0, 0.0]]


def test_group_scale_divides_by_the_sample_deviation():
    result = group_advantages(REWARDS[:2], MASK[:2], NEVER[:2], group_size=2)
    expected = 1 / (math.sqrt(2) + 1e-4)
    torch.testing.assert_close(result.advantages, torch.tensor([[-expected] * 2, [expected] * 2]))


def test_mean_scale_by_hand():
    """MaxRL, (R - mean) / mean: returns to go 1, 3 | 1, 3; 2, 4 | -; a group of zeros gives 0."""
    result = group_advantages(REWARDS, MASK, NEVER, group_size=2, scale="mean")
    assert result.advantages.tolist() == [
        [-0.5, -0.5],
        [0.5, 0.5],
        [pytest.approx(-1 / 3), 0.0],
        [pytest.approx(1 / 3), 0.0],
    ]
    nothing = group_advantages(REWARDS[:2] * 0, MASK[:2], NEVER[:2], group_size=2, scale="mean")
    assert nothing.advantages.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    failed_negative = torch.where(torch.arange(4)[:, None] == 3, -1.0, REWARDS)
    failed = torch.tensor([False, False, False, True])
    group_advantages(failed_negative, MASK, failed, group_size=2, scale="mean")  # a failed row has no reward
    with pytest.raises(ValueError, match=r"scale_rewards='mean'.*-1"):
        group_advantages(failed_negative, MASK, NEVER, group_size=2, scale="mean")


@pytest.mark.parametrize("size", [2, 3, 5])
def test_mean_scale_is_the_exact_gradient_of_the_log_of_the_success_probability_to_order_n_minus_1(size):
    """Enumerated over all outcomes of a group whose members succeed with probability p; derivative by p."""
    p, expected = 0.3, 0.0
    for outcome in itertools.product((0.0, 1.0), repeat=size):
        rewards = torch.tensor(outcome)[:, None]
        advantages = group_advantages(
            rewards, rewards >= 0, rewards[:, 0] < 0, group_size=size, granularity="trajectory", scale="mean"
        ).advantages[:, 0]
        score = torch.tensor([1 / p if won else -1 / (1 - p) for won in outcome])
        probability = math.prod(p if won else 1 - p for won in outcome)
        expected += probability * (advantages @ score).item() / size
    assert expected == pytest.approx(sum((1 - p) ** (k - 1) for k in range(1, size)), rel=1e-6)


def test_failed_episodes_are_left_out_of_every_statistic():
    failed = torch.tensor([False, False, False, True])
    rewards = torch.tensor([[1.0], [2.0], [6.0], [1e6]])
    result = group_advantages(rewards, torch.ones(4, 1) > 0, failed, group_size=4, scale="none")
    assert result.advantages.flatten().tolist() == [-2.0, -1.0, 3.0, 0.0]
    for granularity in ("turn", "trajectory"):
        alone = group_advantages(
            rewards[:2], torch.ones(2, 1) > 0, torch.tensor([False, True]), group_size=2, granularity=granularity
        )
        assert alone.advantages.tolist() == [[0.0], [0.0]]


def test_equal_rewards_of_rounding_size_spread_give_exactly_zero():
    rewards = torch.tensor([[0.1 + 0.2], [0.3], [0.3], [0.1 + 0.2]], dtype=torch.float64) * 1e3
    result = group_advantages(rewards, torch.ones(4, 1) > 0, NEVER, group_size=4)
    assert result.advantages.eq(0).all()


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


def test_an_uncompared_turn_is_compared_with_the_episodes_of_the_others():
    """Gamma 1/2; returns to go 4, 2, 1 of row 0, 6, -2, and a failed episode. Turns 1 and 2 of row 0 are alone."""
    rewards = torch.tensor([[3.0, 1.5, 1.0], [6.0, 0.0, 0.0], [-2.0, 0.0, 0.0], [1e6, 1e6, 1e6]])
    mask = torch.tensor([[True] * 3, [True, False, False], [True, False, False], [True] * 3])
    failed = torch.tensor([False, False, False, True])

    def advantages(**options):
        options = {"group_size": 4, "gamma": 0.5, "scale": "none", "trajectory_fallback": True, **options}
        return group_advantages(rewards, mask, failed, **options)

    result = advantages(baseline="leave_one_out")
    assert result.advantages[0].tolist() == pytest.approx([4.0 - 2.0, 2.0 - 2.0, 1.0 - 2.0])
    assert result.advantages[1:].tolist() == [[5, 0, 0], [-7, 0, 0], [0, 0, 0]]
    assert result.uncompared_turns == pytest.approx(2 / 5)
    # The mean includes the turn itself, and so does the deviation of the three: 1, 6, -2.
    assert advantages().advantages[0].tolist() == pytest.approx([4 - 8 / 3, 0.0, 1 - 5 / 3])
    deviation = torch.tensor([1.0, 6.0, -2.0]).std() + 1e-4
    assert advantages(scale="group").advantages[0, 2].item() == pytest.approx((1 - 5 / 3) / deviation.item())
    # That of the batch is over the returns of all turns.
    deviation = torch.tensor([4.0, 2.0, 1.0, 6.0, -2.0]).std() + 1e-4
    assert advantages(scale="batch").advantages[0, 2].item() == pytest.approx((1 - 5 / 3) / deviation.item())
    assert advantages(trajectory_fallback=False).advantages[0, 1:].tolist() == [0.0, 0.0]


def test_an_uncompared_turn_has_an_advantage_only_if_it_differs():
    """Rows 0, 1: equal episodes, but turn 1 of row 0 gave 2 of its 5. Row 2: no other member is left to be compared with."""
    rewards = torch.tensor([[3.0, 2.0], [5.0, 0.0], [1.0, 1.0], [7.0, 0.0]])
    mask = torch.tensor([[True, True], [True, False], [True, True], [True, False]])
    failed = torch.tensor([False, False, False, True])
    options = {"group_size": 2, "scale": "none", "baseline": "leave_one_out"}
    result = group_advantages(rewards, mask, failed, trajectory_fallback=True, **options)
    assert result.advantages.tolist() == [[0.0, -3.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    assert group_advantages(rewards, mask, failed, **options).advantages.eq(0).all()


def test_a_zero_advantage_group_has_no_turn_with_an_advantage_above_eps():
    """Of three groups of two: one turn above eps, one at eps, one above but of a turn that does not count."""
    advantages = torch.zeros(6, 2)
    advantages[1, 1], advantages[2, 0], advantages[5, 1] = -0.11, 0.1, 7.0
    mask = torch.tensor([[True, True]] * 5 + [[True, False]])
    assert with_advantage(advantages, mask, 0.1).tolist() == [False, True, False, False, False, False]
    assert zero_advantage_groups(advantages, mask, 0.1, 2).tolist() == [False, True, True]
    assert zero_advantage_groups(advantages, mask, 0.0, 2).tolist() == [False, False, True]


def expected_gradient(episodes, size, **options):
    """Over all groups, of a logit whose score is given per turn. Episodes: (probability, turn rewards, scores)."""
    total = 0.0
    for members in itertools.product(episodes, repeat=size):
        probability = math.prod(chance for chance, _, _ in members)
        rewards, scores = (torch.zeros(size, 3, dtype=torch.float64) for _ in range(2))
        mask = torch.zeros(size, 3) > 0
        for row, (_, earned, score) in enumerate(members):
            turns = slice(len(earned))
            rewards[row, turns], scores[row, turns], mask[row, turns] = *map(torch.tensor, (earned, score)), True
        result = group_advantages(rewards, mask, torch.zeros(size) > 0, group_size=size, **options)
        total += probability * (result.advantages * scores).sum().item() / size
    return total


LATE = [(0.9, [0.0], [0.0]), (0.05, [0.0, 1.0], [0.0, 0.5]), (0.05, [0.0, 0.0], [0.0, -0.5])]
"""One episode in ten goes on; its second turn earns 1 or 0, whichever its action is. Exact gradient: .1 * .25."""


@pytest.mark.parametrize("size, starved, scaled", [(2, 0.0707, 0.707), (4, 0.2044, 1.298)])
def test_a_turn_that_few_reach_is_starved_without_fallback(size, starved, scaled):
    def share(**options):
        return expected_gradient(LATE, size, **options) / 0.025

    assert share() == pytest.approx(starved, rel=1e-3)
    assert share(trajectory_fallback=True) == pytest.approx(scaled, rel=1e-3)
    assert share(trajectory_fallback=True, scale="none", baseline="leave_one_out") == pytest.approx(1.0)


@pytest.mark.parametrize("size", [2, 4])
def test_an_uncompared_turn_is_discounted(size):
    """Stopping at turn 1 earns 1, going on 1.5 a turn later: .25 better at gamma .5, .5 worse at gamma 1."""
    episodes = [(0.9, [0.0], [0.0]), (0.05, [0.0, 1.0], [0.0, 0.5]), (0.05, [0.0, 0.0, 1.5], [0.0, -0.5, 0.0])]
    options = {"scale": "none", "baseline": "leave_one_out", "trajectory_fallback": True}
    assert expected_gradient(episodes, size, gamma=0.5, **options) == pytest.approx(0.1 * 0.25 * 0.25)
    assert expected_gradient(episodes, size, gamma=1.0, **options) == pytest.approx(0.1 * 0.25 * -0.5)


def test_turn_credit_reward_gives_stopping_the_wrong_sign():
    """Going on earns .5 and then costs .8. The score is that of stopping, which the policy does with probability .7."""
    episodes = [(0.7, [0.0], [0.3]), (0.3, [0.5, -0.8], [-0.7, 0.0])]
    options = {"scale": "none", "baseline": "leave_one_out"}
    assert expected_gradient(episodes, 2, turn_credit="reward", **options) == pytest.approx(-0.105)
    assert expected_gradient(episodes, 2, trajectory_fallback=True, **options) == pytest.approx(0.063)


def test_anchor_advantages_by_hand():
    """Returns to go of the group: (1, 1), (3, 3), (2, -), (4, 0); episodes: 1, 3, 2, 4, mean 2.5.

    State 5: turns 00, 10, 30 (1, 3, 4, mean 8/3). State 6: turns 01, 31 (1, 0, mean 1/2). State 7: turn 11 alone. Turn 20
    names none.
    """
    anchors = torch.tensor([[5, 6], [5, 7], [0, 0], [5, 6]])
    result = group_advantages(REWARDS, MASK, NEVER, group_size=4, granularity="anchor", scale="none", anchors=anchors)
    expected = [
        [-1.5 + 1 - 8 / 3, -1.5 + 0.5],
        [0.5 + 3 - 8 / 3, 0.5],
        [-0.5, 0.0],
        [1.5 + 4 - 8 / 3, 1.5 - 0.5],
    ]
    torch.testing.assert_close(result.advantages, torch.tensor(expected))
    assert result.uncompared_turns == pytest.approx(2 / 7)


def test_an_episode_is_not_compared_with_itself_by_hand():
    """State 5: turns 00, 02, 10, 31 of returns 7, 4, 6, 2. State 6: turns 01, 11, 12 of 6, 5, 3. State 7: row 2 alone."""
    rewards = torch.tensor([[1.0, 2, 4], [1, 2, 3], [4, 8, 0], [3, 2, 0]])
    mask = torch.tensor([[True] * 3, [True] * 3, [True, True, False], [True, True, False]])
    anchors = torch.tensor([[5, 6, 5], [5, 6, 6], [7, 7, 0], [0, 5, 5]])

    def part(**options):
        options = {"group_size": 4, "scale": "none", **options}
        both = group_advantages(rewards, mask, NEVER, granularity="anchor", anchors=anchors, **options)
        whole = group_advantages(rewards, mask, NEVER, granularity="trajectory", **options)
        return both.advantages - whole.advantages, both

    advantages, result = part()
    expected = [
        [7 - (7 + 6 + 2) / 3, 6 - (6 + 5 + 3) / 3, 4 - (4 + 6 + 2) / 3],  # 7 is not compared with 4
        [6 - (7 + 4 + 6 + 2) / 4, 5 - (6 + 5) / 2, 3 - (6 + 3) / 2],
        [0, 0, 0],
        [0, 2 - (7 + 4 + 6 + 2) / 4, 0],
    ]
    torch.testing.assert_close(advantages, torch.tensor(expected))
    assert result.uncompared_turns == pytest.approx(3 / 10)
    alone = part(baseline="leave_one_out")[0]
    assert alone[0].tolist() == pytest.approx([7 - 4, 6 - 4, 4 - 4], abs=1e-6)
    deviation = torch.tensor([7.0, 6.0, 2.0]).std() + 1e-4
    assert part(scale="group")[0][0, 0].item() == pytest.approx((7 - 5) / deviation.item(), abs=1e-6)
    deviation = torch.tensor([7.0, 6, 4, 6, 5, 3, 12, 8, 2]).std() + 1e-4  # of all turns with a name
    assert part(scale="batch")[0][0, 0].item() == pytest.approx((7 - 5) / deviation.item(), abs=1e-6)


def test_equal_returns_of_others_beside_an_own_outlier_give_exactly_zero():
    rewards = torch.tensor([[1e9, 0.1 + 0.2], [0.3, 0.0]], dtype=torch.float64)
    options = {"group_size": 2, "granularity": "anchor", "anchors": torch.tensor([[5, 5], [5, 0]])}
    result = group_advantages(rewards, torch.tensor([[True, True], [True, False]]), NEVER[:2], **options)
    deviation = torch.tensor([1e9, 0.3], dtype=torch.float64).std()
    assert result.advantages[:, 1].tolist() == [pytest.approx((5e8 - 0.15) / (deviation + 1e-4).item()), 0.0]


@pytest.mark.parametrize("scale", ["group", "batch", "mean", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_anchors_equal_a_loop_over_turns(scale, baseline):
    """Random lengths, states, failures; with states that return within an episode, and the rule written out."""
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(12, 9, generator=generator, dtype=torch.float64)
    mask = torch.arange(9) < torch.randint(1, 10, (12, 1), generator=generator)
    failed, anchors = torch.arange(12) == 5, torch.randint(0, 5, (12, 9), generator=generator)
    options = {"group_size": 4, "scale": scale, "baseline": baseline, "gamma": 0.9}
    result = group_advantages(rewards, mask, failed, granularity="anchor", anchors=anchors, **options)
    whole = group_advantages(rewards, mask, failed, granularity="trajectory", **options).advantages
    returns, counted = discounted_returns(rewards, mask, 0.9), mask & ~failed[:, None]
    spread = returns[counted & (anchors != 0)].std() + 1e-4
    lonely = 0
    for i, k in counted.nonzero().tolist():
        others = counted & (anchors == anchors[i, k]) & (torch.arange(12) != i)[:, None]
        others &= (torch.arange(12) // 4 == i // 4)[:, None]
        own, expected = returns[i, k], whole[i, k].clone()
        if anchors[i, k] == 0 or not others.any():
            lonely += 1
        else:
            compared = torch.cat([own[None], returns[others]])
            divisor = {"group": compared.std() + 1e-4, "batch": spread, "mean": compared.mean(), "none": 1.0}[scale]
            expected += (own - (compared if baseline == "mean" else returns[others]).mean()) / divisor
        assert result.advantages[i, k].item() == pytest.approx(expected.item(), abs=1e-12)
    assert result.advantages[~counted].eq(0).all()
    assert result.uncompared_turns == pytest.approx(lonely / counted.sum().item()) and lonely


def test_calls_at_once_are_credited_with_what_was_not_given_yet():
    """Calls 0 and 1 are submitted together: the reward of either is in both returns, 3 and 3; 7 and 7."""
    rewards, rewarded = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.zeros(2, 2, dtype=torch.long)
    options = {"group_size": 2, "scale": "none", "baseline": "leave_one_out", "rewarded": rewarded}
    assert group_advantages(rewards, rewards > 0, NEVER[:2], **options).advantages.tolist() == [[-4, -4], [4, 4]]
    with pytest.raises(ValueError, match=r"gamma=0\.5"):
        group_advantages(rewards, rewards > 0, NEVER[:2], gamma=0.5, **options)


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


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_maxrl_estimates_the_gradient_of_a_truncated_log(size, baseline):
    """All groups of answers that are right with probability p = .3: of -sum of (1 - p)^k / k, k < N, by the logit of p."""
    p, total = 0.3, 0.0
    for answers in itertools.product((0.0, 1.0), repeat=size):
        rewards = torch.tensor(answers, dtype=torch.float64)
        chance = math.prod(p if right else 1 - p for right in answers)
        result = group_advantages(
            rewards[:, None], torch.ones(size, 1) > 0, torch.zeros(size) > 0, group_size=size, scale="mean",
            granularity="trajectory", baseline=baseline,
        )  # fmt: skip
        total += chance * float((result.advantages[:, 0].double() * (rewards - p)).mean())
    exact = p * (1 - p) * sum((1 - p) ** (k - 1) for k in range(1, size))
    assert total == pytest.approx(exact * (size / (size - 1) if baseline == "leave_one_out" else 1), rel=1e-6)


def test_the_batch_is_one_member_more_by_hand():
    """Returns 1, 0 and 1, 1: the batch's mean is 3/4, and the means of the groups with it are 7/12 and 11/12."""
    rewards, options = torch.tensor([[1.0], [0.0], [1.0], [1.0]]), {"group_size": 2, "baseline": "shrunk"}
    for granularity in ("turn", "trajectory"):
        plain = group_advantages(rewards, torch.ones(4, 1) > 0, NEVER, granularity=granularity, scale="none", **options)
        assert plain.advantages.flatten().tolist() == pytest.approx([5 / 12, -7 / 12, 1 / 12, 1 / 12])
        scaled = group_advantages(rewards, torch.ones(4, 1) > 0, NEVER, granularity=granularity, **options)
        deviation = math.sqrt((2 * (1 / 12) ** 2 + (2 / 12) ** 2) / 2)
        assert scaled.advantages[2:].flatten().tolist() == pytest.approx([1 / 12 / (deviation + 1e-4)] * 2)
        assert scaled.advantages[2].item() == pytest.approx(1 / math.sqrt(3), rel=1e-3)
    equal = group_advantages(torch.full((4, 1), 0.3), torch.ones(4, 1) > 0, NEVER, **options)
    assert equal.advantages.eq(0).all()


def test_what_counts_as_the_batch_is_of_one_environment_and_turn():
    """Each environment and turn index as if it were alone; a failed episode is in no mean."""
    rewards = torch.tensor(
        [[1.0, 5.0], [0.0, 7.0], [1.0, 0.0], [1.0, 0.0], [40.0, 2.0], [10.0, 0.0], [30.0, 1.0], [9e9, 0]]
    )
    mask = torch.tensor([[True, True], [True, True], [True, False], [True, False], [True, True]] + [[True, True]] * 3)
    failed = torch.tensor([False] * 7 + [True])
    environments = torch.tensor([7, 7, 7, 7, 3, 3, 3, 3])
    options = {"group_size": 2, "baseline": "shrunk", "scale": "none", "turn_credit": "reward"}
    found = group_advantages(rewards, mask, failed, environments=environments, **options).advantages
    means = {(7, 0): 3 / 4, (7, 1): 6.0, (3, 0): 80 / 3, (3, 1): 1.0}
    for row, turn in (mask & ~failed[:, None]).nonzero().tolist():
        group = [n for n in (row // 2 * 2, row // 2 * 2 + 1) if mask[n, turn] and not failed[n]]
        members = [*(rewards[n, turn].item() for n in group), means[environments[row].item(), turn]]
        assert found[row, turn].item() == pytest.approx(
            rewards[row, turn].item() - sum(members) / len(members), rel=1e-6
        )
    assert found[7].eq(0).all()


def test_the_gradient_beside_the_batch_is_a_part_of_the_exact_one():
    """All batches of two groups of two, right with probability .3: what is left out is the own share in the baseline."""
    p, total = 0.3, 0.0
    for answers in itertools.product((0.0, 1.0), repeat=4):
        rewards = torch.tensor(answers, dtype=torch.float64)
        chance = math.prod(p if right else 1 - p for right in answers)
        result = group_advantages(
            rewards[:, None], torch.ones(4, 1) > 0, NEVER, group_size=2, scale="none", baseline="shrunk"
        )
        total += chance * float((result.advantages[:, 0].double() * (rewards - p)).mean())
    assert total == pytest.approx(p * (1 - p) * (1 - (1 + 1 / 4) / 3), rel=1e-9)
