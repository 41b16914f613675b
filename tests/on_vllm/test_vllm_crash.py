"""A rollout on vLLM that ends in the middle leaves a checkpoint from which the run goes on as if nothing had happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

import torch
from killed_run import ENDS_IN, UPDATES, Fatal, middle_of_the_last_rollout, trainer
from peft import get_peft_model_state_dict

from agile_trainers.trainers.trainer import MultiTurnTrainer


def adapter(run: MultiTurnTrainer) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in get_peft_model_state_dict(run.model).items()}


@pytest.fixture(scope="module")
def whole(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, torch.Tensor]]:
    """An undisturbed run: a step in the middle of a late rollout, and the adapter at the end."""
    run = trainer(embedded_model, tmp_path_factory.mktemp("whole"))
    run.train()
    return middle_of_the_last_rollout(run), adapter(run)


@pytest.fixture(autouse=True)
def nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fatal, "at", None)
    monkeypatch.setattr(Fatal, "steps", 0)


def goes_on(model: Path, output: Path, expected: dict[str, torch.Tensor]) -> None:
    saved = [path.name for path in output.glob("checkpoint-*") if (path / "complete.json").is_file()]
    assert sorted(saved) == [f"checkpoint-{step}" for step in range(1, ENDS_IN)]
    run = trainer(model, output)
    run.train(resume_from_checkpoint=True)
    assert run.state.global_step == UPDATES
    for name, weight in adapter(run).items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-5)


def test_an_exception_out_of_the_engine(
    embedded_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: tuple[int, dict[str, torch.Tensor]]
) -> None:
    run = trainer(embedded_model, tmp_path)
    assert run.sampler.vllm is not None
    runner = run.sampler.vllm.engine.engine.model_executor.driver_worker.model_runner

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("the device fell off the bus")

    monkeypatch.setattr(Fatal, "at", whole[0])
    monkeypatch.setattr(Fatal, "happens", lambda: setattr(runner, "execute_model", broken), raising=False)
    with pytest.raises(RuntimeError, match="fell off the bus"):
        run.train()
    monkeypatch.setattr(Fatal, "at", None)
    goes_on(embedded_model, tmp_path, whole[1])


def test_sigkill(embedded_model: Path, tmp_path: Path, whole: tuple[int, dict[str, torch.Tensor]]) -> None:
    script = Path(__file__).with_name("killed_run.py")
    command = [sys.executable, str(script), str(embedded_model), str(tmp_path), str(whole[0])]
    killed = subprocess.run(command, env=dict(os.environ), capture_output=True, timeout=300)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()[-2000:]
    goes_on(embedded_model, tmp_path, whole[1])
