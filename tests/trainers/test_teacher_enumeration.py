"""Each gradient of a teacher is that of its target: expectations over *all* episodes, through the trainer's own step.

A transformer over five tokens plays two or three turns, with a fixed token as the observation between them. The end token,
as the first of a turn, ends the episode. The exact values come from the model's own logits, and autograd over the sum of all
episodes.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from enumerated import grpo, relative_error
from five_tokens import (
    FILTERS,
    LAYOUTS,
    VOCAB,
    Stopping,
    World,
    forward_of,
    micro_batch,
    policy,
    probabilities,
    taken,
)

from agile_trainers.objectives.distillation import FORWARD, GRADIENTS, IMMEDIATE, RETURN_TO_GO, REVERSE, SAMPLED
from agile_trainers.objectives.segments import spread_to_tokens
from agile_trainers.packing.packer import PackingState
from agile_trainers.rollout.generators import SamplingSettings
from agile_trainers.step.teacher import WEIGHTS, LoadedTeacher
from agile_trainers.train_batch import TrainBatch

TEMPERATURE = 0.8


class Truncated(World):
    """The same where a filter sampled."""

    @classmethod
    def of(cls, model: Any, settings: SamplingSettings, lengths: tuple[int, ...]) -> Any:
        return World.of.__func__(cls, model, settings, lengths)

    def log_softmax(self, model: Any) -> torch.Tensor:
        batch = self.batch()
        found = torch.zeros(*batch.turn_ids.shape, VOCAB, dtype=torch.float64)
        actions = batch.action_mask[0].nonzero()[:, 0]
        return found.index_copy(1, actions, self.distributions(model))


def target(world: Any, teacher: Any, gradient: str, decay: float = 1.0) -> torch.Tensor:
    """The exact gradient of what ``gradient`` descends."""
    batch, mine = world.batch(), world.log_softmax(world.model)
    theirs = world.log_softmax(teacher).detach()
    weights = decay ** batch.turn_ids.clamp(min=0) * batch.action_mask
    probability = taken(world, mine).sum(1).exp()
    if gradient == RETURN_TO_GO:
        ratios = weights * (taken(world, mine) - taken(world, theirs))
        return world.gradient((probability * ratios.sum(1)).sum())
    first, second = (theirs, mine) if gradient == FORWARD else (mine, theirs)
    there = first > -torch.inf
    safe = [torch.where(there, one, 0.0) for one in (first, second)]
    divergence = torch.where(there, safe[0].exp() * (safe[0] - safe[1]), 0.0).sum(-1)
    return world.gradient((probability.detach() * (weights * divergence).sum(1)).sum())


@cache
def played(lengths: tuple[int, ...] = (2, 2)) -> tuple[Any, Any]:
    """All episodes, and a teacher: the same for all tests, which read them and the gradients of one step alone."""
    world = Stopping.of(policy(2, TEMPERATURE), SamplingSettings(temperature=TEMPERATURE), lengths)
    return world, policy(1, TEMPERATURE)


@cache
def exact_target(gradient: str, lengths: tuple[int, ...], decay: float = 1.0) -> torch.Tensor:
    return target(*played(lengths), gradient, decay)


def trainer_of(world: Any, teacher: Any, model: Path, folder: Path, gradient: str, packed: bool, **changes: Any) -> Any:
    trainer = grpo(
        model, folder, 2, sequence_packing="prefix", teacher=str(model), teacher_gradient=gradient,
        temperature=world.settings.temperature, **changes,
    )  # fmt: skip
    trainer.packer.state = PackingState(checked=True, refused=None if packed else "padded")
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    trainer.state.max_steps = 4
    trainer.teacher.loaded = [LoadedTeacher(teacher)]
    trainer.packer._forwards |= {
        id(each): forward_of(each, world.settings.temperature) for each in (world.model, teacher)
    }
    return trainer


def drawn(trainer: Any, world: Any, advantages: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """The batch of all episodes with the teacher's columns, each weighed by its probability."""
    none = torch.zeros(*world.batch().turn_mask.shape, dtype=torch.float64)
    weighs = probabilities(world).detach()[:, None] * len(world.episodes) * trainer.max_completion_length
    columns = micro_batch(world, weighs * (none if advantages is None else advantages))
    batch = TrainBatch.from_trl(columns)
    trainer.teacher.add_columns(batch, world.episodes)
    batch.token_columns[WEIGHTS] = batch.token_columns[WEIGHTS] * weighs
    return batch.to_trl()


