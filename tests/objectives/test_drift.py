"""Weights for batches that an earlier policy has sampled: by hand, and by listing all episodes of two and three turns.

Expectations are over everything that the snapshot samples, and are compared with the gradient of prox's expected return.
"""

from __future__ import annotations

import itertools
import math
from functools import cache

import pytest
import torch
from drifting import Drift, three_turns, two_turns
from forest_bias import in_pairs
from forests import Forest, World, error

from agile_trainers.objectives.advantages import group_advantages
from agile_trainers.objectives.drift import (
    decision_weights,
    drift_metrics,
    drift_weights,
    effective_sample_size,
    turn_ratios,
)
from agile_trainers.objectives.mismatch import MODES, importance_weights
from agile_trainers.objectives.returns import discounted_returns, gae, vtrace_targets
from agile_trainers.objectives.segments import spread_to_tokens

EXACT = 1e-6
"""Weights are in float32."""
BASELINES = torch.tensor([0.8, -0.5, 1.3], dtype=torch.float64)
"""Of each turn, as far from its returns as that they matter."""
every_tree = pytest.mark.parametrize(
    ("program", "seed"),
    list(itertools.product((two_turns, three_turns), range(3))),
    ids=lambda value: getattr(value, "__name__", value),
)
drawn = cache(Drift.drawn)

TURN_IDS = torch.tensor([[0, 0, -1, 1, 1], [0, 1, 1, -1, -1]])
MASK = TURN_IDS >= 0
RATIOS = torch.tensor([[2.0, 0.5, 99.0, 4.0, 2.0], [0.25, 1.0, 0.5, 99.0, 99.0]])
"""Prox over snapshot. Products: turns 1 and 8, .25 and .5; episodes 8 and .125."""


def returns(drift: Drift) -> torch.Tensor:
    """(N, K), from each turn on."""
    return discounted_returns(drift.prox.rewards, drift.prox.mask, 1.0)


def on_tokens(drift: Drift, turns: torch.Tensor) -> torch.Tensor:
    return spread_to_tokens(turns, drift.turn_ids)


def weights(drift: Drift, mode: str, clip_max: float | None = None) -> torch.Tensor:
    return drift_weights(drift.log_ratio, drift.mask, drift.turn_ids, mode, clip_max)


def by_turn(drift: Drift, clip_max: float | None = None) -> torch.Tensor:
    return decision_weights(drift.log_ratio, drift.mask, drift.turn_ids, drift.turns, clip_max)


def surprises(drift: Drift, values: torch.Tensor, gamma: float = 1.0, clip_max: float | None = None) -> torch.Tensor:
    """(N, K), rewards and values (K,), weighted per decision."""
    rewards, none = drift.prox.rewards, torch.zeros(len(drift.mask)).double()
    values = values[: drift.turns].expand_as(rewards)
    return gae(rewards, values, none, drift.prox.mask, gamma=gamma, gae_lambda=1.0, weights=by_turn(drift, clip_max))


# ------------------------------------------------------------------------------------------------------------ exact


@every_tree
@pytest.mark.parametrize("whole", [False, True], ids=["return from the turn on", "return of the episode"])
def test_the_sequence_weight_is_exact(program, seed, whole):
    drift = drawn(program, seed)
    earned = returns(drift)[:, :1] if whole else returns(drift)
    advantages = on_tokens(drift, earned - BASELINES[: drift.turns])
    assert error(drift.expected(weights(drift, "sequence_truncate") * advantages), drift.prox.exact) < EXACT
    assert error(drift.expected(advantages), drift.prox.exact) > 0.1


@every_tree
def test_rewards_weighted_up_to_their_turn_are_exact(program, seed):
    drift = drawn(program, seed)
    weighted = discounted_returns(drift.prox.rewards * by_turn(drift), drift.prox.mask, 1.0)
    assert error(drift.expected(on_tokens(drift, weighted)), drift.prox.exact) < EXACT


