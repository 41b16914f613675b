"""Rules that hold whatever the batch looks like: see docs/design of masks, ratios and seeds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from games import Chatter, Gradients, OneTurn, draw_batch, loss_and_gradients, make_trainer, relative_error
from recorded import recorded, sampled
from trl import GRPOTrainer


@pytest.fixture(scope="session")
def embedded_model(two_layers: Path) -> Path:
    return two_layers


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def episodes(folder):
    records = recorded(folder)
    return sorted(records, key=lambda r: (r["group"], r["member"]))


@pytest.mark.parametrize(
    ("loss_type", "level"), [("cispo", "token"), ("dapo", "turn"), ("grpo", "turn"), ("grpo", "sequence")]
)
def test_observation_tokens_change_nothing(embedded_model, tmp_path, loss_type, level, monkeypatch):
    """Bitwise: the log-probs (new, old, reference) and entropies of observations leave loss and gradient as they are."""
    trainer = make_trainer(
        embedded_model,
        tmp_path,
        importance_sampling_level=level,
        loss_type=loss_type,
        beta=0.1,
        entropy_coef=0.01,
        epsilon_high=5.0,
        num_iterations=2,
    )
    batch = draw_batch(trainer)
    batch["old_per_token_logps"] += 0.1 * torch.randn(batch["turn_ids"].shape)
    outside = batch["turn_ids"] < 0
    assert (outside & batch["completion_mask"].bool()).any(), "no observation token in the batch: the test is empty"
    loss, gradients = loss_and_gradients(trainer, batch)

    original = GRPOTrainer._get_per_token_logps_and_entropies

    def perturbed(self, *args, **kwargs):
        logps, entropies, aux = original(self, *args, **kwargs)
        noise = 3 * torch.rand(logps.shape) * outside[:, : logps.size(1)]
        return logps + noise, entropies + noise, aux

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", perturbed)
    for name in ("old_per_token_logps", "ref_per_token_logps", "advantages"):
        batch[name] = torch.where(outside, torch.rand(outside.shape) * 3, batch[name])
    other_loss, other_gradients = loss_and_gradients(trainer, batch)
    assert torch.equal(loss, other_loss)
    assert all(torch.equal(gradients[name], other_gradients[name]) for name in gradients)


def test_sampler_and_trainer_agree_on_every_action_token(embedded_model, tmp_path):
    """The sampler's log-probs stand on the very tokens that TRL scores: any shift by one would show here."""
    trainer = make_trainer(embedded_model, tmp_path, num_iterations=2)
    batch = draw_batch(trainer)
    actions = batch["turn_ids"] >= 0
    by_sampler = torch.zeros_like(batch["old_per_token_logps"])
    for row, record in zip(by_sampler, episodes(tmp_path)):
        row[: record["num_tokens"]] = torch.tensor(sampled(record))
        inside = torch.tensor(record["turn_ids"]) >= 0
        assert torch.equal(inside, actions[record["group"] * 4 + record["member"], : len(inside)])
    torch.testing.assert_close(batch["old_per_token_logps"][actions], by_sampler[actions], rtol=0, atol=2.5e-4)


@pytest.mark.parametrize("level", ["token", "turn", "sequence"])
def test_every_ratio_is_one_before_the_first_update(embedded_model, tmp_path, level):
    """Although the adapter has dropout: it is disabled before anything is scored."""
    trainer = make_trainer(embedded_model, tmp_path, importance_sampling_level=level, num_iterations=2)
    for module in trainer.model.modules():
        assert not isinstance(module, torch.nn.Dropout) or module.p == 0
    batch = draw_batch(trainer)
    log_probs, _, _ = GRPOTrainer._get_per_token_logps_and_entropies(
        trainer,
        trainer.model,
        torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1),
        torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1),
        batch["completion_ids"].size(1),
    )
    actions = batch["turn_ids"] >= 0
    torch.testing.assert_close(log_probs[actions], batch["old_per_token_logps"][actions], rtol=0, atol=1e-5)


def _against_trl(trainer, batch, level):
    """Loss and gradient at our turn level, and at one of TRL's own levels, of the same perturbed batch."""
    batch["old_per_token_logps"] = batch["old_per_token_logps"] + 0.3 * torch.randn(batch["turn_ids"].shape)
    batch["ref_per_token_logps"] = batch["ref_per_token_logps"] + 0.3 * torch.randn(batch["turn_ids"].shape)
    ours = loss_and_gradients(trainer, batch)
    trainer._turn_ratios, trainer.importance_sampling_level = False, level
    return ours, loss_and_gradients(trainer, batch)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo"])
@pytest.mark.parametrize("case", ["one turn is TRL's sequence level", "a turn per token is TRL's token level"])
def test_turn_level_meets_trls_levels(embedded_model, tmp_path, case, loss_type):
    one_turn = case.startswith("one turn")
    trainer = make_trainer(
        embedded_model,
        tmp_path,
        environment=OneTurn if one_turn else Chatter,
        max_new_tokens=6 if one_turn else 1,
        importance_sampling_level="turn",
        loss_type=loss_type,
        beta=0.05,
        num_iterations=2,
    )
    batch = draw_batch(trainer)
    (loss, gradients), (trl_loss, trl_gradients) = _against_trl(trainer, batch, "sequence" if one_turn else "token")
    torch.testing.assert_close(loss, trl_loss, rtol=1e-5, atol=1e-6)
    assert relative_error(gradients, trl_gradients) < 2e-6


