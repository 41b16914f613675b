"""The KL penalty outside the loss, through a whole training step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from games import draw_batch, loss_and_gradients, make_trainer, relative_error

from agile_trainers.objectives.ratios import token_kl_penalty

# One path each, no filters, no images.
ABSENT = ("path_ids", "path_lengths", "places", "kept_words", "kept_sizes", "image_features", "image_places")


def moved(trainer):
    """The same trainer, its policy away from its reference."""
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return trainer


def make(model, folder, placement: str | None, **changes):
    changes = changes if placement is None else {"beta": 0.3, "kl_placement": placement, **changes}
    return moved(make_trainer(model, folder, **changes))


@pytest.mark.parametrize("placement", ["reward", "advantage"])
def test_the_loss_itself_has_no_kl_term(embedded_model, tmp_path, placement):
    """Given its advantages, the batch is trained on as without any penalty."""
    trainer = make(embedded_model, tmp_path, placement)
    batch = draw_batch(trainer)
    loss, gradients = loss_and_gradients(trainer, batch)
    assert trainer.beta == 0.3
    unpenalized = make(embedded_model, tmp_path, None)
    draw_batch(unpenalized)
    plain, expected = loss_and_gradients(unpenalized, batch)
    assert loss == plain and relative_error(gradients, expected) < 1e-6
    assert len(trainer._metrics["train"]["kl"]) == 1 and trainer._metrics["train"]["kl"][0] > 0


def scores_of(trainer, columns):
    """Log-probabilities (B, T) of policy and reference."""
    columns.failed = torch.zeros(len(columns.turn_ids)) > 0
    scores = trainer.log_prob_passes.compute(trainer._models, columns, old=True, reference=True)
    return scores.old, scores.reference


def test_in_the_reward_the_penalty_is_part_of_what_is_compared(embedded_model, tmp_path):
    """By hand: unscaled advantages with and without penalty differ by the penalty less its mean over the group."""
    options = {"advantage_granularity": "trajectory", "scale_rewards": "none"}
    penalized = make(embedded_model, tmp_path, "reward", **options)
    batch, plain = draw_batch(penalized), draw_batch(make(embedded_model, tmp_path, None, **options))
    torch.testing.assert_close(batch["completion_ids"], plain["completion_ids"])
    action = batch["turn_ids"] >= 0
    columns = SimpleNamespace(**batch, **dict.fromkeys(ABSENT), valid_mask=batch["turn_ids"] >= 0)
    with torch.no_grad():
        log_ratio = scores_of(penalized, columns)[0] - scores_of(penalized, columns)[1]
    penalty = 0.3 * (log_ratio * action).sum(1)
    expected = penalty - penalty.view(-1, 4).mean(1).repeat_interleave(4)
    difference = plain["advantages"] - batch["advantages"]
    torch.testing.assert_close(difference, torch.where(action, expected[:, None], 0.0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("level", ["token", "turn", "sequence"])
def test_in_the_advantage_it_comes_after_whitening_and_clipping(embedded_model, tmp_path, level):
    options = {"whiten_advantages": True, "advantage_clip_range": 0.5, "importance_sampling_level": level}
    penalized = make(embedded_model, tmp_path, "advantage", **options)
    batch, plain = draw_batch(penalized), draw_batch(make(embedded_model, tmp_path, None, **options))
    columns = SimpleNamespace(**batch, **dict.fromkeys(ABSENT), valid_mask=batch["turn_ids"] >= 0)
    with torch.no_grad():
        scores = scores_of(penalized, columns)
    expected = plain["advantages"] - 0.3 * token_kl_penalty(*scores, batch["turn_ids"], level)
    torch.testing.assert_close(batch["advantages"], expected, rtol=1e-4, atol=1e-5)
    assert plain["advantages"].abs().max() <= 0.5


@pytest.mark.parametrize("placement", [None, "reward"])
def test_credit_that_chose_the_groups_is_reused_where_the_penalty_left_it(
    embedded_model, tmp_path, placement, monkeypatch
):
    """No group is replaced here, so that both batches are the same; a penalty inside the rewards changes their credit."""
    plain = draw_batch(make(embedded_model, tmp_path, placement))
    trainer, calls = make(embedded_model, tmp_path, placement, resample_zero_advantage_groups=1), []
    rule = trainer.batches._credit._rule
    monkeypatch.setattr(
        trainer.batches._credit, "_rule", lambda turns: (calls.append(turns.rewards.clone()), rule(turns))[1]
    )
    batch = draw_batch(trainer)
    assert torch.equal(batch["completion_ids"], plain["completion_ids"])
    assert torch.equal(batch["advantages"], plain["advantages"])
    assert len(calls) == (1 if placement is None else 2)