def step(trainer: Any, world: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of a batch and its gradient, in the forward passes that the trainer makes of it."""
    world.model.zero_grad()
    loss = trainer._compute_loss(world.model, dict(batch))
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in world.model.parameters()])


def expectation(trainer: Any, world: Any, **columns: Any) -> torch.Tensor:
    return step(trainer, world, drawn(trainer, world, **columns))[1]


@pytest.mark.parametrize("lengths", [(2, 2), (1, 1, 1)], ids=["two turns", "three turns"])
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_each_gradient_is_that_of_its_target(embedded_model, tmp_path, gradient, lengths) -> None:
    world, teacher = played(lengths)
    assert probabilities(world).sum().item() == pytest.approx(1.0, abs=1e-12)
    undecayed = 0.7 * exact_target(gradient, lengths)
    for decay, packed in ((1.0, False), (0.5, True)):
        targets = {other: 0.7 * exact_target(other, lengths, decay) for other in GRADIENTS}
        trainer = trainer_of(
            world, teacher, embedded_model, tmp_path, gradient, packed, teacher_coef=0.7, teacher_turn_decay=decay
        )
        found = expectation(trainer, world)
        assert relative_error(found, targets[gradient]) < 1e-6
        for other in GRADIENTS:  # the same for the two that estimate one divergence
            far = relative_error(found, targets[other])
            assert far > 0.02 or other == gradient or {other, gradient} == {IMMEDIATE, REVERSE}
        assert decay == 1.0 or relative_error(found, undecayed) > 0.02


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_over_the_kept_sets_where_a_filter_sampled(embedded_model, tmp_path, gradient) -> None:
    """Policy and teacher are both renormalised over the sets that the policy sampled from."""
    settings = FILTERS["all"]
    world = Truncated.of(policy(2, settings.temperature), settings, LAYOUTS["two turns"])
    teacher = policy(1, settings.temperature)
    trainer = trainer_of(world, teacher, embedded_model, tmp_path, gradient, packed=False)
    assert relative_error(expectation(trainer, world), target(world, teacher, gradient)) < 1e-6


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_a_teacher_that_is_the_policy_gives_exactly_nothing(embedded_model, tmp_path, gradient) -> None:
    world, _ = played()
    trainer = trainer_of(world, world.model, embedded_model, tmp_path, gradient, packed=False)
    loss, found = step(trainer, world, drawn(trainer, world))
    assert loss.item() == 0.0
    assert trainer.teacher.means.close(trainer.accelerator)["teacher/kl"] == 0.0
    assert found.norm() < (1e-30 if gradient in SAMPLED else 1e-9)


def test_a_divergence_of_distributions_as_an_advantage_has_no_gradient(embedded_model, tmp_path) -> None:
    """It does not depend on the token that was sampled, so that no such gradient is offered; a log-ratio does."""
    world, teacher = played()
    batch = world.batch()
    trainer = trainer_of(world, teacher, embedded_model, tmp_path, REVERSE, packed=False)
    mine, theirs = world.log_softmax(world.model).detach(), world.log_softmax(teacher).detach()
    columns = drawn(trainer, world)
    weighs = probabilities(world).detach()[:, None] * len(world.episodes) * trainer.max_completion_length
    trainer.teacher, trainer.added = None, []
    found = []
    for advantages in ((mine.exp() * (mine - theirs)).sum(-1), taken(world, mine) - taken(world, theirs)):
        columns["advantages"] = -weighs * advantages * batch.action_mask
        found.append(step(trainer, world, columns)[1].norm())
    assert found[0] < 1e-6 < 0.1 < found[1]


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_the_reward_keeps_its_rate(embedded_model, tmp_path, gradient) -> None:
    """The mixture is the reward's gradient plus the coefficient's share of the teacher's, at the step's coefficient."""
    world, teacher = played()
    trainer = trainer_of(
        world, teacher, embedded_model, tmp_path, gradient, packed=False, teacher_coef=0.8, teacher_steps=8
    )
    noise = torch.Generator().manual_seed(0)
    advantages = torch.randn(world.batch().turn_mask.shape, generator=noise, dtype=torch.float64)
    spread = spread_to_tokens(advantages, world.batch().turn_ids)
    scores = taken(world, world.log_softmax(world.model))
    reward = world.gradient(-(probabilities(world).detach()[:, None] * spread * scores).sum())
    for step, coefficient in ((0, 0.8), (4, 0.4)):
        trainer.state.global_step = step
        exact = reward + coefficient * exact_target(gradient, (2, 2))
        assert relative_error(expectation(trainer, world, advantages=advantages), exact) < 1e-6


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_observations_are_not_scored(embedded_model, tmp_path, gradient) -> None:
    world, teacher = played()
    trainer = trainer_of(world, teacher, embedded_model, tmp_path, gradient, packed=False)
    batch = drawn(trainer, world)
    expected = step(trainer, world, batch)
    actions, read = world.batch().action_mask, trainer.teacher.read
    rows: list[int] = []

    def disturbed(model: Any, part: Any) -> Any:
        found = read(model, part)
        if gradient in SAMPLED:
            rows.append(int((found != 0).sum()))
            return torch.where(part.counted, found, 1e3)
        rows.append(len(found.hidden))
        return found

    trainer.teacher.read = disturbed
    found = step(trainer, world, batch)
    assert sum(rows) == int(actions.sum()) and all(map(torch.equal, found, expected))
