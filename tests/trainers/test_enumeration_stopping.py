"""The proof where a policy may stop: every estimator's expectation over all episodes, which differ in length.

Raw returns, leave-one-out and GAE with the exact value, unscaled, are the exact policy gradient. What is scaled, or has the
plain mean as its baseline, is no multiple of it and equals an enumeration written out here.
"""

from __future__ import annotations

import statistics

import pytest
import torch
from games import Chatter, make_trainer, settings
from ppo_games import make_ppo
from stopping import Game, relative_error
from trl import GRPOTrainer

from agile_trainers.step.critic import CriticValues
from agile_trainers.trainers import MultiTurnREINFORCEConfig, MultiTurnREINFORCETrainer

GAMMAS = [1.0, 0.5]


@pytest.fixture
def game(monkeypatch, request):
    """The policy, in the place of a network: TRL's loss asks for its log-probabilities."""
    played = Game(request.param if hasattr(request, "param") else 3)

    def scored(self, model, input_ids, attention_mask, logits_to_keep, **kwargs):
        log_probs = played.score(input_ids[:, -logits_to_keep:])
        return log_probs, torch.zeros_like(log_probs), None

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", scored)
    return played


two_and_three_turns = pytest.mark.parametrize("game", [2, 3], indirect=True, ids=["2-turns", "3-turns"])


def grpo(model, folder, size, groups=1, **changes):
    options = {"scale_rewards": "none", "loss_type": "dr_grpo", **changes}
    return make_trainer(
        model, folder, num_generations=size, per_device_train_batch_size=size * groups, lora=False, **options
    )


def test_the_exact_gradient_is_that_of_the_expected_return(game):
    """And it depends on the discount, so that a test at gamma .5 tests more than one at 1."""
    assert relative_error(game.exact_gradient(1.0), game.expected_return_gradient()) < 1e-6
    assert relative_error(game.exact_gradient(0.5), game.exact_gradient(1.0)) > 0.05


@pytest.mark.parametrize("gamma", GAMMAS)
@two_and_three_turns
def test_raw_returns_are_the_exact_gradient(embedded_model, tmp_path, game, gamma):
    trainer, returns = grpo(embedded_model, tmp_path, 2), game.returns(gamma)
    estimated = sum(
        p * game.estimate(trainer, [e], torch.tensor([returns[e]])) for e, p in enumerate(game.probabilities())
    )
    assert relative_error(estimated, game.exact_gradient(gamma)) < 1e-5


@pytest.mark.parametrize(
    ("game", "size", "gamma"), [(2, 2, 0.5), (2, 4, 0.5), (3, 2, 1.0), (3, 2, 0.5)], indirect=["game"]
)
def test_leave_one_out_is_the_exact_gradient(embedded_model, tmp_path, game, size, gamma):
    trainer = grpo(embedded_model, tmp_path, size, advantage_baseline="leave_one_out", gamma=gamma)
    assert relative_error(game.expectation(trainer, 1, size), game.exact_gradient(gamma)) < 1e-5


@pytest.mark.parametrize("level", ["turn", "token"])
def test_leave_one_out_with_summed_ratios_and_over_whole_episodes(embedded_model, tmp_path, game, level):
    """What remains of the options that leave the expectation alone."""
    changes = {"importance_sampling_level": "turn", "turn_ratio_pooling": "sum"} if level == "turn" else {}
    granularity = "turn" if level == "turn" else "trajectory"
    trainer = grpo(
        embedded_model, tmp_path, 2, advantage_baseline="leave_one_out", advantage_granularity=granularity, **changes
    )
    assert relative_error(game.expectation(trainer, 1, 2), game.exact_gradient(1.0)) < 1e-5


