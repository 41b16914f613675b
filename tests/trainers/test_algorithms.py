"""The registry of algorithms, and an algorithm that is one file outside the package: the one of docs/algorithms.md."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from doc_blocks import ROOT, blocks
from safetensors.torch import load_file

from agile_environments.probes import PROBE_WORDS
from agile_trainers import MultiTurnGRPOTrainer, MultiTurnTrainer, find_algorithm, register_algorithm
from agile_trainers.cli.chain.command import make_multi_turn
from agile_trainers.cli.chain.stages import parse_pipeline
from agile_trainers.cli.main import main
from agile_trainers.cli.yaml_files import YAMLFileError
from agile_trainers.embedded import make_embedded_model
from agile_trainers.step.credit import Credit, CreditInputs
from agile_trainers.trainers import registry as algorithms
from agile_trainers.trainers.registry import ALGORITHMS

FILE = blocks(ROOT / "docs" / "algorithms.md")[0].text
NAME = "constant_baseline:ConstantBaselineTrainer"
RUN: dict[str, Any] = {
    "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "max_turns": 1, "max_new_tokens": 1,
    "per_device_train_batch_size": 32, "gradient_accumulation_steps": 1, "max_steps": 4, "save_steps": 2, "seed": 1,
    "learning_rate": 2e-3, "lr_scheduler_type": "constant", "logging_steps": 1, "baseline": 0.25,
}  # fmt: skip


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with the file of an algorithm in it."""
    (tmp_path / "constant_baseline.py").write_text(FILE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(algorithms, "_registered", {})
    yield tmp_path
    sys.modules.pop("constant_baseline", None)


def test_an_algorithm_of_one_file_is_trained_by_name_and_resumes(outside: Path) -> None:
    """By the command line to its end; then by Python, under a name of its own, from the checkpoint in the middle."""
    model = make_embedded_model(outside / "model", words=PROBE_WORDS)
    run = {"model_name_or_path": model, "environment": "agile:probe/constant", "output_dir": "run", **RUN}
    assert main([NAME, *(word for name, value in run.items() for word in (f"--{name}", str(value)))]) == 0
    history = json.loads(Path("run/checkpoint-4/trainer_state.json").read_text())["log_history"]
    returns = [entry["return/mean"] for entry in history if "return/mean" in entry]
    assert returns[0] < 0.3 and returns[-1] > 0.8
    assert all(entry["baseline"] == 0.25 for entry in history if "return/mean" in entry)
    for mean, entry in zip(returns, history):
        assert entry["advantage/mean"] == pytest.approx(mean - 0.25)
    before, after = load_file(model / "model.safetensors"), load_file("run/model.safetensors")
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert json.loads(Path("run/agile_trainers.json").read_text())["algorithm"] == "ConstantBaselineTrainer"

    made_up = importlib.import_module("constant_baseline")
    register_algorithm("constant", made_up.ConstantBaselineTrainer)
    trainer = find_algorithm("constant")(
        model=str(model),
        environment="agile:probe/constant",
        args=made_up.ConstantBaselineConfig(output_dir="run", **RUN),
    )
    trainer.train(resume_from_checkpoint="run/checkpoint-2")
    assert trainer.state.global_step == 4
    resumed = trainer.model.state_dict()
    assert all(torch.equal(resumed[name], value) for name, value in after.items())


def test_chain_and_check_take_it_too(outside: Path, embedded_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stage = {"algorithm": NAME, **{name: RUN[name] for name in ("max_steps", "max_turns", "max_new_tokens")}}
    cpu = {"use_cpu": True, "bf16": False, "report_to": "none", "baseline": 0.75}
    content = {
        "output_dir": "chain", "model": str(embedded_model), "environment": "agile:probe/constant", "options": cpu,
        "stages": [stage],
    }  # fmt: skip
    pipeline = parse_pipeline(content)
    (read,) = pipeline.stages
    assert read.name == "ConstantBaselineTrainer" and read.config.baseline == 0.75
    assert type(make_multi_turn(pipeline, read, str(embedded_model))) is find_algorithm(NAME)
    with pytest.raises(YAMLFileError, match=r"stage 1: .*'constant_baseline:Constant'.*ConstantBaseline"):
        parse_pipeline({**content, "stages": [{**stage, "algorithm": "constant_baseline:Constant"}]})
    with pytest.raises(SystemExit):
        main([NAME, "--help"])
    own, _, trls = capsys.readouterr().out.partition("options of TRL that are often set")
    assert "--baseline" in own and "Subtracted from every return" in own and "--baseline" not in trls
    options = [
        "--environment",
        "agile:probe/constant",
        "--episodes",
        "2",
        "--scripted_policy",
        "expert",
        "--max_turns",
        "1",
    ]
    assert main(["check", NAME, *options, "--max_new_tokens", "4", "--baseline", "0.25"]) in (0, 1)
    assert f"Algorithm {NAME}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gpro", ["Unknown algorithm 'gpro'", "grpo", "module.path:Class"]),
        ("constant_baseline:Constant", ["no 'Constant'", "ConstantBaseline"]),
        ("constant_baselin:ConstantBaselineTrainer", ["no module 'constant_baselin'"]),
        ("constant_baseline:ConstantBaselineConfig", ["must be a subclass of MultiTurnTrainer"]),
        ("agile_trainers.trainers.trainer:MultiTurnTrainer", ["no credit rule", "assign_credit"]),
        (":Trainer", ["Unknown algorithm ':Trainer'"]),
    ],
)
def test_what_is_no_algorithm_is_said(
    name: str, said: list[str], outside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        find_algorithm(name)
    assert main([name, "--model_name_or_path", "model"]) == 2
    for words in (str(error.value), capsys.readouterr().err):
        assert all(word in words for word in said if ":" in name or word == "grpo")


@pytest.mark.parametrize(
    ("name", "trainer", "error", "said"),
    [
        ("grpo", MultiTurnGRPOTrainer, ValueError, "'grpo' is there already"),
        ("a:b", MultiTurnGRPOTrainer, ValueError, "no colon, got 'a:b'"),
        ("", MultiTurnGRPOTrainer, ValueError, "got ''"),
        ("mine", MultiTurnTrainer, ValueError, "'mine', MultiTurnTrainer, has no credit rule"),
        ("mine", object, TypeError, "'mine' must be a subclass of MultiTurnTrainer"),
    ],
)
def test_what_cannot_be_registered(name: str, trainer: Any, error: type[Exception], said: str, outside: Path) -> None:
    with pytest.raises(error, match=said):
        register_algorithm(name, trainer)
    register_algorithm("mine", MultiTurnGRPOTrainer)
    with pytest.raises(ValueError, match="'mine' is there already"):
        register_algorithm("mine", find_algorithm(NAME))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_is_one_short_file_that_returns_credit(name: str) -> None:
    """Its options and its documentation included."""
    trainer = find_algorithm(name)
    rule = inspect.unwrap(trainer.assign_credit)
    file = Path(inspect.getfile(trainer.config_class))
    home = Path(inspect.getfile(rule))
    assert file.stem == name and home.parent == file.parent and home.stem in (name, "grpo")
    assert len(file.read_text(encoding="utf-8").splitlines()) < 150
    signature = inspect.signature(trainer.assign_credit, eval_str=True)
    assert signature.return_annotation is Credit and signature.parameters["turns"].annotation is CreditInputs


def test_the_file_outside_is_shorter_still() -> None:
    assert len(FILE.splitlines()) < 40
