"""The proof: expectations over *all* episodes of a task small enough to list them, against the exact gradient.

Two turns, two tokens in the vocabulary. Turn 0 is one token, turn 1 two, an observation stands between:

    completion   a  |  o  |  b  c
    turn_ids     0    -1     1  1
    reward     r0[a]       r1[a, b, c]

The policy is a table of logits per context, so the exact objective and its gradient come from summing over 8 episodes.
The estimator under test is the real one: our credit rules and TRL's own ``_compute_loss``, which only gets its
log-probabilities from the table instead of a network.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from enumerated import (
    EPISODES,
    GAMMA,
    LEVELS,
    TURN_IDS,
    Table,
    estimate,
    exact_gradient,
    exact_return_gradient,
    grpo,
    relative_error,
    turn_batch,
    turn_rewards,
)
from games import Chatter, settings

from agile_trainers.step.batch import penalize
from agile_trainers.step.credit import Credit, gather_turns
from agile_trainers.step.log_probs import BatchLogProbs
from agile_trainers.trainers import MultiTurnREINFORCEConfig, MultiTurnREINFORCETrainer


def expectation(trainer, table: Table, group: int) -> torch.Tensor:
    """Of the gradient over every group of ``group`` independent episodes; in one order each, if there are many."""
    probability, total = table.probability().detach(), 0.0
    for members, orders in groups_of(group):
        total = total + orders * probability[members].prod() * estimate(trainer, table, EPISODES[members])
    return total


def groups_of(size: int) -> Iterator[tuple[list[int], int]]:
    """The members of each group, and in how many orders it is drawn; pairs in each order."""
    if size == 2:
        yield from ((list(pair), 1) for pair in itertools.product(range(8), repeat=2))
        return
    for members in itertools.combinations_with_replacement(range(8), size):
        yield list(members), len(set(itertools.permutations(members)))


@pytest.mark.parametrize("level", LEVELS, ids=["token", "turn-mean", "turn-sum"])
def test_the_order_of_a_group_changes_nothing(embedded_model, tmp_path, table, level):
    trainer = grpo(embedded_model, tmp_path, 3, scale_rewards="group", **level)
    first, *others = (estimate(trainer, table, EPISODES[list(one)]) for one in itertools.permutations((1, 4, 6)))
    assert first.norm() > 0.1 and all(relative_error(other, first) < 1e-5 for other in others)


@pytest.mark.parametrize("level", LEVELS, ids=["token", "turn-mean", "turn-sum"])
def test_raw_returns_estimate_the_exact_policy_gradient(embedded_model, tmp_path, table, level):
    """No baseline, no scale: the loss, the masks and the ratios alone."""
    trainer = grpo(embedded_model, tmp_path, 2, **level)
    probability, rewards = table.probability().detach(), turn_rewards(EPISODES)
    to_go = torch.stack([rewards.sum(1), rewards[:, 1]], 1)
    rows = [estimate(trainer, table, EPISODES[[i]], to_go[[i]]) for i in range(8)]
    estimated = sum(p * row for p, row in zip(probability, rows))
    assert relative_error(estimated, exact_return_gradient(table)) < 1e-5


@pytest.mark.parametrize(
    ("group", "granularity", "level"),
    [
        *((2, granularity, level) for granularity in ("turn", "trajectory") for level in LEVELS),
        *((3, granularity, LEVELS[0]) for granularity in ("turn", "trajectory")),
    ],
)
def test_unscaled_grpo_is_the_exact_gradient_shrunk_by_its_own_share(
    embedded_model, tmp_path, table, group, granularity, level
):
    """A member is part of its own baseline, which takes 1/G of it away: E = (1 - 1/G) times the exact gradient."""
    trainer = grpo(embedded_model, tmp_path, group, advantage_granularity=granularity, **level)
    exact = (1 - 1 / group) * exact_return_gradient(table)
    assert relative_error(expectation(trainer, table, group), exact) < 1e-5


@pytest.mark.parametrize("granularity", ["turn", "trajectory"])
@pytest.mark.parametrize("group", [2, 3])
def test_leave_one_out_is_the_exact_gradient(embedded_model, tmp_path, table, group, granularity):
    changes = {"advantage_baseline": "leave_one_out", "advantage_granularity": granularity}
    trainer = grpo(embedded_model, tmp_path, group, **changes)
    assert relative_error(expectation(trainer, table, group), exact_return_gradient(table)) < 1e-5


def test_discounted_turn_credit(embedded_model, tmp_path, table):
    trainer = grpo(embedded_model, tmp_path, 2, gamma=GAMMA)
    assert relative_error(expectation(trainer, table, 2), 0.5 * exact_gradient(table, GAMMA)) < 1e-5


def _brute_force(table: Table, group: int, advantages) -> torch.Tensor:
    """The same expectation written out: sum over groups of p * mean over members of sum over turns of A * grad log pi."""
    probability = table.probability().detach().tolist()

    def score_of(i: int, k: int) -> torch.Tensor:
        # Zero times every table keeps those a turn does not use in the graph.
        unused = 0 * sum(logits.sum() for logits in table.logits)
        return table.gradient(table.log_probs(EPISODES)[i, TURN_IDS.eq(k)].sum() + unused)

    score = [[score_of(i, k) for k in (0, 1)] for i in range(8)]
    total = torch.zeros_like(score[0][0])
    for members, orders in groups_of(group):
        weight = float(orders)
        for i in members:
            weight *= probability[i]
        for i, row in zip(members, advantages([turn_rewards(EPISODES)[i].tolist() for i in members])):
            for k in (0, 1):
                total += weight / group * row[k] * score[i][k]
    return total


def _mean_std(values: list[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    return mean, (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5


def test_normalized_grpo_equals_brute_force(embedded_model, tmp_path, table):
    def advantages(rewards):
        rows = [[0.0, 0.0] for _ in rewards]
        for k in (0, 1):
            to_go = [sum(r[k:]) for r in rewards]
            mean, std = _mean_std(to_go)
            for i, value in enumerate(to_go):
                rows[i][k] = (value - mean) / (std + 1e-4) if std > 1e-6 else 0.0
        return rows

    trainer = grpo(embedded_model, tmp_path, 3, scale_rewards="group")
    assert relative_error(expectation(trainer, table, 3), _brute_force(table, 3, advantages)) < 1e-5


def test_rebn_equals_brute_force(embedded_model, tmp_path, table):
    def advantages(rewards):
        to_go = [[r[0] + GAMMA * r[1], r[1]] for r in rewards]
        mean, std = _mean_std([value for row in to_go for value in row])
        return [[(value - mean) / (std + 1e-8) if std > 1e-6 else 0.0 for value in row] for row in to_go]

    args = MultiTurnREINFORCEConfig(
        **settings(tmp_path, num_generations=1, per_device_train_batch_size=3, loss_type="dr_grpo", gamma=GAMMA)
    )
    trainer = MultiTurnREINFORCETrainer(model=str(embedded_model), args=args, environment=Chatter)
    assert relative_error(expectation(trainer, table, 3), _brute_force(table, 3, advantages)) < 1e-5


def test_rebn_with_population_statistics_is_the_exact_gradient_over_sigma(embedded_model, tmp_path, table):
    """Replacing the batch's mean and deviation by constants leaves an unbiased estimator, up to the scale."""
    trainer = grpo(embedded_model, tmp_path, 2)
    probability, rewards = table.probability().detach(), turn_rewards(EPISODES)
    to_go = torch.stack([rewards.sum(1), rewards[:, 1]], 1)
    mean = (probability[:, None] * to_go).sum() / 2
    sigma = ((probability[:, None] * (to_go - mean) ** 2).sum() / 2).sqrt()
    rows = [estimate(trainer, table, EPISODES[[i]], ((to_go - mean) / sigma)[[i]]) for i in range(8)]
    estimated = sum(p * row for p, row in zip(probability, rows))
    assert relative_error(estimated, exact_return_gradient(table) / sigma) < 1e-5