@pytest.mark.parametrize(
    ("gae_lambda", "granularity", "gamma"),
    [
        (0.0, "turn", 0.5), (0.0, "token", 1.0), (0.6, "turn", 1.0), (0.6, "token", 0.5), (1.0, "turn", 0.5),
        (1.0, "token", 0.5),
    ],
)  # fmt: skip
def test_gae_with_the_exact_value_is_the_exact_gradient(
    embedded_model, tmp_path, game, gae_lambda, granularity, gamma, monkeypatch
):
    trainer = make_ppo(
        embedded_model, tmp_path, loss_type="dr_grpo", gamma=gamma, gae_lambda=gae_lambda,
        advantage_granularity=granularity,
    )  # fmt: skip
    value = game.values(gamma)
    estimated = 0.0
    for e, p in enumerate(game.probabilities()):
        turns = game.episodes[e]
        by_turn = torch.tensor([[value(e, k, 0) for k in range(len(turns))]])
        by_token = torch.zeros(1, len(game.trajectory(e).completion_ids))
        for k, turn in enumerate(game.trajectory(e).turns):
            for known in range(turn.end - turn.start):
                by_token[0, turn.start + known] = value(e, k, known)
        values = by_token if granularity == "token" else by_turn
        read = CriticValues(torch.zeros_like(values), values, by_turn, torch.zeros(1), granularity == "token")
        monkeypatch.setattr(trainer.critic, "read", lambda batch, read=read: read)
        estimated = estimated + p * game.estimate(trainer, [e])
    assert relative_error(estimated, game.exact_gradient(gamma)) < 1e-5


# ----------------------------------------------------------------------------------- scaled, and with the mean as baseline


