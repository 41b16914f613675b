"""A teacher on a real vLLM server gives what its model gives in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

import torch
from games import Hinting, make_trainer
from scoring_server import changed_model
from serving import Served, serving

from agile_trainers.embedded import make_embedded_model
from agile_trainers.train_batch import TrainBatch


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The policy's base and the teacher."""
    folder = tmp_path_factory.mktemp("models")
    base = make_embedded_model(folder / "base")
    return base, changed_model(base, folder / "teacher")


@pytest.fixture(scope="module")
def served(models: tuple[Path, Path]) -> Iterator[Served]:
    # With `--enable-lora` vLLM 0.31 on CPU dies of `prompt_logprobs`.
    with serving(models[1], 512, more=["--no-enable-lora"]) as server:
        yield server


@pytest.mark.parametrize("history", [None, "games:takes_notes"], ids=["one path", "several"])
def test_a_server_gives_what_the_model_gives(models, served, tmp_path, history) -> None:
    options = {
        "environment": Hinting, "max_turns": 6, "history": history, "num_generations": 2, "teacher_hint": "hint",
        "num_iterations": 2, "max_steps": 2,
    }  # fmt: skip
    read, kl = [], []
    for name, teacher in (("served", served.url), ("loaded", str(models[1]))):
        trainer = make_trainer(models[0], tmp_path / name, teacher=teacher, **options)
        batch = TrainBatch.from_trl(trainer._generate_and_score_completions([{}] * 8))
        read.append(torch.where(batch.counted, trainer.teacher.read(trainer.model, batch), 0.0))
        trainer.train()
        kl.append([entry["teacher/kl"] for entry in trainer.state.log_history if "teacher/kl" in entry])
    torch.testing.assert_close(*read, rtol=0, atol=1e-4)
    assert read[0].abs().max() > 1 and kl[0] == pytest.approx(kl[1], abs=1e-3) and min(map(abs, kl[0])) > 1e-3
