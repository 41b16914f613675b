"""Runs under filters: what was sampled has the same probability in training, wherever its kept sets travel."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed_runs import assert_same, run_until, weights
from games import draw_batch, loss_and_gradients, make_trainer, relative_error, takes_notes
from ppo_games import make_ppo

FILTERS: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8, "temperature": 0.7},
    "min_p": {"min_p": 0.4},
    "min_new_tokens": {"min_new_tokens": 3},
    "all": {"top_k": 40, "top_p": 0.95, "min_p": 0.1, "min_new_tokens": 2, "temperature": 1.3},
}


def train(trainer: Any) -> dict[str, float]:
    """Train, and return the first step's log."""
    trainer.train()
    return next(log for log in trainer.state.log_history if "loss" in log)


def check(log: dict[str, float]) -> None:
    """Sampler and trainer agree, as without a filter."""
    assert log["sampling/sampling_logp_difference/mean"] < 1e-5
    assert log["sampling/sampling_logp_difference/max"] < 1e-4


@pytest.mark.parametrize("name", FILTERS)
def test_ratios_are_one_before_the_first_update(embedded_model: Path, tmp_path: Path, name: str) -> None:
    """Of the loss over the old policy, and of the trainer over the sampler; packed and padded."""
    packed, padded = (
        train(
            make_trainer(
                embedded_model, tmp_path, vllm_importance_sampling_correction=True, beta=0.1, sequence_packing=packing,
                **FILTERS[name],
            )
        )
        for packing in ("prefix", "none")
    )  # fmt: skip
    for log in (packed, padded):
        check(log)
        ratios = [log[f"sampling/importance_sampling_ratio/{which}"] for which in ("min", "mean", "max")]
        assert ratios == pytest.approx([1.0] * 3, abs=1e-4) and log["clip_ratio/region_mean"] == 0
    assert packed["loss"] == pytest.approx(padded["loss"], abs=1e-6)
    assert packed["entropy"] == pytest.approx(padded["entropy"], abs=1e-5)
    assert name != "top_k" or 0 < packed["entropy"] < math.log(5)


@pytest.mark.parametrize(
    "episodes",
    [
        {"environment": "games:Long", "history": takes_notes, "max_turns": 6},
        {"environment": "agent:environment_agents:gathers", "max_turns": 9},
    ],
    ids=["rewritten", "agent"],
)
def test_sets_of_several_paths(embedded_model: Path, tmp_path: Path, episodes: dict[str, Any]) -> None:
    trainer = make_trainer(embedded_model, tmp_path, **FILTERS["all"], **episodes)
    batch = draw_batch(trainer)
    assert "path_ids" in batch and batch["kept_sizes"][batch["turn_ids"] >= 0].all()
    assert not batch["kept_sizes"][batch["turn_ids"] < 0].any()
    check(train(make_trainer(embedded_model, tmp_path, **FILTERS["all"], **episodes)))


def test_nothing_is_recorded_without_a_filter(embedded_model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(embedded_model, tmp_path, top_k=0, top_p=1.0, repetition_penalty=1.2)
    assert not any(name.startswith("kept") for name in draw_batch(trainer))
    assert all(episode.kept is None for episode in trainer.rollout())


def test_a_critic_reads_beside_kept_sets(embedded_model: Path, tmp_path: Path) -> None:
    for layers in (None, 1):
        log = train(make_ppo(embedded_model, tmp_path / str(layers), critic_layers=layers, **FILTERS["all"]))
        check(log)
        assert log["value/loss"] > 0


def test_a_loss_of_ones_own_gets_the_truncated_policy(embedded_model: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"beta": 0.1, "loss_type": "dapo", "use_bias_correction_kl": True, "top_k": 5}
    trl, own = (
        make_trainer(embedded_model, tmp_path, algorithm=algorithm, num_iterations=2, **options)
        for algorithm in ("grpo", "own_losses:Tokens")
    )
    batch = draw_batch(trl)
    own.current_gradient_accumulation_steps = 1
    found, expected = (loss_and_gradients(trainer, batch)[1] for trainer in (own, trl))
    assert relative_error(found, expected) < 1e-6
    without = {name: value for name, value in batch.items() if not name.startswith("kept")}
    assert relative_error(loss_and_gradients(own, without)[1], expected) > 0.1


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_killed_run_goes_on(
    embedded_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    """To the bit, in the middle of a batch, from episodes that were played ahead."""
    settings: dict[str, Any] = {
        "num_generations": 4, "per_device_train_batch_size": 4, "steps_per_generation": 2, "batches_ahead": ahead,
        "max_steps": 5, "optim": "adamw_torch", "learning_rate": 1e-2, **FILTERS["all"],
    }  # fmt: skip
    monkeypatch.setitem(run_until.__globals__["CASES"], "truncated", settings)
    whole = run_until(99, "truncated", embedded_model, tmp_path / "whole")
    check(next(log for log in whole.state.log_history if "loss" in log))
    run_until(3, "truncated", embedded_model, tmp_path / "run", resume="auto")
    again = run_until(99, "truncated", embedded_model, tmp_path / "run", resume="auto")
    assert again.state.global_step == 5
    assert_same(weights(again), weights(whole))


def test_an_episode_keeps_its_sets_in_other_micro_batches(embedded_model: Path, tmp_path: Path) -> None:
    """One micro-batch of 8, or four of 2 whose rows are exchanged by length, in passes of few tokens."""
    ends = []
    for size in (8, 2):
        trainer = make_trainer(
            embedded_model, tmp_path / str(size), per_device_train_batch_size=size, gradient_accumulation_steps=8 // size,
            learning_rate=0.01, beta=0.1, max_tokens_per_micro_batch=None if size == 8 else 60, **FILTERS["all"],
        )  # fmt: skip
        train(trainer)
        ends.append({n: p.detach() for n, p in trainer.model.named_parameters() if p.requires_grad})
    assert relative_error(*ends) < 5e-6
    assert all(torch.isfinite(value).all() for value in ends[0].values())
