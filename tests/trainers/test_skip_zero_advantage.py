"""Episodes without advantage cost no forward pass and change nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from games import Chatter, draw_batch, loss_and_gradients, make_trainer, relative_error

from agile_trainers.step.log_probs import corrected_drift

LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]


@pytest.fixture(scope="session")
def embedded_model(two_layers: Path) -> Path:
    return two_layers


class PartlyEqual(Chatter):
    """Chatter, whose rewards are all alike where the row says so."""

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, 0.5 if self.options["equal"] else reward, terminated, truncated, info


def draw(trainer, equal: list[bool]) -> dict[str, torch.Tensor]:
    """A generation batch with a group of four per entry."""
    trainer.model.train()
    trainer.create_optimizer_and_scheduler(1)
    trainer.current_gradient_accumulation_steps = 1
    return trainer._generate_and_score_completions([{"equal": quiet} for quiet in equal for _ in range(4)])


def rows_forwarded(trainer) -> list[int]:
    """Filled with the number of rows of every forward pass from now on, generation's aside."""
    seen: list[int] = []

    def count(_module, _args, kwargs):
        if kwargs.get("fused_lm_head"):
            seen.append(len(kwargs["input_ids"]))

    trainer.model.register_forward_pre_hook(count, with_kwargs=True)
    return seen


def make(model, folder, **changes):
    # Every forward pass is counted: none compares packed with padded rows or measures the policy.
    uncounted = {"sequence_packing": "none", "diagnosis_interval": 0}
    changes = {"advantage_granularity": "trajectory", "num_iterations": 2, **uncounted, **changes}
    return make_trainer(model, folder, environment=PartlyEqual, train_dataset=rows(), **changes)


def rows():
    from datasets import Dataset

    return Dataset.from_list([{"equal": True}, {"equal": False}])


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_gradient_is_that_of_the_whole_batch(embedded_model, tmp_path, loss_type):
    """Off-policy by design (num_iterations=2, then moved weights): old log-probabilities are needed, of live rows only."""
    trainer = make(embedded_model, tmp_path, loss_type=loss_type)
    seen = rows_forwarded(trainer)
    batch = draw(trainer, [True, False])
    assert sum(seen) == 4, "rows without advantage were scored"
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora" in name:
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    seen.clear()
    loss, gradients = loss_and_gradients(trainer, batch)
    assert seen == [4]
    trainer.batches.skips_zero_advantage = False
    whole, expected = loss_and_gradients(trainer, batch)
    assert seen == [4, 8]
    assert loss == pytest.approx(whole.item(), rel=1e-5, abs=1e-7)
    assert relative_error(gradients, expected) < 1e-6


@pytest.mark.parametrize("placement, equal", [("reward", 0), ("advantage", 0), ("advantage", 4)])
def test_a_penalty_in_the_advantage_decides_who_has_none(embedded_model, tmp_path, placement, equal):
    """Rows whose rewards are alike differ by their penalty, unless the policy is the reference still."""
    options = {"beta": 0.3, "kl_placement": placement, "skip_zero_advantage": True}
    trainer = make(embedded_model, tmp_path, **options)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name and equal == 0:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    batch = draw(trainer, [True, False])
    assert (batch["advantages"].abs().sum(1) == 0).sum() == equal
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora" in name:
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    seen = rows_forwarded(trainer)
    loss, gradients = loss_and_gradients(trainer, batch)
    trainer.batches.skips_zero_advantage = False
    whole, expected = loss_and_gradients(trainer, batch)
    assert seen == [8 - equal, 8]
    assert loss == pytest.approx(whole.item(), rel=1e-5, abs=1e-7)
    assert relative_error(gradients, expected) < 1e-5


def test_a_group_of_equal_penalized_rewards_is_skipped(embedded_model, tmp_path):
    """The policy is its reference, so the penalty is 0 and the group whose rewards are alike has no advantage at all."""
    trainer = make(embedded_model, tmp_path, beta=0.3, kl_placement="reward", skip_zero_advantage=True)
    batch = draw(trainer, [True, False])
    seen = rows_forwarded(trainer)
    _, gradients = loss_and_gradients(trainer, batch)
    trainer.batches.skips_zero_advantage = False
    _, expected = loss_and_gradients(trainer, batch)
    assert seen == [4, 8] and relative_error(gradients, expected) < 1e-5


