"""The expected gradient of each treatment of demonstrations: over *all* groups, through the trainer's own step.

A transformer over five tokens plays one to three turns, and another one is the expert, of known or unknown probability. A
group is two episodes of the first and one of the second. The expectations come from the model's own logits, formulas in
plain Python, and autograd.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
import torch
from enumerated import grpo, relative_error
from five_tokens import END, PAID_LAYOUTS, VOCAB, Stopping, forward_of, policy, probabilities, rewarded, taken

from agile_trainers.objectives.demonstrations import (
    ADVANTAGE_SFT,
    SFT,
    TREATMENTS,
    WEIGHTED,
    demonstration_credit,
    demonstration_loss,
)
from agile_trainers.packing.packer import PackingState
from agile_trainers.rollout.collate import collate
from agile_trainers.step.credit import Credit
from agile_trainers.step.log_probs import BatchLogProbs
from agile_trainers.train_batch import DEMONSTRATED
from agile_trainers.types import Trajectory


def shown(world: Stopping, log_probs: torch.Tensor) -> list[Trajectory]:
    """The same episodes by the expert, with its log-probabilities (N, T)."""
    demonstrations = deepcopy(world.episodes)
    for episode, own in zip(demonstrations, log_probs.tolist(), strict=True):
        episode.demonstration, episode.sampling_logprobs = True, own[: len(episode.completion_ids)]
    return demonstrations


def advantages(returns: tuple[float, ...], reached: tuple[bool, ...]) -> list[float]:
    """Each return minus the mean of those whose episode reached the turn, or, if it is alone, of all episodes."""
    compared = [value for value, there in zip(returns, reached, strict=True) if there]
    baseline = compared if len(compared) > 1 else returns
    mean = sum(baseline) / len(baseline)
    found = [value - mean if there else 0.0 for value, there in zip(returns, reached, strict=True)]
    return found


@cache
def expected_credit(layout: str, supervised: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, K) of own episodes, and of the expert's: by the definition, over all groups of two and one."""
    world = rewarded(PAID_LAYOUTS[layout])
    own, turns = probabilities(world).detach().tolist(), len(world.lengths)
    ours, theirs = ([[0.0] * turns for _ in world.episodes] for _ in range(2))
    returns = [episode.episode_return for episode in world.episodes]  # all of it comes with the last turn
    reached = [[k < len(episode.turns) for k in range(turns)] for episode in world.episodes]
    for i, j in itertools.product(range(len(returns)), repeat=2):
        for k in range(turns):
            pair = advantages((returns[i], returns[j]), (reached[i][k], reached[j][k]))
            ours[i][k] += own[j] * pair[0]
            for d in range(len(returns)):
                group = (i, j, d)
                whole = advantages(tuple(returns[n] for n in group), tuple(reached[n][k] for n in group))[2]
                theirs[d][k] += own[i] * own[j] * (float(whole > 0) if supervised else max(whole, 0.0))
    return torch.tensor(ours, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64)


@pytest.fixture(scope="module")
def advantages_of(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], torch.Tensor]:
    """What the trainer's own credit makes of a layout, a batch of all groups: (N, N, N, 3, K). No treatment changes it."""

    @cache
    def judged(layout: str) -> torch.Tensor:
        world = rewarded(PAID_LAYOUTS[layout])
        demonstrations = shown(world, taken(world, world.log_softmax(policy(1, 1.0))).detach())
        trainer = grpo(embedded_model, tmp_path_factory.mktemp("groups"), 3, demonstrations="experts:hums")
        count = len(world.episodes)
        groups = [(i, j, count + d) for i, j, d in itertools.product(range(count), repeat=3)]
        each = collate([*world.episodes, *demonstrations], pad_token_id=0, end_token_id=END)
        credit = trainer.batches._credit
        found = credit.finish(credit.judge(each.rows(torch.tensor(groups).flatten()))).advantages
        return found.double().view(count, count, count, 3, -1)

    return judged