@every_tree
def test_baselines_are_weighted_up_to_their_turn(program, seed):
    """The gradient is exact with any baselines, and with any values; a baseline without weight adds a bias."""
    drift = drawn(program, seed)
    weighted = discounted_returns(drift.prox.rewards * by_turn(drift), drift.prox.mask, 1.0)
    for advantages in (weighted - by_turn(drift) * BASELINES[: drift.turns], surprises(drift, BASELINES)):
        assert error(drift.expected(on_tokens(drift, advantages)), drift.prox.exact) < EXACT
    assert error(drift.expected(on_tokens(drift, weighted - BASELINES[: drift.turns])), drift.prox.exact) > 0.1


@every_tree
def test_leave_one_out_is_exact(program, seed):
    """The other member's returns do not depend on the episode, whichever policy they are of."""
    drift = drawn(program, seed)
    for granularity in ("trajectory", "turn"):
        advantages = in_pairs(drift.snapshot, granularity=granularity, trajectory_fallback=True)
        weighted = weights(drift, "sequence_truncate") * on_tokens(drift, advantages)
        assert error(drift.expected(weighted), drift.prox.exact) < EXACT
    advantages = in_pairs(drift.snapshot, granularity="turn", trajectory_fallback=True, weights=by_turn(drift))
    assert error(drift.expected(on_tokens(drift, advantages)), drift.prox.exact) < EXACT
    plain = in_pairs(
        drift.snapshot, drift.snapshot.rewards * by_turn(drift), granularity="turn", trajectory_fallback=True
    )
    assert error(drift.expected(on_tokens(drift, plain)), drift.prox.exact) > 0.02


@every_tree
def test_a_discount_is_that_of_the_returns(program, seed):
    """Against the same estimator on policy, where every weight is 1."""
    drift = drawn(program, seed)
    discounted = discounted_returns(drift.prox.rewards, drift.prox.mask, 0.6)
    expected = drift.prox.probabilities @ drift.estimates(on_tokens(drift, discounted))
    for values in (torch.zeros(3), BASELINES):
        assert error(drift.expected(on_tokens(drift, surprises(drift, values, 0.6))), expected) < EXACT
    sequence = weights(drift, "sequence_truncate") * on_tokens(drift, discounted)
    assert error(drift.expected(sequence), expected) < EXACT


@every_tree
def test_exact_weights_have_the_mean_one(program, seed):
    drift = drawn(program, seed)
    chances = drift.snapshot.probabilities
    assert (chances @ by_turn(drift).double()).tolist() == pytest.approx([1.0] * drift.turns, abs=EXACT)
    sequence = weights(drift, "sequence_truncate")[:, 0].double()
    assert (chances @ sequence).item() == pytest.approx(1.0, abs=EXACT)


# ---------------------------------------------------------------------------------------------------------- not exact


def test_a_turns_own_ratio_by_hand():
    """An answer a (1/2 under the snapshot, 3/4 under prox) leads to a second turn, where a (1/4, 1/2) is rewarded.

    By the logit of a, prox's gradient is 3/4 * 1/4 * 1/2 in the first turn, and 3/4 * 1/2 * 1/2 in the second. With a turn's
    own ratio, the first turn is rewarded as the snapshot goes on, 3/4 * 1/4 * 1/4, and the second is reached as often as
    under the snapshot, 1/2 * 1/2 * 1/2. Without weights: 1/2 * 1/4 * (1 - 3/4) and 1/2 * 1/4 * (1 - 1/2).
    """

    def program(world: World) -> None:
        if world.ask("S") == "a":
            world.ask("Sa on:")
            world.calls[1].reward = float(world.calls[1].answer == "a")
        world.calls[0].reward = 0.0

    drift = Drift(Forest(program), Forest(program))
    chances = {"S": (0.5, 0.75), "Sa on:": (0.25, 0.5)}
    with torch.no_grad():
        for prompt, both in chances.items():
            for forest, chance in zip((drift.snapshot, drift.prox), both):
                logits = torch.tensor([chance, (1 - chance) * 0.7, (1 - chance) * 0.3]).log()
                forest.of_prompt(forest.logits, prompt).copy_(logits)

    def of_a(gradient: torch.Tensor) -> list[float]:
        return [drift.prox.of_prompt(gradient, prompt)[0].item() for prompt in chances]

    advantages = on_tokens(drift, returns(drift))
    assert of_a(drift.prox.exact) == pytest.approx([3 / 32, 3 / 16])
    for mode, expected in {
        "sequence_truncate": [3 / 32, 3 / 16],
        "turn_truncate": [3 / 64, 1 / 8],
        "token_truncate": [3 / 64, 1 / 8],
    }.items():
        assert of_a(drift.expected(weights(drift, mode) * advantages)) == pytest.approx(expected, rel=1e-6)
    assert of_a(drift.expected(advantages)) == pytest.approx([1 / 32, 1 / 16])
    assert error(drift.expected(weights(drift, "turn_truncate") * advantages), drift.prox.exact) > 0.3