@pytest.mark.parametrize("loss_type", ["dapo", "cispo"])
def test_turn_poolings_have_the_token_gradient_at_ratio_one(embedded_model, tmp_path, loss_type):
    """Turns of several lengths; mean and sum pooling must both weigh a turn's tokens as the token level does."""
    gradients = {}
    for name, changes in {
        "token": {},
        "mean": {"importance_sampling_level": "turn"},
        "sum": {"importance_sampling_level": "turn", "turn_ratio_pooling": "sum"},
    }.items():
        trainer = make_trainer(embedded_model, tmp_path / name, loss_type=loss_type, **changes)
        batch = draw_batch(trainer)
        assert len(torch.unique((batch["turn_ids"] == 0).sum(1))) > 1, "all turns have one length: the test is empty"
        gradients[name] = loss_and_gradients(trainer, batch)[1]
    assert relative_error(gradients["mean"], gradients["token"]) < 1e-5
    assert relative_error(gradients["sum"], gradients["token"]) < 1e-5


def test_cispos_bound_leaves_a_weight_of_one_alone(embedded_model, tmp_path):
    """At ratio 1 its gradient is DAPO's, which counts tokens alike. TRL's default bound, 0.2, takes four fifths of it."""
    gradients = []
    for loss_type in ("dapo", "cispo"):
        trainer = make_trainer(embedded_model, tmp_path / loss_type, loss_type=loss_type)
        gradients.append(loss_and_gradients(trainer, draw_batch(trainer))[1])
    assert relative_error(gradients[1], gradients[0]) < 1e-5


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_type": "dapo", "importance_sampling_level": "turn"},
        {"loss_type": "grpo", "advantage_granularity": "trajectory", "whiten_advantages": True},
        {"loss_type": "dr_grpo", "scale_rewards": "batch", "advantage_clip_range": 0.5},
        {"loss_type": "cispo", "importance_sampling_level": "sequence", "beta": 0.1},
        {"loss_type": "luspo", "entropy_coef": 0.3},
    ],
    ids=lambda c: c["loss_type"],
)
def test_micro_batches_and_accumulation_change_nothing(embedded_model, tmp_path, changes):
    """1 x 8 and 4 x 2: the same episodes, the same gradient."""
    results = []
    for accumulation in (1, 4):
        folder, gradients = tmp_path / str(accumulation), Gradients()
        trainer = make_trainer(
            embedded_model,
            folder,
            callbacks=[gradients],
            per_device_train_batch_size=8 // accumulation,
            gradient_accumulation_steps=accumulation,
            **changes,
        )
        trainer.train()
        results.append((episodes(folder), gradients.steps))
    for records, steps in results[1:]:
        assert [r["completion_ids"] for r in records] == [r["completion_ids"] for r in results[0][0]]
        assert len(steps) == 1
        assert relative_error(steps[0], results[0][1][0]) < 1e-5


def test_the_entropy_bonus_is_the_mean_over_the_tokens_of_an_update(embedded_model, tmp_path):
    """Of a plain forward pass, whatever the micro-batches and passes, beside a loss that is a mean over episodes."""
    trainer = make_trainer(embedded_model, tmp_path)
    batch = draw_batch(trainer)
    ids, mask = (torch.cat([batch[f"prompt_{what}"], batch[f"completion_{what}"]], 1) for what in ("ids", "mask"))
    length = batch["completion_ids"].size(1)
    log_probs = trainer.model(input_ids=ids, attention_mask=mask).logits[:, -length - 1 : -1].log_softmax(dim=-1)
    entropies = -(log_probs.exp() * log_probs).sum(dim=-1)
    (-entropies[batch["turn_ids"] >= 0].mean()).backward()
    expected = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    steps = []
    for changes in (
        {},
        {"entropy_coef": 1.0, "sequence_packing": "none", "max_tokens_per_micro_batch": 60},
        {"entropy_coef": 1.0, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        {"entropy_coef": 1.0, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
    ):
        gradients = Gradients()
        make_trainer(embedded_model, tmp_path, callbacks=[gradients], loss_type="grpo", **changes).train()
        steps += gradients.steps
    for gradient in steps[1:]:
        bonus = {name: both - steps[0][name] for name, both in gradient.items()}
        assert relative_error(bonus, expected) < 1e-5


def test_a_group_shares_its_start_and_nothing_else(embedded_model, tmp_path):
    trainer = make_trainer(embedded_model, tmp_path, per_device_train_batch_size=16, max_steps=2)
    trainer.train()
    records = episodes(tmp_path)
    seeds = {}
    for record in records:
        seeds.setdefault((record["step"], record["group"]), set()).add((record["seed"], record["prompt"][0]["content"]))
    assert len(seeds) == 8 and all(len(starts) == 1 for starts in seeds.values())
    assert len({next(iter(starts))[0] for starts in seeds.values()}) == 8, "two groups share a seed"
    assert len({tuple(record["completion_ids"]) for record in records}) > 16, "members repeat each other"
