"""What a user sets for another machine, or for evaluations that there are none of: the answer, before anything is loaded."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from agile_trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer
from agile_trainers.cli import machine
from agile_trainers.config import launch_checks

HERE = {"max_steps": 1, "use_cpu": True, "bf16": False}


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda *_: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_script_without_a_gpu_trains_on_the_cpu_as_the_command_does(
    tmp_path: Path, no_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(launch_checks.logger, "warning", said.append)
    args = MultiTurnGRPOConfig(output_dir=str(tmp_path), max_steps=1)
    assert (args.use_cpu, args.bf16) == (True, False)
    assert said == [
        "There is no GPU: training runs on the CPU, in float32 unless the launch configuration says otherwise."
    ]
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert MultiTurnGRPOConfig(output_dir=str(tmp_path), max_steps=1).bf16 is True
    with pytest.raises(ValueError, match="bf16/gpu"):  # asked for
        MultiTurnGRPOConfig(output_dir=str(tmp_path), max_steps=1, bf16=True)
    assert MultiTurnGRPOConfig(output_dir=str(tmp_path), max_steps=1, use_cpu=True).bf16 is True and len(said) == 2


def test_the_cpu_that_is_asked_for_computes_in_float32_too(tmp_path: Path) -> None:
    assert MultiTurnGRPOConfig(output_dir=str(tmp_path), max_steps=1, use_cpu=True).bf16 is False
    assert MultiTurnGRPOConfig(output_dir=str(tmp_path), max_steps=1, use_cpu=True, bf16=True).bf16 is True


@pytest.mark.parametrize("option", [{"load_best_model_at_end": True}, {"save_strategy": "best"}])
def test_the_best_checkpoint_needs_an_evaluation(option: dict[str, Any], tmp_path: Path) -> None:
    ((name, value),) = option.items()
    with pytest.raises(
        ValueError, match=rf"^{name}={value!r} chooses .* eval_strategy='no' makes none\. Set eval_strategy"
    ):
        MultiTurnGRPOConfig(output_dir=str(tmp_path), **HERE, **option)
    MultiTurnGRPOConfig(output_dir=str(tmp_path), **HERE, **option, eval_strategy="steps", eval_steps=500)


def test_a_device_map_for_a_gpu_that_is_not_there_is_no_damaged_file(
    embedded_model: Path, tmp_path: Path, no_gpu: None
) -> None:
    args = MultiTurnGRPOConfig(output_dir=str(tmp_path), **HERE, model_init_kwargs={"device_map": "cuda"})
    with pytest.raises(
        ValueError, match=r"cannot be loaded to a GPU, since PyTorch finds none here.*Leave device_map unset"
    ):
        MultiTurnGRPOTrainer(embedded_model, args=args, environment="agile:guess_number")


def test_options_of_episodes_name_both_ways_to_give_an_environment(embedded_model: Path, tmp_path: Path) -> None:
    args = MultiTurnGRPOConfig(output_dir=str(tmp_path), **HERE, max_turns=3)
    with pytest.raises(ValueError, match=r"`environment=\.\.\.`, --environment on the command line"):
        MultiTurnGRPOTrainer(embedded_model, args=args)


def test_the_folder_of_launch_configurations_is_whole_in_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    far = Path("/opt/a_long_name_of_a_folder/lib/python3.12/site-packages/agile_trainers/accelerate_configs")
    monkeypatch.setattr(machine, "FOLDER", far)
    file = io.StringIO()
    machine.main([], Console(file=file, width=80, force_terminal=True))
    assert str(far) in file.getvalue()
