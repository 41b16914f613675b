"""Trainers after each other in one process, each with an engine of its own: the tenth leaves no more than the second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

import torch.distributed as dist
from games import draw_batch, make_trainer
from ten_trainers import KINDS, check_tenth, held
from vllm.distributed.parallel_state import model_parallel_is_initialized

from agile_trainers.rollout.generators.vllm.engine import VllmEngine
from agile_trainers.sampling.sampler import shared_engine

VLLM = KINDS["vllm"]


@pytest.mark.parametrize("kinds", [["plain"], ["agents", "processes"], ["ahead", "critic"]], ids="+".join)
def test_the_tenth_leaves_what_the_second_left(kinds: list[str], embedded_model: Path, tmp_path: Path) -> None:
    """Of each two trainers one is deleted, the other closed."""
    check_tenth(embedded_model, tmp_path, ["vllm", *kinds])


def test_a_closed_trainer_frees_its_engine_and_nothing_of_others(embedded_model: Path, tmp_path: Path) -> None:
    """Nor the groups of processes that engines share, which go with the last."""
    first = make_trainer(embedded_model, tmp_path / "first", **VLLM)
    with make_trainer(embedded_model, tmp_path / "second", **VLLM) as second:
        draw_batch(second)
        before = held()["bytes"]
    assert before - held()["bytes"] > 2**30, "the cache of 1 GiB"
    assert second.sampler.vllm is not None and not second.sampler.vllm.engine.is_open
    second.close()
    draw_batch(first)
    before = held()["bytes"]
    engine = first.sampler.vllm.engine
    with shared_engine(first.args, lender=first.sampler):
        with make_trainer(embedded_model, tmp_path / "third", **VLLM) as third:
            assert third.sampler.vllm.engine is engine
        assert engine.is_open
    draw_batch(first)
    assert dist.is_initialized() and model_parallel_is_initialized()
    del first, third, engine
    assert before - held()["bytes"] > 2**30
    assert not dist.is_initialized() and not model_parallel_is_initialized()


def test_a_trainer_that_fails_frees_its_engine(
    embedded_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("no adapter")

    before = held()["bytes"]
    monkeypatch.setattr(VllmEngine, "add_adapter", refuse)
    with pytest.raises(ValueError, match="no adapter") as caught:
        make_trainer(embedded_model, tmp_path, **VLLM)
    assert held()["bytes"] - before < 2**29 and caught.tb is not None, "while the error is held"
    assert not model_parallel_is_initialized()
