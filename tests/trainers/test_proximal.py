"""The penalty that holds further updates of a batch: TRL's own KL term, with the batch's first policy as the reference."""

from __future__ import annotations

import math

import pytest
import torch
from games import Gradients, make_trainer, relative_error

from agile_trainers.objectives.ratios import weighted_k3

BATCH = {"num_iterations": 3, "max_steps": 6, "learning_rate": 0.05}
"""Two batches, with two further updates each."""


def trained(model, folder, **options):
    gradients = Gradients()
    trainer = make_trainer(model, folder, callbacks=[gradients], **BATCH | options)
    trainer.train()
    return gradients.steps, trainer.state.log_history


def as_reference(coef: float) -> dict[str, object]:
    """TRL's options of the same penalty: a reference that becomes the policy after the last update of each batch."""
    return {
        "beta": coef, "reference_adapter": True, "sync_ref_model": True, "ref_model_sync_steps": 3,
        "ref_model_mixup_alpha": 1.0,
    }  # fmt: skip


def test_by_hand():
    """Over the old policy's tokens the mean is the divergence, and its gradient that of the divergence."""
    old = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    logits = torch.tensor([0.2, -0.4, 0.9], dtype=torch.float64, requires_grad=True)
    policy = logits.log_softmax(0)
    values = weighted_k3(policy - old.log())
    torch.testing.assert_close(values[0].item(), 1 - (w := policy[0].exp().item() / 0.5) + w * math.log(w))
    estimate, divergence = (old * values).sum(), (policy.exp() * (policy - old.log())).sum()
    assert estimate.item() == pytest.approx(divergence.item(), abs=1e-12)
    found, exact = (torch.autograd.grad(one, logits, retain_graph=True)[0] for one in (estimate, divergence))
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        *({"loss_type": name} for name in ("grpo", "dapo", "dr_grpo")),
        {"max_tokens_per_micro_batch": 60, "steps_per_generation": 2, "gradient_accumulation_steps": 2},
        {"algorithm": "reinforce", "num_generations": 1, "importance_sampling_level": "token"},
        {"sequence_packing": "none"},
    ],
    ids=str,
)
def test_it_is_trls_term_with_the_batchs_first_policy_as_reference(embedded_model, tmp_path, options):
    held, log = trained(embedded_model, tmp_path / "held", proximal_coef=0.7, **options)
    theirs, their_log = trained(embedded_model, tmp_path / "theirs", **as_reference(0.7), **options)
    plain, _ = trained(embedded_model, tmp_path / "plain", **options)
    names = plain[0].keys()
    for step, (ours, reference) in enumerate(zip(held, theirs, strict=True)):
        assert relative_error(ours, {name: reference[name] for name in names}) < 2e-4, step
    assert relative_error(held[0], plain[0]) < 1e-6  # the first update starts from the policy that would hold it
    assert relative_error(held[2], plain[2]) > 1e-3
    if "steps_per_generation" in options:
        return  # TRL logs the mean over micro-batches, however many tokens each has
    told = [entry["proximal/kl"] for entry in log if "proximal/kl" in entry]
    assert told == pytest.approx([entry["kl"] for entry in their_log if entry.get("kl", 0) > 1e-9], rel=1e-3)


def test_a_loss_of_ones_own_is_held_too(embedded_model, tmp_path):
    options = {"algorithm": "own_losses:Tokens"}
    held, _ = trained(embedded_model, tmp_path / "held", proximal_coef=0.7, **options)
    plain, _ = trained(embedded_model, tmp_path / "plain", **options)
    assert relative_error(held[0], plain[0]) < 1e-6
    assert relative_error(held[2], plain[2]) > 1e-3


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"proximal_coef": -0.1, "num_iterations": 2}, "proximal_coef must not be negative, got -0.1"),
        ({"proximal_coef": 0.5, "num_iterations": 1}, "proximal_coef=0.5 has no effect with num_iterations=1"),
        ({"proximal_coef": 0.5, "environment": None}, "proximal_coef"),
    ],
)
def test_what_cannot_be_is_refused(embedded_model, tmp_path, changes, named):
    with pytest.raises(ValueError, match=named):
        make_trainer(embedded_model, tmp_path, **changes)
