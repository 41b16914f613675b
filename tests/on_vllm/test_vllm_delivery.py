"""Moves to vLLM that go wrong, in process and on a server, are named at the first batch; healthy runs are not stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

from games import make_trainer
from planted_deliveries import CAUSES, plant, suspect_every_batch
from serving import serving

from agile_trainers.sampling.mismatch import SamplerMismatchError
from agile_trainers.sampling.sampler import shared_engine
from agile_trainers.trainers.trainer import MultiTurnTrainer

RUN: dict[str, Any] = {
    "max_new_tokens": 12, "stop_strings": None, "max_steps": 3, "max_model_length": 256, "use_vllm": True,
}  # fmt: skip
Make = Callable[..., MultiTurnTrainer]


@pytest.fixture(scope="module", params=["colocate", "server"])
def make(
    request: pytest.FixtureRequest, embedded_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Make]:
    """Makes trainers on one engine, whose adapters are not zero at their start."""
    folder = tmp_path_factory.mktemp(request.param)
    with ExitStack() as stack:
        where: dict[str, Any] = {"vllm_mode": request.param}
        if request.param == "server":
            where["vllm_server_base_url"] = stack.enter_context(serving(embedded_model, 256)).url

        def made(**changes: Any) -> MultiTurnTrainer:
            lora = {"init_lora_weights": False}
            return make_trainer(
                embedded_model, folder / str(len([*folder.iterdir()])), lora=lora, **RUN, **where, **changes
            )

        if request.param == "colocate":
            first = made()
            stack.enter_context(shared_engine(first.args, lender=first.sampler))
        yield made


@pytest.mark.parametrize("name", CAUSES)
def test_a_delivery_that_fails_is_named_at_its_first_batch(make: Make, name: str) -> None:
    trainer = make()
    plant(trainer, name)
    with pytest.raises(SamplerMismatchError, match=f"is trained: {CAUSES[name]}"):
        trainer.train()
    assert trainer.state.global_step == (1 if name == "late" else 0)


@pytest.mark.parametrize("ahead", [0, 1])
def test_no_healthy_run_is_stopped(
    embedded_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    """In bf16, where vLLM's kernels round otherwise than the trainer's."""
    left = suspect_every_batch(monkeypatch)
    changes = {"bf16": True, "learning_rate": 0.3, "batches_ahead": ahead}
    trainer = make_trainer(embedded_model, tmp_path, lora={"init_lora_weights": False}, **RUN, **changes)
    trainer.train()
    assert trainer.state.global_step == 3 and len(left) > 10 and min(left) > 0.9
    trainer.close()
