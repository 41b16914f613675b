"""Runs on episodes of several paths: real gloo DDP, and a run that is resumed in the middle of a generation batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpointed_runs import SaveOnce
from games import make_trainer, relative_error
from path_episodes import programs, repeated
from ppo_games import make_ppo, wake
from several_processes import launch

SCRIPT = Path(__file__).with_name("paths_two_processes.py")
CASES = {
    "grpo": {"beta": 0.1, "loss_type": "grpo", "importance_sampling_level": "turn"},
    "half-in-passes": {
        "half": True,
        "max_tokens_per_micro_batch": 12,
        "loss_type": "dapo",
        "sequence_packing": "prefix",
    },
    "ppo": {"ppo": True, "gae_lambda": 0.5, "loss_type": "dr_grpo", "max_tokens_per_micro_batch": 20},
}
LOGGED = ["return/mean", "turns/mean", "entropy", "clip_ratio/region_mean", "num_tokens", "kl", "value/loss"]


@pytest.fixture(scope="session")
def embedded_model(two_layers: Path) -> Path:
    return two_layers


@pytest.fixture(scope="module")
def runs(embedded_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("path-runs")
    return [launch(SCRIPT, n, embedded_model, folder / str(n), CASES) for n in (1, 2)]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_as_one(runs, case):
    one, two = (torch.load(folder / case / "result.pt", weights_only=False) for folder in runs)
    assert (one["processes"], two["processes"]) == (1, 2)
    assert len(one["gradients"]) == len(two["gradients"]) == 2
    for ours, theirs in zip(two["gradients"], one["gradients"], strict=True):
        assert relative_error(ours, theirs) < 5e-6
    for ours, theirs in zip(two["logged"], one["logged"], strict=True):
        for name in set(LOGGED) & ours.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_run_is_resumed_in_the_middle_of_a_batch_to_the_same_bits(embedded_model, tmp_path, algorithm):
    def make(folder):
        options = {
            "per_device_train_batch_size": 4, "steps_per_generation": 2, "num_iterations": 2, "max_steps": 8,
            "save_strategy": "steps", "save_steps": 1, "callbacks": [SaveOnce(2)],
            "optim": "adamw_torch", "learning_rate": 1e-3,
            "max_logprob_gap": 100.0, "vllm_importance_sampling_correction": False, "max_tokens_per_micro_batch": 20,
        }  # fmt: skip
        if algorithm == "grpo":
            return make_trainer(embedded_model, folder, beta=0.1, **options)
        trainer = make_ppo(embedded_model, folder, **options)
        wake(trainer)
        return trainer

    whole = make(tmp_path)
    for seed in range(2):
        whole.update(programs(seed=seed))
    assert whole.state.global_step == 8
    again = make(tmp_path)
    again.start(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))  # trains the rest of the batch
    assert again.state.global_step == 4
    again.update(programs(seed=1))
    for (name, ours), (_, theirs) in zip(again.model.named_parameters(), whole.model.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_micro_batches_of_any_size_make_the_same_steps(embedded_model, tmp_path):
    """Episodes stored as one path or several, in one micro-batch of 8 or four of 2."""
    ends = []
    for number, (size, stored) in enumerate([(8, list), (8, repeated_all), (2, repeated_all)]):
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size, "max_steps": 2}
        trainer = make_trainer(embedded_model, tmp_path / str(number), learning_rate=0.01, beta=0.1, **options)
        for _ in range(2):
            trainer.update(stored(trainer.rollout()))
        assert trainer.state.global_step == 2
        ends.append({n: p.detach() for n, p in trainer.model.named_parameters() if p.requires_grad})
    for other in ends[1:]:
        assert relative_error(other, ends[0]) < 5e-6


def repeated_all(episodes):
    return [repeated(episode) for episode in episodes]
