"""Two processes, an engine each: they play the episodes of one and compute its gradient."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

import torch
from games import relative_error
from test_two_processes import SCRIPT, episodes, launch

CASES = {
    "lora": {"use_vllm": True, "num_generations": 8, "max_steps": 2, "vllm_importance_sampling_mode": "turn_mask"},
    "whole": {"use_vllm": True, "lora": False, "max_steps": 2},
}


def test_two_processes_are_one(embedded_model: Path, tmp_path: Path) -> None:
    cases = {name: {"per_device_train_batch_size": 8, **case} for name, case in CASES.items()}
    runs = [launch(SCRIPT, n, embedded_model, tmp_path / str(n), cases) for n in (1, 2)]
    for case in CASES:
        one, two = (torch.load(run / case / "result.pt", weights_only=False) for run in runs)
        assert (one["processes"], two["processes"]) == (1, 2)
        for kind, count in (("generation", 16), ("eval", 5)):
            ours, theirs = (episodes(run / case, kind) for run in runs)
            assert len(ours) == count
            assert [r["completion_ids"] for r in ours] == [r["completion_ids"] for r in theirs]
        for single, double in zip(one["gradients"], two["gradients"], strict=True):
            assert relative_error(double, single) < 1e-5
        assert max(one["logged"]["sampling/sampling_logp_difference/max"], 0) < 1e-3
        for name in ("sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max"):
            assert two["logged"][name] == pytest.approx(one["logged"][name], abs=1e-5)
