"""Rollouts with weights that are cast once, and with a merged adapter."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from games import make_trainer, relative_error

from agile_trainers.rollout.generators.transformers.generator import TransformersGenerator
from agile_trainers.sampling import sampler


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


def test_a_merged_adapter_samples_what_is_trained(embedded_model: Path, tmp_path: Path) -> None:
    """The same tokens, the mismatch within rounding, and the same update as without merging."""
    trained = []
    for merged in (False, True):
        trainer: Any = make_trainer(
            embedded_model, tmp_path / str(merged), merge_adapter_in_rollout=merged, max_steps=2, max_logprob_gap=1e-5
        )
        episodes = []
        for _ in range(2):  # the second time with an adapter that is not zero
            episodes.append(trainer.rollout())
            trainer.update(episodes[-1])
        tokens = [one.completion_ids for batch in episodes for one in batch]
        trained.append((tokens, dict(trainer.model.named_parameters()), trainer.state.log_history))
    (ours, weights, _), (theirs, others, logged) = trained
    assert ours == theirs and 0 < logged[1]["sampling/sampling_logp_difference/max"] < 1e-5
    assert relative_error(*({name: value.detach() for name, value in one.items()} for one in (weights, others))) < 1e-6


def test_a_model_without_an_adapter_has_none_to_merge(embedded_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="merge_adapter_in_rollout=True has no effect on this policy"):
        make_trainer(embedded_model, tmp_path, lora=False, merge_adapter_in_rollout=True)