@every_tree
def test_the_other_weights_are_biased(program, seed):
    """So are the exact ones, once they are clipped."""
    drift = drawn(program, seed)
    advantages = on_tokens(drift, returns(drift) - BASELINES[: drift.turns])
    for mode, clip_max in {
        "token_truncate": None,
        "turn_truncate": None,
        "sequence_truncate": 1.5,
        "sequence_mask": 1.5,
    }.items():
        assert error(drift.expected(weights(drift, mode, clip_max) * advantages), drift.prox.exact) > 0.02
    clipped = on_tokens(drift, surprises(drift, BASELINES, clip_max=1.5))
    assert error(drift.expected(clipped), drift.prox.exact) > 0.02


# ------------------------------------------------------------------------------------------------------------ by hand


@pytest.mark.parametrize("clip_max", [None, 3.0])
@pytest.mark.parametrize("mode", MODES)
def test_modes_are_those_of_the_mismatch(mode, clip_max):
    """`tests/objectives/test_mismatch.py` has them by hand."""
    prox = torch.full_like(RATIOS, -1.0)
    expected = importance_weights(prox, prox - RATIOS.log(), TURN_IDS, MASK, mode=mode, highest=clip_max).weights
    torch.testing.assert_close(drift_weights(RATIOS.log(), MASK, TURN_IDS, mode, clip_max), expected)


def test_decision_weights_by_hand():
    found = decision_weights(RATIOS.log(), MASK, TURN_IDS, 3)
    torch.testing.assert_close(found, torch.tensor([[1.0, 8.0, 8.0], [0.25, 0.125, 0.125]]))
    assert found.dtype == torch.float32
    found = decision_weights(RATIOS.log(), MASK, TURN_IDS, 2, clip_max=3.0)
    torch.testing.assert_close(found, torch.tensor([[1.0, 3.0], [0.25, 0.125]]))


def test_a_turn_weighs_its_surprise():
    """Of a first turn that earns 1 and 2 later where 7 was expected and 4 of the second, which earns 2; no third."""
    rewards, weighted = torch.tensor([[1.0, 2.0, 0.0], [1.0, 9.0, 9.0]]), torch.tensor([[2.0, 6.0, 6.0]] * 2)
    happened = torch.tensor([[True, True, False], [True, False, False]])
    values = torch.tensor([[7.0, 4.0, 5.0]] * 2)
    found = gae(rewards, values, torch.tensor([0.0, 3.0]), happened, gamma=0.5, gae_lambda=1.0, weights=weighted)
    second = 6 * (2 - 4.0)
    expected = torch.tensor([[2 * (1 + 0.5 * 4 - 7) + 0.5 * second, second, 0.0], [2 * (1 + 0.5 * 3 - 7), 0.0, 0.0]])
    torch.testing.assert_close(found, expected)


