"""The command line: what it lists, how it parses, what it refuses, and a real run of each command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from trl import GRPOConfig
from trl.scripts.grpo import make_parser as make_trl_parser

from agile_trainers.cli import grpo
from agile_trainers.cli.main import COMMANDS, main

CONFIG = """\
environment: agile:guess_number
environment_args: {level: easy}
max_turns: 3
max_new_tokens: 2
advantage_granularity: trajectory
"""
SHARED = """\
num_generations: 4
per_device_train_batch_size: 8
max_steps: 2
learning_rate: 1.0e-2
report_to: none
disable_tqdm: true
use_cpu: true
bf16: false
use_peft: true
lora_target_modules: all-linear
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG + SHARED, encoding="utf-8")
    return path


def test_help_lists_the_commands_without_importing_torch() -> None:
    program = "import sys; from agile_trainers.cli.main import main; main(['--help']); print('torch' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert all(f"\n  {command}" in output for command in COMMANDS)
    assert output.endswith("False\n")


def test_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpro"]) == 2
    assert "there is no command 'gpro'" in capsys.readouterr().err


def test_options_shared_with_trl_are_parsed_as_trl_parses_them(tmp_path: Path) -> None:
    path = tmp_path / "shared.yaml"
    path.write_text(SHARED, encoding="utf-8")
    argv = ["--config", str(path), "--model_name_or_path", "model", "--beta", "0.1", "--max_steps", "5"]
    argv += ["--max_completion_length", "64", "--disable_dropout", "false", "--reward_funcs", "accuracy_reward"]
    script, args, model, _ = grpo.make_parser().parse_args_and_config(argv)
    trl_script, trl_args, trl_model, _ = make_trl_parser().parse_args_and_config(argv)
    assert (args.max_steps, args.beta, args.learning_rate) == (5, 0.1, 1e-2)
    for name in GRPOConfig.__dataclass_fields__:
        assert getattr(args, name) == getattr(trl_args, name), name
    assert model == trl_model
    assert {name: getattr(script, name) for name in vars(trl_script)} == vars(trl_script)


def test_environment_arguments_come_from_yaml_or_json(config: Path) -> None:
    argv = ["--config", str(config), "--model_name_or_path", "model"]
    script, args, *_ = grpo.make_parser().parse_args_and_config(argv)
    assert (script.environment, script.environment_args) == ("agile:guess_number", {"level": "easy"})
    assert (args.max_turns, args.advantage_granularity) == (3, "trajectory")
    argv += ["--environment_args", '{"high": 5}', "--max_turns", "2"]
    script, args, *_ = grpo.make_parser().parse_args_and_config(argv)
    assert script.environment_args == {"high": 5} and args.max_turns == 2


def test_grpo_trains_and_saves_an_adapter(config: Path, embedded_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    arguments = ["grpo", "--model_name_or_path", str(embedded_model), "--config", str(config)]
    assert main([*arguments, "--output_dir", str(output), "--save_strategy", "no", "--entropy_coef", "0.1"]) == 0
    base = AutoModelForCausalLM.from_pretrained(embedded_model)
    loaded = PeftModel.from_pretrained(base, output)
    trained = [weight for name, weight in loaded.named_parameters() if "lora_B" in name]
    assert trained and all(torch.count_nonzero(weight) for weight in trained)
    episodes = [json.loads(line) for file in output.glob("rollouts/*.jsonl") for line in file.open()]
    assert len(episodes) == 16 and {episode["prompt"][0]["content"][:35] for episode in episodes} == {
        "Guess the number between 1 and 6. Y"
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max_turnz", "3"], "there is no option --max_turnz; did you mean --max_turns?"),
        (["--max_turnz=3"], "there is no option --max_turnz; did you mean --max_turns?"),
    ],
)
def test_unknown_option_is_refused_with_the_nearest(
    config: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        grpo.main(["--config", str(config), "--model_name_or_path", "model", *options])
    assert message in capsys.readouterr().err


def test_unknown_option_in_the_file_is_refused(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(config.read_text() + "max_tokens_new: 3\n")
    with pytest.raises(SystemExit):
        grpo.main(["--config", str(config), "--model_name_or_path", "model"])
    assert "there is no option --max_tokens_new" in capsys.readouterr().err


def test_missing_model_is_refused(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        grpo.main(["--config", str(config)])
    assert "--model_name_or_path is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"environment_args": "level=easy", "environment": "agile:guess_number"},
            "must be a JSON object.*'level=easy'",
        ),
        ({"environment_args": "[1]", "environment": "agile:guess_number"}, r"must be a mapping.*\[1\]"),
        ({"environment_args": {"level": "easy"}}, "no effect without environment"),
    ],
)
def test_bad_environment_arguments_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grpo.MultiTurnScriptArguments(**options)


def test_reward_functions_by_name_and_by_path() -> None:
    script = grpo.MultiTurnScriptArguments(
        reward_funcs=["accuracy_reward", "trl.rewards.think_format_reward", "get_soft_overlong_punishment"],
        reward_model_name_or_path="model",
    )
    functions = grpo._reward_functions(script)
    assert [getattr(function, "__name__", function) for function in functions] == [
        "model", "accuracy_reward", "think_format_reward", "soft_overlong_punishment_reward",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no reward function 'acuracy_reward'; did you mean 'accuracy_reward'"):
        grpo._reward_functions(grpo.MultiTurnScriptArguments(reward_funcs=["acuracy_reward"]))


def test_launch_hands_each_option_to_whom_it_belongs(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list = []
    monkeypatch.setattr("accelerate.commands.launch.launch_command", launched.append)
    own = ["--config", str(config), "--model_name_or_path", "model", "--max_steps", "2"]
    grpo.main([*own[:4], "--num_processes", "2", *own[4:]])
    (arguments,) = launched
    assert arguments.num_processes == 2 and arguments.module
    assert arguments.training_script == "agile_trainers.cli.grpo"
    assert arguments.training_script_args == own