def trained_credit(world: Stopping, found: torch.Tensor, treatment: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The same from the trainer's advantages of all groups."""
    own = probabilities(world).detach()
    theirs = torch.einsum("i,j,ijdk->dk", own, own, demonstration_credit(found[..., 2, :], treatment))
    # Own advantages do not depend on the demonstration beside them.
    assert (found[:, :, :1, :2] - found[..., :2, :]).abs().max() == 0.0
    return torch.einsum("j,ijk->ik", own, found[:, :, 0, 0]), theirs


@pytest.mark.parametrize("layout", PAID_LAYOUTS)
@pytest.mark.parametrize("treatment", [*TREATMENTS, "unknown"])
def test_the_gradient_is_that_of_the_formula(
    embedded_model: Path, tmp_path: Path, advantages_of: Callable[[str], torch.Tensor], treatment: str, layout: str
) -> None:
    known = treatment != "unknown"
    treatment = treatment if known else WEIGHTED
    world, coefficient = rewarded(PAID_LAYOUTS[layout]), 0.7
    log_q = taken(world, world.log_softmax(policy(1, 1.0))).detach()
    q = log_q.sum(1).exp()
    demonstrations = shown(world, log_q if known else torch.zeros_like(log_q))
    trainer = grpo(
        embedded_model, tmp_path, 3, sequence_packing="prefix", demonstrations="experts:hums",
        demonstration_loss=treatment, demonstration_coef=coefficient,
    )  # fmt: skip
    trainer.packer._forwards |= {id(world.model): forward_of(world.model, 1.0)}
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    credits = trained_credit(world, advantages_of(layout), treatment)
    by_hand = expected_credit(layout, treatment == SFT)
    for one, other in zip(credits, by_hand, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)

    # The batch of all episodes, own ones and the expert's, each weighed by its probability and expected credit.
    batch = collate([*world.episodes, *demonstrations], pad_token_id=0, end_token_id=END)
    p, count = probabilities(world).detach(), len(world.episodes)
    scale = 2 * count * trainer.max_completion_length
    spread = torch.cat([p[:, None] * by_hand[0], torch.zeros_like(by_hand[1])]) * scale
    log_probs = BatchLogProbs(torch.ones(2 * count) > 0)
    units = torch.cat([spread[:count], torch.ones(count, spread.size(1))])
    output = trainer.batches.finish(batch, Credit(units), log_probs, None)
    weights = torch.cat([torch.zeros_like(by_hand[1]), q[:, None] * by_hand[1]]) * scale
    turns = batch.turn_ids.clamp(min=0)
    assert int(output.counted[count:].sum()) == 0 and output.num_items_in_batch == batch.action_mask[:count].sum()
    output.token_columns[DEMONSTRATED] = output.token_columns[DEMONSTRATED].double() * weights.gather(1, turns)
    output.advantages = spread.gather(1, turns) * output.counted
    output.has_advantage = torch.ones(2 * count) > 0
    output.old_per_token_logps = None
    log_p, turn_ids = taken(world, world.log_softmax(world.model)), world.batch().turn_ids
    index = turn_ids.clamp(min=0)
    factor = {
        SFT: torch.ones_like(log_p), ADVANTAGE_SFT: torch.ones_like(log_p),
        WEIGHTED: torch.minimum(log_p.detach().exp() / (log_q.exp() if known else 1.0), torch.ones_like(log_p)),
    }[treatment] * (turn_ids >= 0)  # fmt: skip
    own = (p[:, None] * by_hand[0].gather(1, index) * taken(world, world.log_softmax(world.model))).sum()
    expert = (q[:, None] * factor * by_hand[1].gather(1, index) * log_p).sum()
    alone = world.gradient(own)
    exact = alone + coefficient * world.gradient(expert)
    for refused in ("padded", None):
        trainer.packer.state = PackingState(checked=True, refused=refused)
        world.model.zero_grad()
        trainer._compute_loss(world.model, output.to_trl()).backward()
        found = -torch.cat([one.grad.flatten() for one in world.model.parameters()])
        assert relative_error(found, exact) < 1e-6 and relative_error(found, alone) > 0.005


def test_where_the_bound_does_not_act_the_weight_is_exact(embedded_model: Path) -> None:
    """Of one token, the expectation over the expert is the gradient of the policy's own expected credit."""
    world = rewarded((1,))
    log_p = taken(world, world.log_softmax(world.model))
    log_q = taken(world, world.log_softmax(policy(1, 1.0))).detach()
    credit = torch.rand(VOCAB, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    credit = torch.where(log_p.detach() < log_q, credit, 0.0)
    found = world.gradient(-(log_q.exp() * demonstration_loss(log_p, log_q, credit, WEIGHTED)).sum())
    log_p = taken(world, world.log_softmax(world.model))
    assert relative_error(found, world.gradient((log_p.exp() * credit).sum())) < 1e-12