def test_kl_in_the_loss_has_the_exact_value_and_gradient(embedded_model, tmp_path, table):
    """E[k3] is KL(policy || reference) over episodes. With the ratio correction its gradient is the exact one of
    sum over contexts of p(context) * KL(policy(context) || reference(context)), the contexts' own probability held
    fixed: a KL in the loss does not credit an early token for leading to contexts of less divergence later.
    """
    reference = Table(1)
    trainer = grpo(embedded_model, tmp_path, 2)
    trainer.beta = 0.7
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    with torch.no_grad():
        reference_log_probs = reference.log_probs(EPISODES)
    exact = (table.probability() * (table.log_probs(EPISODES) - reference_log_probs)[:, TURN_IDS >= 0].sum(1)).sum()
    exact_gradient = table.gradient(_kl_given_contexts(table, reference))
    probability, estimated, value = table.probability().detach(), 0.0, 0.0
    for i in range(8):
        columns = {"ref_per_token_logps": reference_log_probs[[i]]}
        zero = torch.zeros(1, 2)
        estimated = estimated + probability[i] * estimate(trainer, table, EPISODES[[i]], zero, **columns)
        value += probability[i].item() * trainer._metrics["train"]["kl"][-1] * 3
    assert value == pytest.approx(exact.item(), rel=1e-5)
    assert relative_error(estimated, -0.7 * exact_gradient) < 1e-5


def _kl_given_contexts(table: Table, reference: Table) -> torch.Tensor:
    total, reached = torch.zeros(()), torch.ones(())
    for logits, other in zip(table.logits, reference.logits):
        log_probs, other_log_probs = logits.log_softmax(-1), other.detach().log_softmax(-1)
        total = total + (reached * (log_probs.exp() * (log_probs - other_log_probs)).sum(-1)).sum()
        reached = (reached[..., None] * log_probs.exp()).detach()
    return total