def brute_force_advantages(returns, size, scale, baseline, fallback):
    """The rule of docs/grpo.md, member by member."""

    def advantages(members):
        everything = [value for e in members for value in returns[e]]
        rows = [[0.0] * len(returns[e]) for e in members]
        for i, episode in enumerate(members):
            group = range(i // size * size, i // size * size + size)
            others = [returns[members[j]] for j in group if j != i]
            for k, value in enumerate(returns[episode]):
                with_it = [other[k] for other in others if len(other) > k]
                if not with_it and fallback:
                    with_it = [other[0] for other in others]
                if not with_it or statistics.stdev([value, *with_it]) < 1e-6:
                    continue
                minus = statistics.fmean(with_it if baseline == "leave_one_out" else [value, *with_it])
                spread = {"group": [value, *with_it], "batch": everything}.get(scale)
                if scale == "mean":
                    rows[i][k] = (value - minus) / statistics.fmean([value, *with_it])
                    continue
                rows[i][k] = (value - minus) / (statistics.stdev(spread) + 1e-4 if spread else 1.0)
        return rows

    return advantages


@pytest.mark.parametrize(
    "game, groups, size, gamma, options",
    [
        (2, 1, 3, 1.0, {"scale_rewards": "none"}),
        (3, 1, 3, 0.5, {"scale_rewards": "none"}),
        (2, 1, 3, 0.5, {"scale_rewards": "group"}),
        (3, 1, 3, 0.5, {"scale_rewards": "group", "advantage_baseline": "leave_one_out"}),
        (2, 2, 2, 0.5, {"scale_rewards": "batch"}),
        (2, 1, 3, 0.5, {"scale_rewards": "mean"}),
        (3, 1, 3, 0.5, {"scale_rewards": "none", "turn_advantage_trajectory_fallback": False}),
    ],
    ids=["mean-undiscounted", "mean", "group", "group-leave-one-out", "batch", "maxrl", "no-fallback"],
    indirect=["game"],
)
def test_what_is_no_multiple_of_the_exact_gradient_equals_brute_force(
    embedded_model, tmp_path, game, groups, size, options, gamma
):
    if options["scale_rewards"] == "mean":
        game.rewards = [[abs(reward) for reward in rewards] for rewards in game.rewards]
    trainer = grpo(embedded_model, tmp_path, size, groups, gamma=gamma, **options)
    baseline = options.get("advantage_baseline", "mean")
    fallback = options.get("turn_advantage_trajectory_fallback", True)
    rule = brute_force_advantages(game.returns(gamma), size, options["scale_rewards"], baseline, fallback)
    expected = game.brute_force(groups * size, rule)
    assert relative_error(game.expectation(trainer, groups, size), expected) < 1e-5
    exact = game.exact_gradient(gamma)
    assert relative_error(expected * (expected @ exact) / (expected @ expected), exact) > 0.01, "a multiple after all"


@pytest.mark.parametrize("game", [2], indirect=True)
def test_whitened_advantages_equal_brute_force(embedded_model, tmp_path, game):
    returns = game.returns(0.5)

    def advantages(members):
        rows = brute_force_advantages(returns, 3, "none", "leave_one_out", True)(members)
        values = [value for row in rows for value in row]
        mean, spread = statistics.fmean(values), statistics.stdev(values)
        return [[(value - mean) / (spread + 1e-8) if spread > 1e-6 else 0.0 for value in row] for row in rows]

    options = {"advantage_baseline": "leave_one_out", "gamma": 0.5, "whiten_advantages": True}
    trainer = grpo(embedded_model, tmp_path, 3, **options)
    assert relative_error(game.expectation(trainer, 1, 3), game.brute_force(3, advantages)) < 1e-5


def _among(value, values):
    """GRPO's formula."""
    if len(values) < 2 or statistics.stdev(values) < 1e-6:
        return 0.0
    return (value - statistics.fmean(values)) / (statistics.stdev(values) + 1e-4)


@pytest.mark.parametrize(
    ("game", "granularity", "weight", "size"), [(2, "trajectory", 0.0, 3), (3, "anchor", 1.0, 2)], indirect=["game"]
)
def test_whole_episodes_and_states_equal_brute_force(embedded_model, tmp_path, game, granularity, weight, size):
    """The episode among the episodes, plus each turn beside those of other members from a state of the same name.

    With three turns a state of one name may come at two of them.
    """
    returns = game.returns(0.5)

    def advantages(members):
        whole = [sum(game.rewards[e]) for e in members]

        def beside_others(i, k):
            states = [(game.state(e, n), v) for j, e in enumerate(members) if j != i for n, v in enumerate(returns[e])]
            own = returns[members[i]][k]
            return _among(own, [own, *(v for state, v in states if state == game.state(members[i], k))])

        return [
            [_among(sum(game.rewards[e]), whole) + weight * beside_others(i, k) for k in range(len(returns[e]))]
            for i, e in enumerate(members)
        ]

    changes = {"gamma": 0.5} if weight else {}
    trainer = grpo(
        embedded_model, tmp_path, size, scale_rewards="group", advantage_granularity=granularity, environment=Anchored,
        **changes,
    )  # fmt: skip
    assert relative_error(game.expectation(trainer, 1, size), game.brute_force(size, advantages)) < 1e-5


class Anchored(Chatter):
    """Names its states, as the trainer's construction wants to see."""

    def reset(self, seed=None, options=None):
        return super().reset(seed, options)[0], {"anchor": "start"}


@pytest.mark.parametrize(("granularity", "gamma"), [("turn", 0.5), ("token", 0.5)])
def test_rebn_equals_brute_force(embedded_model, tmp_path, game, granularity, gamma):
    """A turn of two tokens counts once, or twice."""

    def advantages(members):
        counts = {e: [len(turn) if granularity == "token" else 1 for turn in game.episodes[e]] for e in members}
        values = [value for e in members for value, count in zip(returns[e], counts[e]) for _ in range(count)]
        mean, spread = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
        scale = 1 / (spread + 1e-8) if spread > 1e-6 else 0.0
        return [[scale * (value - mean) for value in returns[e]] for e in members]

    returns = game.returns(gamma)
    args = MultiTurnREINFORCEConfig(
        **settings(tmp_path, num_generations=1, per_device_train_batch_size=3, loss_type="dr_grpo", gamma=gamma),
        advantage_granularity=granularity,
    )
    trainer = MultiTurnREINFORCETrainer(model=str(embedded_model), args=args, environment=Chatter)
    assert relative_error(game.expectation(trainer, 1, 3), game.brute_force(3, advantages)) < 1e-5
