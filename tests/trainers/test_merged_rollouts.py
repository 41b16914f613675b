"""Rollouts with weights that are cast once."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from games import make_trainer

from agile_trainers.rollout.generators.transformers.generator import TransformersGenerator
from agile_trainers.sampling import sampler


@pytest.fixture(scope="session")
def embedded_model(two_layers: Path) -> Path:
    return two_layers


def played(trainer: Any) -> list[Any]:
    return [(one.completion_ids, one.sampling_logprobs) for one in trainer.rollout(generation=0)]


def test_weights_cast_once_change_no_bit_of_a_rollout(
    embedded_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer: Any = make_trainer(embedded_model, tmp_path, bf16=True, max_steps=2)
    seen, forward = set(), TransformersGenerator._forward

    def watched(self: Any, batch: Any) -> torch.Tensor:
        weights = dict(self.model.named_parameters())
        seen.update(str(value.dtype) for name, value in weights.items() if "q_proj" in name)
        return forward(self, batch)

    monkeypatch.setattr(TransformersGenerator, "_forward", watched)
    ours = played(trainer)
    assert seen == {"torch.bfloat16"}
    trainer.update(trainer.rollout())
    assert {value.dtype for value in trainer.model.parameters()} == {torch.float32}
    monkeypatch.setattr(sampler, "cast_once", lambda *arguments: nullcontext())
    other: Any = make_trainer(embedded_model, tmp_path / "other", bf16=True)
    seen.clear()
    assert played(other) == ours and seen == {"torch.float32"}
