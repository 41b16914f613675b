"""Several updates of a batch: the first one's own forward pass gives the old policy, as a pass before it would."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from games import Gradients, make_trainer, relative_error
from ppo_games import make_ppo, wake

from agile_trainers.step.loss import FirstPass
from agile_trainers.train_batch import TrainBatch
from agile_trainers.trainers.trainer import MultiTurnTrainer

CASES = {
    "padded": {"sequence_packing": "none"},
    "packed in several passes": {"sequence_packing": "prefix", "max_tokens_per_micro_batch": 150},
    "accumulation": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "turns": {"importance_sampling_level": "turn", "turn_ratio_pooling": "sum", "beta": 0.1},
    "episodes": {"importance_sampling_level": "sequence", "loss_type": "grpo", "skip_zero_advantage": False},
    "truncated episodes": {"mask_truncated_completions": True, "entropy_coef": 0.1},
    "filters": {"top_p": 0.9, "top_k": 30},
    "two batches": {"max_steps": 4},
}
UPDATES = {"num_iterations": 2, "max_steps": 2, "learning_rate": 0.05, "epsilon": 0.05, "diagnosis_interval": 0}
"""Steps that are long enough for ratios beyond the clipping range in the second update."""


@pytest.fixture(scope="session")
def embedded_model(two_layers: Path) -> Path:
    return two_layers


def trained(make, model, folder, monkeypatch, *, apart, **options):
    """Train; return the gradients of each step, the log-probs of further passes, and the passes without gradient."""
    gradients, scorings = Gradients(), []
    trainer = make(model, folder, callbacks=[gradients], **{**UPDATES, **options})
    wake(trainer)
    compute = trainer.log_prob_passes.compute

    def counted(models, batch, **given):
        scorings.append(given["old"])
        return compute(models, batch, **given)

    monkeypatch.setattr(trainer.log_prob_passes, "compute", counted)
    with monkeypatch.context() as patch:
        if apart:
            patch.setattr(MultiTurnTrainer, "_first_pass_is_one_update", False)
        trainer.train()
    return gradients.steps, [batch["old_per_token_logps"] for batch in trainer._buffered_inputs], scorings


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_a_pass_before(embedded_model, tmp_path, case, monkeypatch):
    ours, old, scorings = trained(
        make_trainer, embedded_model, tmp_path / "ours", monkeypatch, apart=False, **CASES[case]
    )
    apart, expected, scored = trained(
        make_trainer, embedded_model, tmp_path / "apart", monkeypatch, apart=True, **CASES[case]
    )
    assert not any(scorings) and all(scored)
    for step, (mine, theirs) in enumerate(zip(ours, apart, strict=True)):
        assert relative_error(mine, theirs) < 1e-6, step
    # The first update changes what the second one's ratio is of.
    assert relative_error(ours[1], ours[0]) > 0.01
    for mine, theirs in zip(old, expected, strict=True):
        where = mine != 0
        assert where.any() and torch.allclose(mine[where], theirs[where], atol=2e-6)


def test_a_penalty_that_scored_the_old_policy_hands_it_on(embedded_model, tmp_path, monkeypatch):
    options = {"beta": 0.1, "kl_placement": "reward"}
    ours, _, scorings = trained(make_trainer, embedded_model, tmp_path / "o", monkeypatch, apart=False, **options)
    apart, _, _ = trained(make_trainer, embedded_model, tmp_path / "a", monkeypatch, apart=True, **options)
    assert all(scorings)
    assert all(relative_error(mine, theirs) < 1e-6 for mine, theirs in zip(ours, apart, strict=True))


def test_a_batch_that_is_split_into_updates_is_scored_before(embedded_model, tmp_path, monkeypatch):
    """The second half is read after the first update."""
    options = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "max_steps": 4}
    steps, _, scorings = trained(make_trainer, embedded_model, tmp_path, monkeypatch, apart=False, **options)
    assert len(steps) == 4 and all(scorings)


def test_a_critic_learns_while_it_is_read_and_is_read_again_in_the_second_update(embedded_model, tmp_path, monkeypatch):
    runs = []
    for name, apart in (("ours", False), ("apart", True)):
        options = {"max_steps": 4, "learning_rate": 0.05}
        runs.append(trained(make_ppo, embedded_model, tmp_path / name, monkeypatch, apart=apart, **options))
    (ours, _, scorings), (apart, _, scored) = runs
    assert not any(scorings) and all(scored) and len(ours) == 4
    for mine, theirs in zip(ours, apart, strict=True):
        for adapter in (".default", ".critic"):
            parts = [{name: g for name, g in step.items() if adapter in name} for step in (mine, theirs)]
            assert relative_error(*parts) < 1e-5 and all(g.any() for g in parts[0].values())


def test_a_policy_with_dropout_is_scored_before(embedded_model, tmp_path, monkeypatch):
    """The mask of a pass with gradient is its own."""
    options = {"lora": {"lora_dropout": 0.3}, "disable_dropout": False, "max_logprob_gap": 9.0}
    *_, scorings = trained(make_trainer, embedded_model, tmp_path, monkeypatch, apart=False, **options)
    assert all(scorings)


def test_rows_of_passes_find_their_place():
    """Passes are of some rows, in another order, cut to their own columns; a row may be read in two of them."""

    def batch(episodes, counted):
        mask = torch.tensor(counted)
        empty = torch.zeros_like(mask)
        return TrainBatch(
            *(empty,) * 3, mask, mask, empty, empty.float(), empty.float(), torch.tensor(1),
            episodes=torch.tensor(episodes),
        )  # fmt: skip

    first = FirstPass(batch([4, 7, 5], [[1, 1, 1], [1, 1, 0], [1, 0, 0]]))
    first.add(batch([5, 4], [[1, 0], [1, 0]]), torch.tensor([[-1.0, -9.0], [-2.0, -9.0]]))
    first.add(batch([4], [[0, 1, 1]]), torch.tensor([[-9.0, -3.0, -4.0]], dtype=torch.float64))
    assert first.log_probs.tolist() == [[-2, -3, -4], [0, 0, 0], [-1, 0, 0]] and first.log_probs.dtype == torch.float64