def test_ratios_of_turns_by_hand():
    found = turn_ratios(RATIOS.log(), MASK, TURN_IDS, 3)
    torch.testing.assert_close(found, torch.tensor([[1.0, 8.0, 1.0], [0.25, 0.5, 1.0]]))
    assert found.dtype == torch.float32
    found = turn_ratios(RATIOS.log(), MASK, TURN_IDS, 2, clip_max=3.0)
    torch.testing.assert_close(found, torch.tensor([[1.0, 3.0], [0.25, 0.5]]))


def test_targets_of_an_older_policy_by_hand():
    """Two turns that earn 1 and 2 where 7 and 4 were expected; the answers are 2 and 3 times as likely now."""
    rewards, values = torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[7.0, 4.0, 5.0]])
    happened, ratios = torch.tensor([[True, True, False]]), torch.tensor([[2.0, 3.0, 8.0]])
    found = vtrace_targets(rewards, values, torch.tensor([0.5]), happened, ratios, gamma=0.5, gae_lambda=0.8)
    second = 3 * (2 + 0.5 * 0.5 - 4)
    first = 2 * ((1 + 0.5 * 4 - 7) + 0.5 * 0.8 * second)
    torch.testing.assert_close(found, torch.tensor([[7 + first, 4 + second, 0.0]]))


@every_tree
@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 1.0), (0.8, 0.6)])
def test_targets_are_those_of_the_policy_that_learns(program, seed, gamma, gae_lambda):
    """Over all that the snapshot does after a state, they are prox's own lambda returns; at lambda 1 its returns."""
    drift = drawn(program, seed)
    prox, snapshot, none = drift.prox, drift.snapshot, torch.zeros(len(drift.mask)).double()
    values = prox.table(lambda call, k, _: len(call.prompt) / 3 - k).double()
    options = {"gamma": gamma, "gae_lambda": gae_lambda}
    ratios = turn_ratios(drift.log_ratio, drift.mask, drift.turn_ids, drift.turns)
    found = vtrace_targets(prox.rewards, values, none, prox.mask, ratios.double(), **options)
    plain = gae(prox.rewards, values, none, prox.mask, **options) + values
    earned = discounted_returns(prox.rewards, prox.mask, gamma)
    wrong = 0.0
    for k in range(drift.turns):
        states = [calls[k].prompt if k < len(calls) else None for calls in prox.calls]
        for state in {*states} - {None}:
            there = torch.tensor([one == state for one in states]).double()
            ours, theirs = (there * one.probabilities.detach() for one in (prox, snapshot))
            expected = (ours / ours.sum() * plain[:, k]).sum().item()
            assert (theirs / theirs.sum() * found[:, k]).sum().item() == pytest.approx(expected, abs=EXACT)
            if gae_lambda == 1.0:
                assert expected == pytest.approx((ours / ours.sum() * earned[:, k]).sum().item(), abs=EXACT)
            wrong = max(wrong, abs((theirs / theirs.sum() * plain[:, k]).sum().item() - expected))
    assert wrong > 0.02
    assert torch.equal(found[~prox.mask], torch.zeros((~prox.mask).sum()).double())
    same = vtrace_targets(prox.rewards, values, none, prox.mask, torch.ones_like(values), **options)
    torch.testing.assert_close(same, torch.where(prox.mask, plain, 0.0))


def test_targets_of_one_path_are_those_of_turns_one_after_another():
    """Two computations: a product of ratios for each turn, and one sum from the last turn on."""
    torch.manual_seed(0)
    rewards, values, ratios = torch.randn(3, 5, 7).double()
    ratios, final, happened = (
        ratios.exp(),
        torch.randn(5).double(),
        torch.arange(7) < torch.tensor([[0], [1], [4], [7], [7]]),
    )
    options = {"gamma": 0.9, "gae_lambda": 0.7}
    found = vtrace_targets(rewards, values, final, happened, ratios, **options)
    following = torch.arange(1, 8).expand(5, -1)
    torch.testing.assert_close(
        found, vtrace_targets(rewards, values, final, happened, ratios, **options, following=following)
    )


