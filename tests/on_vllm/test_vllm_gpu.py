"""What frees a GPU's memory around a rollout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from games import Chatter, make_trainer

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
    gaps = [log["sampling/sampling_logp_difference/mean"] for log in trainer.state.log_history[:3]]
    assert max(gaps) < 0.01
