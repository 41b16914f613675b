"""Ids of agents on the command line: evaluation, training, populations and chains take them as those of environments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from agile_trainers.cli.main import main

AGENT = {"environment": "agent:asking:talks", "environment_args": {"turns": 1}}
LORA = {"r": 2, "lora_alpha": 4, "target_modules": "all-linear"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory has the agent's module, as a user's has."""
    source = Path(__file__).parent / "trainers" / "asking.py"
    (tmp_path / "asking.py").write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def test_evaluation_of_an_agent(embedded_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(
        ["eval", str(embedded_model), "--environment", "agent:asking:talks", "--environment_args", '{"turns": 3}',
         "--episodes", "2", "--max_new_tokens", "4", "--no_card", "--json"]
    )  # fmt: skip
    assert code == 0
    printed = json.loads(capsys.readouterr().out)
    (played,) = printed["environments"]
    (policy,) = played["policies"]
    assert played["environment"] == "agent:asking:talks" and policy["turns"] == 3.0
    assert policy["stop_reasons"] == {"terminated": 2} and policy["unreported"] == 0


@pytest.mark.parametrize("wrong", ["agent:asking:tals", "agent:asknig:talks", "agent:asking"])
@pytest.mark.parametrize("command", ["eval", "grpo"])
def test_a_wrong_id_is_found_before_anything_is_loaded(
    command: str, wrong: str, embedded_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = [str(embedded_model)] if command == "eval" else ["--model_name_or_path", str(embedded_model)]
    assert main([command, *model, "--environment", wrong]) == 2
    assert wrong in capsys.readouterr().err


def test_populations_and_chains_take_agents(embedded_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = {"model": str(embedded_model), "lora": LORA, **AGENT}
    options = {"max_steps": 1, "max_new_tokens": 4, "num_eval_episodes": 2, "use_cpu": True, "bf16": False}
    population = {
        **run, "output_dir": "population", "algorithm": "grpo", "members": 2, "rounds": 1, "fitness": "return",
        "hyperparameters": {"learning_rate": {"low": 1e-6, "high": 1e-4, "log": True}}, "options": options,
    }  # fmt: skip
    chain = {**run, "output_dir": "chain", "options": options, "stages": [{"algorithm": "grpo", "learning_rate": 1e-5}]}
    for command, content in (("evolve", population), ("chain", chain)):
        for name, code in (("agent:asking:talks", 0), ("agent:asking:tals", 2)):
            file = Path(f"{command}.yaml")
            file.write_text(yaml.safe_dump({**content, "environment": name}), encoding="utf-8")
            try:
                assert main([command, str(file), "--dry-run"]) == code
            except SystemExit as stop:
                assert stop.code == code
                assert "asking has no 'tals'" in capsys.readouterr().err