@pytest.mark.parametrize("gae_lambda", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(
    "following", [None, [[1, 2, 3]] * 2, [[2, 3, 3], [3, 3, 3]]], ids=["next", "named", "skipping"]
)
def test_weights_of_paths(gae_lambda, following):
    """By the definition: rewards up to the next call on the path, then its value, then what it surprised by."""
    values, gamma = torch.tensor([[7.0, 4.0, 5.0], [1.0, -2.0, 0.5]]).double(), 0.9
    rewards, weighted = torch.randn(2, 3, generator=torch.Generator().manual_seed(0)).double(), RATIOS[:, :3].double()
    final, happened = torch.tensor([3.0, 0.0]).double(), torch.tensor([[True] * 3, [True, True, False]])
    given = None if following is None else torch.tensor(following)
    found = gae(rewards, values, final, happened, gamma=gamma, gae_lambda=gae_lambda, following=given, weights=weighted)
    for row, count in enumerate((3, 2)):
        expected = [0.0] * 4
        for k in reversed(range(count)):
            j = (k + 1) if following is None else following[row][k]
            goes_on, end = j < count, min(j, count)
            total = sum(gamma ** (i - k) * weighted[row, i] * rewards[row, i] for i in range(k, end))
            value = values[row, j] if goes_on else final[row]
            total += gamma ** (end - k) * weighted[row, end - 1] * value - weighted[row, k] * values[row, k]
            expected[k] = total + (gamma ** (j - k) * gae_lambda * expected[j] if goes_on else 0.0)
        assert found[row].tolist() == pytest.approx([float(one) for one in expected[:3]])


@pytest.mark.parametrize("following", [[[1, 2, 3]] * 2, [[2, 3, 3], [3, 3, 3]]], ids=["named", "skipping"])
def test_targets_of_paths(following):
    """By the definition: rewards up to the next call on the path, its value, and what that one's target differs by."""
    values, gamma, gae_lambda = torch.tensor([[7.0, 4.0, 5.0], [1.0, -2.0, 0.5]]).double(), 0.9, 0.6
    rewards, ratios = torch.randn(2, 3, generator=torch.Generator().manual_seed(0)).double(), RATIOS[:, :3].double()
    final, happened = torch.tensor([3.0, 0.0]).double(), torch.tensor([[True] * 3, [True, True, False]])
    found = vtrace_targets(
        rewards, values, final, happened, ratios, gamma=gamma, gae_lambda=gae_lambda, following=torch.tensor(following)
    )
    for row, count in enumerate((3, 2)):
        expected = [0.0] * 4
        for k in reversed(range(count)):
            j, own = following[row][k], ratios[row].tolist()
            end = min(j, count)
            total = sum(gamma ** (i - k) * math.prod(own[k : i + 1]) * float(rewards[row, i]) for i in range(k, end))
            value, trace = float(values[row, j] if j < count else final[row]), math.prod(own[k:end])
            total += gamma ** (end - k) * trace * value - own[k] * float(values[row, k])
            if j < count:
                total += gamma ** (j - k) * gae_lambda * trace * (expected[j] - value)
            expected[k] = float(values[row, k]) + total
        assert found[row].tolist() == pytest.approx(expected[:3])


def test_a_group_of_equal_returns_has_no_advantage():
    """Whatever the weights are: what others earn is what a turn is expected to earn."""
    rewards, happened = torch.tensor([[1.0, 2.0], [3.0, 0.0], [2.0, 1.0]]), torch.ones(3, 2) > 0
    weighted = torch.tensor([[2.0, 6.0], [0.1, 0.3], [1.0, 5.0]])
    failed = torch.zeros(3) > 0
    options = {"group_size": 3, "scale": "none", "baseline": "leave_one_out", "weights": weighted}
    equal = group_advantages(torch.tensor([[1.0, 2.0]] * 3), happened, failed, **options).advantages
    assert torch.equal(equal, torch.zeros(3, 2))
    found = group_advantages(rewards, happened, failed, **options).advantages
    expected = [2 * (1 + 0.5 - 3.0) + 6 * (2 - 0.5), 6 * (2 - 0.5)]
    assert found[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("mode", MODES)
def test_tokens_that_do_not_count_have_no_influence(mode):
    mask = MASK.clone()
    mask[0, 3] = False
    noisy, clean = (torch.where(mask, RATIOS.log(), torch.tensor(value)) for value in (math.nan, 0.0))
    first, second = (drift_weights(one, mask, TURN_IDS, mode, 3.0) for one in (noisy, clean))
    assert torch.equal(first, second) and (first[~mask] == 1).all()
    assert drift_metrics(noisy, mask) == drift_metrics(clean, mask)
    first, second = (decision_weights(one, mask, TURN_IDS, 3) for one in (noisy, clean))
    assert torch.equal(first, second)


@pytest.mark.parametrize("mode", MODES)
def test_no_drift_weighs_nothing(mode):
    none = torch.zeros(2, 5)
    assert torch.equal(drift_weights(none, MASK, TURN_IDS, mode, 1.0), torch.ones(2, 5))
    nothing = torch.full((1, 2), -1)
    assert torch.equal(drift_weights(none[:1, :2], nothing >= 0, nothing, mode), torch.ones(1, 2))


def test_an_unknown_mode():
    with pytest.raises(ValueError, match=r"mode.*'token_truncate'.*'sequence_mask'.*'word_mask'"):
        drift_weights(RATIOS.log(), MASK, TURN_IDS, "word_mask")


# --------------------------------------------------------------------------------------------------------- measurements


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([1.0] * 5, 5.0),
        ([3.0, 1.0], 1.6),
        ([0.0, 7.0, 0.0], 1.0),
        ([1.0, 2.0, 3.0], 36 / 14),
        ([0.0, 0.0], 0.0),
        ([], 0.0),
    ],
)
def test_effective_sample_size_by_hand(weights, expected):
    logs = torch.tensor(weights).double().log()
    assert effective_sample_size(logs) == pytest.approx(expected)
    assert effective_sample_size(logs + 1000.0) == pytest.approx(expected)


