"""What frees a GPU's memory around a rollout, and what repeats itself there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from chatter import Chatter, Late
from checkpointed_runs import assert_same, weights
from games import make_trainer
from scripted_runs import said, watched

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "whole"])
def test_engine_and_trainer_make_room_for_each_other(lora: bool, embedded_model: Path, tmp_path: Path) -> None:
    seen: list[set[str]] = []

    class Watching(Chatter):
        """Looks where the trainer's weights are."""

        def step(self, action: str) -> Any:
            seen.append({weight.device.type for weight in trainer.model.parameters()})
            return super().step(action)

    trainer = make_trainer(
        embedded_model,
        tmp_path,
        environment=Watching,
        lora=lora,
        use_cpu=False,
        use_vllm=True,
        stop_strings=None,
        max_steps=3,
        vllm_enable_sleep_mode=True,
        offload_policy_during_rollout=True,
    )
    engine = trainer.sampler.vllm.engine.engine
    assert engine.is_sleeping()
    seen.clear()
    trainer.train()
    assert engine.is_sleeping() and seen and all(devices == {"cpu"} for devices in seen)
    assert {weight.device.type for weight in trainer.model.parameters()} == {"cuda"}
    mismatches = [log["sampling/sampling_logp_difference/mean"] for log in trainer.state.log_history[:3]]
    assert max(mismatches) < 0.01


@pytest.mark.parametrize("ahead", [0, 2])
def test_timing_changes_no_bit(
    ahead: int, embedded_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With kernels whose sums do not depend on the batch."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    runs = []
    for name in ("one", "other"):
        trainer = make_trainer(
            embedded_model, tmp_path / name, environment=Late, batches_ahead=ahead, use_cpu=False, use_vllm=True,
            stop_strings=None, max_model_length=256, environment_workers=4, per_device_train_batch_size=8, max_steps=5,
            learning_rate=0.3, full_determinism=True,
        )  # fmt: skip
        batches = watched(trainer)
        trainer.train()
        runs.append((trainer, [said(one) for one in batches]))
    (one, batches), (other, others) = runs
    assert batches == others
    assert_same(weights(one), weights(other))
