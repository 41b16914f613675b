"""ReBN REINFORCE, GSPO and CISPO: credit recomputed from the episodes on disk, pinned options, refused options."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from games import Chatter, OneTurn, draw_batch, make_trainer, settings
from recorded import recorded

from agile_trainers.step.credit import CreditInputs
from agile_trainers.trainers import (
    MultiTurnCISPOConfig,
    MultiTurnCISPOTrainer,
    MultiTurnGSPOConfig,
    MultiTurnGSPOTrainer,
    MultiTurnREINFORCEConfig,
    MultiTurnREINFORCETrainer,
)


def reinforce(model, output_dir, environment=Chatter, **changes):
    changes = {"num_generations": 1, **changes}
    args = MultiTurnREINFORCEConfig(**settings(output_dir, **changes))
    return MultiTurnREINFORCETrainer(model=str(model), args=args, environment=environment)


def episodes(folder):
    return recorded(folder)


def test_returns_that_leave_float32_have_advantages(embedded_model, tmp_path):
    """The sums of the rewards are far from a limit, but not the return of a later turn: -6e38 has no float32."""
    trainer = reinforce(embedded_model, tmp_path)
    rewards = torch.tensor([[3e38, -3e38, -3e38], [0.0, 0.0, 0.0]])
    mask, failed = torch.ones_like(rewards, dtype=torch.bool), torch.zeros(2, dtype=torch.bool)
    numbers = torch.ones_like(rewards, dtype=torch.long)
    turns = CreditInputs(rewards, mask, failed, numbers, numbers, torch.zeros(2, dtype=torch.long))
    found = trainer.assign_credit(turns).advantages
    returns = np.array([[-3, -6, -3], [0, 0, 0]])
    expected = (returns - returns.mean()) / returns.std(ddof=1)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("granularity", ["turn", "token"])
def test_advantages_are_z_scores_over_the_whole_batch(embedded_model, tmp_path, granularity):
    """Independent recomputation with NumPy: every turn once, or as often as it has tokens."""
    reinforce(embedded_model, tmp_path, gamma=0.5, advantage_granularity=granularity).train()
    returns, lengths, advantages = [], [], []
    for record in episodes(tmp_path):
        rewards = [turn["reward"] for turn in record["turns"]]
        returns += [sum(0.5**j * r for j, r in enumerate(rewards[k:])) for k in range(len(rewards))]
        lengths += [record["turn_ids"].count(k) for k in range(len(rewards))]
        advantages += [turn["advantage"] for turn in record["turns"]]
    population = np.array(returns) if granularity == "turn" else np.repeat(returns, lengths)
    expected = (np.array(returns) - population.mean()) / (population.std(ddof=1) + 1e-8)
    assert len(set(lengths)) > 1
    np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("environment", "same_as"), [(OneTurn, "token"), (Chatter, "turn")])
def test_auto_counts_tokens_only_when_every_episode_has_one_turn(embedded_model, tmp_path, environment, same_as):
    found = []
    for granularity in ("auto", same_as):
        folder = tmp_path / granularity
        reinforce(embedded_model, folder, environment, advantage_granularity=granularity).train()
        found.append([turn["advantage"] for record in episodes(folder) for turn in record["turns"]])
    assert found[0] == found[1]


def test_every_episode_has_a_start_of_its_own(embedded_model, tmp_path):
    reinforce(embedded_model, tmp_path).train()
    assert len({record["seed"] for record in episodes(tmp_path)}) == 8


def test_sum_pooling_is_the_default_and_reaches_the_loss(embedded_model, tmp_path):
    trainer = reinforce(embedded_model, tmp_path, num_iterations=2)
    batch = draw_batch(trainer)
    record = episodes(tmp_path)[0]
    first = batch["turn_ids"][0] == 0
    expected = record["turns"][0]["advantage"] / first.sum().item()
    torch.testing.assert_close(batch["advantages"][0][first], torch.full((int(first.sum()),), expected))
    token = reinforce(embedded_model, tmp_path / "token", importance_sampling_level="token")
    advantage = draw_batch(token)["advantages"][0][first]
    torch.testing.assert_close(advantage, torch.full((int(first.sum()),), record["turns"][0]["advantage"]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_generations": 4}, "num_generations=4"),
        ({"per_device_train_batch_size": 1}, "per_device_train_batch_size"),
        ({"advantage_granularity": "trajectory"}, "'trajectory'"),
        ({"scale_rewards": "batch"}, "scale_rewards='batch'"),
        ({"whiten_advantages": True}, "whiten_advantages=True"),
        (
            {"importance_sampling_level": "token", "turn_ratio_pooling": "mean"},
            "acts with importance_sampling_level='turn'",
        ),
    ],
)
def test_options_without_effect_are_refused(embedded_model, tmp_path, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        reinforce(embedded_model, tmp_path, **changes)


def test_reinforce_needs_an_environment(embedded_model, tmp_path):
    with pytest.raises(ValueError, match="needs an environment"):
        reinforce(embedded_model, tmp_path, environment=None)


@pytest.mark.parametrize(
    ("trainer_class", "config_class", "expected"),
    [
        (MultiTurnGSPOTrainer, MultiTurnGSPOConfig, {"loss_type": "grpo", "epsilon_low": 3e-4, "epsilon_high": 4e-4,
                                                      "importance_sampling_level": "sequence"}),
        (MultiTurnCISPOTrainer, MultiTurnCISPOConfig, {"loss_type": "cispo", "epsilon_high": 5.0,
                                                        "importance_sampling_level": "token"}),
    ],
)  # fmt: skip
def test_variants_pin_their_papers_settings_and_train(embedded_model, tmp_path, trainer_class, config_class, expected):
    args = config_class(**settings(tmp_path))
    trainer = trainer_class(model=str(embedded_model), args=args, environment=Chatter)
    assert {name: getattr(trainer, name) for name in expected} == expected
    trainer.train()
    assert trainer.state.log_history[0]["grad_norm"] > 0
    with pytest.raises(ValueError, match="loss_type must be one of"):
        config_class(**settings(tmp_path, loss_type="dapo"))


def test_gspo_equals_grpo_with_its_settings(embedded_model, tmp_path):
    args = MultiTurnGSPOConfig(**settings(tmp_path / "gspo"))
    gspo = MultiTurnGSPOTrainer(model=str(embedded_model), args=args, environment=Chatter)
    gspo.train()
    grpo = make_trainer(
        embedded_model, tmp_path / "grpo", lora=False, loss_type="grpo", importance_sampling_level="sequence",
        epsilon=3e-4, epsilon_high=4e-4, advantage_granularity="trajectory",
    )  # fmt: skip
    grpo.train()
    ours, theirs = gspo.model.state_dict(), grpo.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