def test_metrics_by_hand():
    ratios = [2.0, 0.5, 4.0, 2.0, 0.25, 1.0, 0.5]
    expected = {
        "kl": sum(ratio - 1 - math.log(ratio) for ratio in ratios) / 7,
        "ratio/min": 0.25,
        "ratio/mean": sum(ratios) / 7,
        "ratio/max": 4.0,
        "effective_sample_size": (8 + 0.125) ** 2 / (64 + 0.125**2) / 2,
    }
    padded = torch.cat([RATIOS.log(), torch.zeros(1, 5)]), torch.cat([MASK, torch.zeros(1, 5) > 0])
    for log_ratio, mask in ((RATIOS.log(), MASK), padded):
        found = drift_metrics(log_ratio, mask)
        assert found == pytest.approx({f"drift/{name}": value for name, value in expected.items()}, rel=1e-5)
    assert drift_metrics(RATIOS.log(), torch.zeros_like(MASK)) == {}


@every_tree
def test_the_mean_of_k3_is_the_divergence(program, seed):
    """Of an episode under the snapshot from prox, added up over its tokens."""
    drift = drawn(program, seed)
    chances = drift.snapshot.probabilities
    exact = (chances * (chances / drift.prox.probabilities).log()).sum().item()
    tokens = drift.mask.sum(1)
    found = [drift_metrics(row[None], mask[None])["drift/kl"] for row, mask in zip(drift.log_ratio, drift.mask)]
    assert (chances * tokens) @ torch.tensor(found).double() == pytest.approx(exact, rel=1e-6) and exact > 0.1