def scores_of(table: Table, reference: Table, episodes: torch.Tensor) -> BatchLogProbs:
    with torch.no_grad():
        everything = torch.ones(len(episodes)) > 0
        return BatchLogProbs(everything, table.log_probs(episodes), reference.log_probs(episodes))


def exact_divergence(table: Table, reference: Table) -> torch.Tensor:
    """KL(policy || reference) over episodes, with the gradient of every path."""
    log_ratio = (table.log_probs(EPISODES) - reference.log_probs(EPISODES).detach())[:, TURN_IDS >= 0].sum(1)
    return (table.probability() * log_ratio).sum()


def test_kl_in_the_reward_has_the_exact_value_and_gradient(embedded_model, tmp_path, table):
    """E[return - beta * log-ratio], by leave-one-out over pairs: the gradient of E[return] - beta * KL, all of it."""
    reference, beta = Table(1), 0.7
    trainer = grpo(embedded_model, tmp_path, 2, beta=beta, kl_placement="reward", advantage_baseline="leave_one_out")
    probability, estimated, value = table.probability().detach(), 0.0, 0.0
    for members in itertools.product(range(8), repeat=2):
        batch, weight = turn_batch(EPISODES[list(members)]), probability[list(members)].prod()
        scores = scores_of(table, reference, EPISODES[list(members)])
        kl = penalize(batch, scores, trainer.args, trainer.accelerator)["kl"]
        advantages = trainer.assign_credit(gather_turns(batch, trainer.accelerator)).advantages
        estimated = estimated + weight * estimate(trainer, table, EPISODES[list(members)], advantages)
        value += weight.item() * kl * 3
    divergence = exact_divergence(table, reference)
    assert value == pytest.approx(divergence.item(), rel=1e-5)
    exact = exact_return_gradient(table) - beta * table.gradient(divergence)
    assert relative_error(estimated, exact) < 1e-5


def _divergence_given_turns(table: Table, reference: Table) -> torch.Tensor:
    """Sum over turns of the KL divergence of the whole turn, the turns before it held fixed."""
    first = table.logits[0].log_softmax(-1)
    first_reference = reference.logits[0].detach().log_softmax(-1)
    total = (first.exp() * (first - first_reference)).sum()
    for a in (0, 1):
        log_ratio, probability = [], []
        for b, c in itertools.product((0, 1), repeat=2):
            turn = [
                t.logits[1].log_softmax(-1)[a, b] + t.logits[2].log_softmax(-1)[a, b, c] for t in (table, reference)
            ]
            log_ratio.append(turn[0] - turn[1].detach())
            probability.append(turn[0].exp())
        total = total + first.detach().exp()[a] * sum(p * r for p, r in zip(probability, log_ratio))
    return total


@pytest.mark.parametrize(
    "level, divergence",
    [
        ({"importance_sampling_level": "token"}, lambda *tables: _kl_given_contexts(*tables)),
        ({"importance_sampling_level": "turn"}, _divergence_given_turns),
        ({"importance_sampling_level": "turn", "turn_ratio_pooling": "sum"}, _divergence_given_turns),
        ({"importance_sampling_level": "sequence"}, exact_divergence),
    ],
    ids=["token", "turn-mean", "turn-sum", "sequence"],
)
def test_kl_in_the_advantage_has_the_exact_value_and_gradient(embedded_model, tmp_path, table, level, divergence):
    """The divergence of what the ratio spans, what came before held fixed."""
    reference, beta = Table(1), 0.7
    trainer = grpo(embedded_model, tmp_path, 2, beta=beta, kl_placement="advantage", **level)
    probability, estimated, value = table.probability().detach(), 0.0, 0.0
    for i in range(8):
        batch, scores = turn_batch(EPISODES[[i]]), scores_of(table, reference, EPISODES[[i]])
        kl = penalize(batch, scores, trainer.args, trainer.accelerator)["kl"]
        columns = trainer.batches.finish(batch, Credit(torch.zeros(1, 2)), scores, None).to_trl()
        assert not {"old_per_token_logps", "ref_per_token_logps"} & columns.keys()
        spread = columns["advantages"]
        gradient = estimate(trainer, table, EPISODES[[i]], torch.zeros(1, 2), spread=spread)
        estimated = estimated + probability[i] * gradient
        value += probability[i].item() * kl * 3
    assert torch.equal(batch.turn_rewards, turn_rewards(EPISODES[[7]]))
    assert value == pytest.approx(exact_divergence(table, reference).item(), rel=1e-5)
    assert relative_error(estimated, -beta * table.gradient(divergence(table, reference))) < 1e-5
