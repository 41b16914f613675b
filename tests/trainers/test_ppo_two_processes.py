"""Real gloo DDP, started by torchrun: two processes train policy and critic as one does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from games import relative_error
from several_processes import episodes, launch

SCRIPT = Path(__file__).with_name("ppo_two_processes.py")
LOGGED = ["return/mean", "advantage/std", "advantage/mean", "value/mean", "value/error", "value/explained_variance",
          "value/loss", "value/clip_ratio", "kl"]  # fmt: skip


CASES = {
    # The reference pass freezes the critic in the middle of a training step.
    "reference-pass": {
        "gradient_checkpointing": True, "beta": 0.1, "value_clip_range": 0.2, "critic_learning_rate": 0.02
    },
    "tokens-accumulation-reentrant": {
        "advantage_granularity": "token",
        "whiten_advantages": True,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
        # As for any model: reentrant checkpointing and the search for unused parameters exclude each other.
        "ddp_find_unused_parameters": False,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(embedded_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ppo-runs")
    cases = {
        name: {**case, "per_device_train_batch_size": 8 // case.get("gradient_accumulation_steps", 1)}
        for name, case in CASES.items()
    }
    return [launch(SCRIPT, n, embedded_model, folder / str(n), cases) for n in (1, 2)]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_are_one(runs, case):
    one, two = (torch.load(run / case / "result.pt", weights_only=False) for run in runs)
    assert (one["processes"], two["processes"]) == (1, 2) and two["distributed_type"].endswith("MULTI_CPU")
    fresh = [torch.load(path) for path in [path for run in runs for path in sorted((run / case).glob("critic-*.pt"))]]
    assert len(fresh) == 3 and all(torch.equal(other[name], fresh[0][name]) for other in fresh for name in fresh[0])
    ours, theirs = (episodes(run / case, "train") for run in runs)
    assert len(ours) == 16
    assert sorted(r["completion_ids"] for r in ours) == sorted(r["completion_ids"] for r in theirs)
    for single, double in zip(one["gradients"], two["gradients"]):
        for adapter in (".default", ".critic"):
            parts = [{name: value for name, value in step.items() if adapter in name} for step in (double, single)]
            assert parts[1] and all(value.any() for value in parts[1].values())
            assert relative_error(*parts) < 1e-5
    for name, value in one["adapter"].items():
        torch.testing.assert_close(two["adapter"][name], value, rtol=1e-5, atol=1e-6)
    for single, double in zip(one["logged"], two["logged"]):
        for name in LOGGED:
            if name in single:
                assert double[name] == pytest.approx(single[name], abs=1e-5), name
