"""The truncated policy is the policy: expectations over *all* episodes that filters leave, against its exact gradient.

A transformer over five tokens plays two or three turns, with a fixed token as the observation between them. The sets are
those of the generator's own sampler; log-probabilities, entropies and the loss are the trainer's, packed and padded. The
exact values come from the definition of each filter, and autograd over the sum of all episodes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from enumerated import grpo, relative_error
from five_tokens import FILTERS, LAYOUTS, VOCAB, World, admit, micro_batch, policy
from transformers import Qwen2ForCausalLM

from agile_trainers.objectives.returns import gae
from agile_trainers.packing.packer import PackingState
from agile_trainers.step.credit import gather_turns


def trainer_of(world: World, model_folder: Any, folder: Any, **changes: Any) -> Any:
    """A trainer whose rows are padded until ``packer.state.refused`` is None."""
    trainer = grpo(model_folder, folder, 2, sequence_packing="prefix", **changes)
    trainer.packer.state = PackingState(checked=True, refused="padded first")
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    admit(trainer, world.model, world.settings)
    return trainer


def estimated(
    trainer: Any, world: World, advantages: torch.Tensor, masked: bool = True, **columns: Any
) -> torch.Tensor:
    """The expectation of the trainer's gradient: at ratio 1 the loss is linear in the advantages of the episodes."""
    weights = world.probability().detach()[:, None] * len(world.episodes) * trainer.max_completion_length
    inputs = micro_batch(world, weights * advantages, **columns)
    if not masked:
        del inputs["kept_words"], inputs["kept_sizes"]
    return -world.gradient(trainer._compute_loss(world.model, inputs))


def leave_one_out(trainer: Any, world: World) -> torch.Tensor:
    """(N, K), the trainer's advantage of each episode, averaged over its partner in a group of two."""
    count = len(world.episodes)
    pairs = torch.cartesian_prod(torch.arange(count), torch.arange(count))
    groups = gather_turns(world.batch().rows(pairs.flatten()), trainer.accelerator)
    firsts = trainer.assign_credit(groups).advantages[::2].double().view(count, count, -1)
    return torch.einsum("ijk,j->ik", firsts, world.probability().detach())


def with_exact_values(world: World, gae_lambda: float) -> torch.Tensor:
    """(N, K), GAE with the exact value of each turn's state under the truncated policy."""
    batch, probability = world.batch(), world.probability().detach()
    to_go = batch.turn_rewards.double().flip(1).cumsum(1).flip(1)
    values = torch.zeros_like(to_go)
    for k, turn in enumerate(world.episodes[0].turns):
        before = batch.completion_ids[:, : turn.start]
        same = (before[:, None] == before[None]).all(-1) * probability
        values[:, k] = (same @ to_go[:, k]) / same.sum(1)
    mask = torch.ones_like(values) > 0
    return gae(batch.turn_rewards.double(), values, torch.zeros(len(values)), mask, gamma=1.0, gae_lambda=gae_lambda)


def exact(world: World) -> torch.Tensor:
    returns = torch.tensor([sum(episode.rewards) for episode in world.episodes], dtype=torch.float64)
    return world.gradient((world.probability() * returns).sum())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FILTERS)
def test_estimators_have_the_exact_gradient_of_the_truncated_policy(
    embedded_model: Path, tmp_path: Path, name: str, layout: str
) -> None:
    """Raw returns, leave-one-out and GAE; over all tokens, as without sets, they are biased."""
    settings = FILTERS[name]
    world = World.of(policy(2, settings.temperature), settings, LAYOUTS[layout])
    assert world.probability().sum().item() == pytest.approx(1.0, abs=1e-12) and len(world.episodes) < VOCAB**3
    trainer = trainer_of(world, embedded_model, tmp_path, advantage_baseline="leave_one_out")
    rewards, right = world.batch().turn_rewards.double(), exact(world)
    estimators = {
        "raw": rewards.flip(1).cumsum(1).flip(1),
        "leave-one-out": leave_one_out(trainer, world),
        "gae": with_exact_values(world, 0.6),
    }
    for estimator, advantages in estimators.items():
        error = relative_error(estimated(trainer, world, advantages), right)
        without = relative_error(estimated(trainer, world, advantages, masked=False), right)
        print(f"{name}, {layout}, {estimator}: {error:.1e} with the sets, {without:.3f} without")
        assert error < 1e-6
        # What is missing without the sets is the mean advantage of each state times the gradient of its log pi(S): nothing,
        # where a baseline is exact for each token that a filter acts on.
        assert estimator == "gae" or without > 0.005
    trainer.packer.state.refused = None
    assert relative_error(estimated(trainer, world, estimators["raw"]), right) < 1e-6


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", ["top_p", "all"])
def test_kl_entropy_and_a_later_policy_are_over_the_recorded_sets(
    embedded_model: Path, tmp_path: Path, name: str, packed: bool
) -> None:
    """Of another policy, some recorded tokens are outside its own sets: they keep their recorded ones."""
    settings = FILTERS[name]
    world = World.of(policy(2, settings.temperature), settings, LAYOUTS["two turns"])
    trainer = trainer_of(world, embedded_model, tmp_path, beta=0.7)
    trainer.packer.state.refused = None if packed else "padded"
    other = policy(1, settings.temperature)
    admit(trainer, other, settings)
    batch, actions = world.batch(), world.batch().action_mask[0]

    def computed(model: Qwen2ForCausalLM) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.cat([batch.prompt_ids, batch.completion_ids], 1)
        log_probs, entropies, _ = trainer._get_per_token_logps_and_entropies(
            model, ids, torch.ones_like(ids), actions.numel(), compute_entropy=True, scored=batch.action_mask,
            part=micro_batch(world, torch.zeros(len(ids), 2)),
        )  # fmt: skip
        return log_probs[:, actions], entropies[:, actions]

    for model in (world.model, other):
        by_definition = world.distributions(model)
        log_probs, entropies = computed(model)
        torch.testing.assert_close(log_probs, world.log_probs(model), rtol=0, atol=1e-12)
        brute = -torch.where(by_definition > -torch.inf, by_definition.exp() * by_definition, 0.0).sum(-1)
        torch.testing.assert_close(entropies, brute, rtol=0, atol=1e-12)
    reference = torch.zeros_like(batch.sampling_logprobs, dtype=torch.float64)
    reference[:, actions] = computed(other)[0].detach()
    logged = []
    for row in range(len(reference)):
        one = {n: v[[row]] if v.ndim else v for n, v in micro_batch(world, torch.zeros(len(reference), 2)).items()}
        trainer._compute_loss(world.model, one | {"ref_per_token_logps": reference[[row]]})
        logged.append(trainer._metrics["train"]["kl"][-1] * int(actions.sum()))
    mine, theirs = world.distributions(), world.distributions(other)
    divergence = torch.where(mine > -torch.inf, mine.exp() * (mine - theirs), 0.0).sum(-1)
    exact_kl = (world.probability()[:, None] * divergence).sum().item()
    assert (world.probability() @ torch.tensor(logged, dtype=torch.float64)).item() == pytest.approx(exact_kl, rel=1e-6)