def test_rows_that_only_even_out_ranks_enter_no_metric(embedded_model, tmp_path, monkeypatch):
    """Another rank has more rows with an advantage, and this one scores two of its others too."""
    found, drifts = [], []
    for filled in (0, 2):
        options = {"vllm_importance_sampling_correction": True, "repetition_penalty": 1.5}
        trainer = make(embedded_model, tmp_path / str(filled), **options)
        passes, made = trainer.log_prob_passes, trainer.batches.log_probs
        monkeypatch.setattr(
            passes, "even_rows", lambda live, more=filled: live.int().argsort(descending=True)[: live.sum() + more]
        )
        scored: list[Any] = []
        monkeypatch.setattr(
            trainer.batches, "log_probs", lambda *args, of=made, to=scored: to.append(of(*args)) or to[0]
        )
        draw(trainer, [True, False])
        (log_probs,) = scored
        assert log_probs.scored.sum() == 4 + filled
        found.append({name: last for name, (*_, last) in trainer._metrics["train"].items() if "sampling/" in name})
        log_probs.snapshot = torch.zeros_like(log_probs.old)
        mask = (log_probs.old != 0) & log_probs.scored[:, None]
        drifts.append(
            corrected_drift(SimpleNamespace(drift_correction=None), None, log_probs, mask, trainer.accelerator)[1]
        )
    assert len(found[0]) == 8 and found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-6)
    assert len(drifts[0]) == 5 and drifts[1] == pytest.approx(drifts[0], rel=1e-4, abs=1e-6)


def test_an_equal_batch_still_takes_part(embedded_model, tmp_path):
    """One row goes through, so that a rank with nothing to learn is there when gradients are averaged."""
    trainer = make(embedded_model, tmp_path, skip_zero_advantage=True)
    batch = draw(trainer, [True, True])
    seen = rows_forwarded(trainer)
    loss, gradients = loss_and_gradients(trainer, batch)
    assert seen == [1] and loss == 0.0
    assert gradients and not any(g.any() for g in gradients.values())


def test_eps_is_the_largest_advantage_that_counts_as_none(embedded_model, tmp_path):
    trainer = make(embedded_model, tmp_path, skip_zero_advantage=True, zero_advantage_eps=1e9)
    batch = draw(trainer, [False, False])
    seen = rows_forwarded(trainer)
    loss_and_gradients(trainer, batch)
    assert seen == [1]


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_eps_compares_the_advantage_of_a_turn_whatever_its_length(embedded_model, tmp_path, pooling):
    """With pooling by sum each token has the turn's advantage over the turn's length: it may be below eps."""
    trainer = make_trainer(
        embedded_model, tmp_path, algorithm="reinforce", num_generations=1, turn_ratio_pooling=pooling,
        zero_advantage_eps=0.6, sequence_packing="none", diagnosis_interval=0,
    )  # fmt: skip
    batch = draw_batch(trainer)
    of_tokens, turns = batch["advantages"], batch["turn_ids"]
    lengths = (turns[:, :, None] == turns[:, None]).sum(dim=2)
    of_turns = of_tokens * lengths if pooling == "sum" else of_tokens
    live = int(((of_turns.abs() > 0.6) & (turns >= 0)).any(dim=1).sum())
    assert 0 < live < 8 and (int((of_tokens.abs() > 0.6).any(dim=1).sum()) < live) == (pooling == "sum")
    seen = rows_forwarded(trainer)
    loss_and_gradients(trainer, batch)
    assert seen == [live]


@pytest.mark.parametrize(
    "changes, rows",
    [
        ({}, 4),
        ({"skip_zero_advantage": "False"}, 8),
        ({"beta": 0.1, "kl_placement": "reward"}, 4),
        ({"beta": 0.1}, 8),
        ({"entropy_coef": 0.1}, 8),
        ({"top_entropy_quantile": 0.5, "num_iterations": 1}, 8),
        ({"use_adaptive_entropy": True, "entropy_target": 1.0}, 8),
    ],
)
def test_auto_skips_where_nothing_else_trains_equal_episodes(embedded_model, tmp_path, changes, rows):
    trainer = make(embedded_model, tmp_path, **changes)
    batch = draw(trainer, [True, False])
    seen = rows_forwarded(trainer)
    loss_and_gradients(trainer, batch)
    assert seen == [rows]


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"skip_zero_advantage": True, "beta": 0.1}, "beta=0.1 and kl_placement='loss'"),
        ({"skip_zero_advantage": True, "entropy_coef": 0.1}, "entropy_coef=0.1"),
        ({"skip_zero_advantage": True, "top_entropy_quantile": 0.5}, "top_entropy_quantile=0.5"),
        ({"skip_zero_advantage": "always"}, "skip_zero_advantage must be one of 'auto', True, False, got 'always'"),
        ({"skip_zero_advantage": True, "zero_advantage_eps": -0.1}, "not be negative, got -0.1"),
    ],
)
def test_what_would_train_or_mean_something_else_is_refused(embedded_model, tmp_path, changes, named):
    with pytest.raises(ValueError, match=named):
        make(embedded_model, tmp_path, **changes)
