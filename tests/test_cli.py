"""The command line: what it lists, how it parses, what it refuses, and a real run of each command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import forks
import pytest
import torch
import trl
import yaml
from datasets import Dataset
from peft import PeftModel
from recorded import recorded
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from trl import DatasetMixtureConfig, GRPOConfig
from trl.scripts.grpo import make_parser as make_trl_parser

from agile_trainers.cli import launch_configs, train
from agile_trainers.cli.launch_configs import FOLDER
from agile_trainers.cli.main import COMMANDS, OWN_MODULES, main
from agile_trainers.trainers.registry import ALGORITHMS, find_algorithm

TRLS = Path(trl.__file__).parent / "accelerate_configs"
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
gradient_accumulation_steps: 1
max_steps: 2
learning_rate: 1.0e-2
report_to: none
disable_tqdm: true
use_cpu: true
bf16: false
use_peft: true
lora_target_modules: all-linear
"""
ON_CPU = ["--use_cpu", "--bf16", "false"]


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
    argv += ["--vllm_importance_sampling_mode", "token_mask", "--vllm_importance_sampling_correction", "true"]
    script, args, model, _ = train.make_parser("grpo").parse_args_and_config(argv)
    trl_script, trl_args, trl_model, _ = make_trl_parser().parse_args_and_config(argv)
    assert (args.max_steps, args.beta, args.learning_rate) == (5, 0.1, 1e-2)
    args = args.without_environment()  # with one, two defaults differ: tests/trainers/test_batch_defaults.py
    for name in GRPOConfig.__dataclass_fields__:
        assert getattr(args, name) == getattr(trl_args, name), name
    assert model == trl_model
    assert {name: getattr(script, name) for name in vars(trl_script)} == vars(trl_script)


def test_environment_arguments_come_from_yaml_or_json(config: Path) -> None:
    argv = ["--config", str(config), "--model_name_or_path", "model"]
    script, args, *_ = train.make_parser("grpo").parse_args_and_config(argv)
    assert (script.environment, script.environment_args) == ("agile:guess_number", {"level": "easy"})
    assert (args.max_turns, args.advantage_granularity) == (3, "trajectory")
    argv += ["--environment_args", '{"high": 5}', "--max_turns", "2"]
    script, args, *_ = train.make_parser("grpo").parse_args_and_config(argv)
    assert script.environment_args == {"high": 5} and args.max_turns == 2


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_each_algorithm_has_its_own_options_and_defaults(algorithm: str) -> None:
    config = find_algorithm(algorithm).config_class
    _, args, *_ = train.make_parser(algorithm).parse_args_and_config([*ON_CPU, "--model_name_or_path", "model"])
    expected = config(output_dir=args.output_dir, use_cpu=True, bf16=False)
    assert type(args) is config
    different = {name for name in config.__dataclass_fields__ if getattr(args, name) != getattr(expected, name)}
    assert different <= {"accelerator_config"}  # compares by identity


def test_commands_and_algorithms_agree() -> None:
    assert {*OWN_MODULES, *ALGORITHMS} == set(COMMANDS)
    for algorithm in ALGORITHMS:
        trainer = find_algorithm(algorithm)
        name = "Distillation" if algorithm == "distillation" else algorithm.upper()
        assert (trainer.__name__, trainer.config_class.__name__) == (
            f"MultiTurn{name}Trainer",
            f"MultiTurn{name}Config",
        )


def test_ppo_trains_and_saves_policy_and_critic(config: Path, embedded_model: Path, tmp_path: Path) -> None:
    config.write_text(CONFIG.replace("trajectory", "turn") + SHARED.replace("num_generations: 4\n", ""))
    output = tmp_path / "run"
    arguments = ["ppo", "--model_name_or_path", str(embedded_model), "--config", str(config)]
    assert main([*arguments, "--output_dir", str(output), "--save_strategy", "no", "--gae_lambda", "0.9"]) == 0
    base = AutoModelForCausalLM.from_pretrained(embedded_model)
    policy = PeftModel.from_pretrained(base, output)
    trained = [weight for name, weight in policy.named_parameters() if "lora_B" in name]
    assert trained and all(torch.count_nonzero(weight) for weight in trained)
    head = {k: v for k, v in load_file(output / "critic" / "adapter_model.safetensors").items() if "value_head" in k}
    assert head and all(torch.count_nonzero(weight) for weight in head.values())


@pytest.mark.parametrize(
    ("algorithm", "options", "message"),
    [
        ("ppo", ["--environment", "agile:guess_number"], "--use_peft is missing: ppo .* Add --use_peft"),
        ("ppo", ["--use_peft"], "--environment is missing: ppo"),
        ("reinforce", [], "--environment is missing: reinforce"),
        (
            "reinforce",
            ["--environment", "agile:guess_number", "--num_generations", "4"],
            "num_generations=4 has no effect",
        ),
        ("gspo", ["--importance_sampling_level", "token"], "must be one of 'sequence', 'turn', got 'token'"),
        ("grpo", ["--gae_lambda", "0.9"], "there is no option --gae_lambda"),
    ],
)
def test_what_an_algorithm_needs_is_said_in_the_words_of_the_command_line(
    algorithm: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert main([algorithm, "--model_name_or_path", "model", *ON_CPU, *options]) == 2
    except SystemExit as stop:
        assert stop.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_grpo_trains_and_saves_an_adapter(
    config: Path, embedded_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    arguments = ["grpo", "--model_name_or_path", str(embedded_model), "--config", str(config)]
    assert (
        main(
            [
                *arguments,
                "--output_dir",
                str(output),
                "--save_strategy",
                "no",
                "--entropy_coef",
                "0.1",
                "--logging_steps",
                "1",
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    header, *rows = [line.split() for line in printed.splitlines() if "entropy" in line or "/2 " in line]
    assert header == ["step", "time", "success", "return", "turns", "length", "entropy"]
    assert [row[0] for row in rows] == ["1/2", "2/2"] and "grad_norm" not in printed
    base = AutoModelForCausalLM.from_pretrained(embedded_model)
    loaded = PeftModel.from_pretrained(base, output)
    trained = [weight for name, weight in loaded.named_parameters() if "lora_B" in name]
    assert trained and all(torch.count_nonzero(weight) for weight in trained)
    episodes = recorded(output)
    assert len(episodes) == 8 and {episode["prompt"][0]["content"][:35] for episode in episodes} == {
        "Guess the number between 1 and 6. Y"
    }


SEVERAL = {"guess": "agile:guess_number", "other": "agile:guess_number"}


def test_several_environments_come_from_yaml_or_json(embedded_model: Path, tmp_path: Path) -> None:
    options = {
        "environment": SEVERAL, "environment_args": {"guess": {"level": "easy"}},
        "environment_limits": {"guess": {"max_turns": 2}, "other": {"max_turns": 1}},
        "max_new_tokens": 2,
    }  # fmt: skip
    path = tmp_path / "several.yaml"
    path.write_text(SHARED + yaml.safe_dump(options), encoding="utf-8")
    on_command_line = [word for name, value in options.items() for word in (f"--{name}", json.dumps(value))]
    model = ["--model_name_or_path", str(embedded_model)]
    (tmp_path / "shared.yaml").write_text(SHARED, encoding="utf-8")
    ways = (["--config", str(path)], ["--config", str(tmp_path / "shared.yaml"), *on_command_line])
    parsed = [train.make_parser("grpo").parse_args_and_config([*model, *way]) for way in ways]
    for script, args, *_ in parsed:
        assert (script.environment, script.environment_args) == (SEVERAL, options["environment_args"])
        assert args.environment_limits == options["environment_limits"]
    output = ["--output_dir", str(tmp_path / "run"), "--save_strategy", "no", "--max_steps", "1"]
    assert main(["grpo", *model, *ways[1], *output]) == 0
    episodes = recorded(tmp_path / "run")
    for name, highest, turns in (("guess", 6, 2), ("other", 12, 1)):
        own = [episode for episode in episodes if episode["environment"] == name]
        assert len(own) == 4 and all(len(episode["turns"]) <= turns for episode in own)
        assert all(f"between 1 and {highest}." in episode["prompt"][0]["content"] for episode in own)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max_turnz", "3"], "there is no option --max_turnz; did you mean --max_turns?"),
        (["--max_turnz=3"], "there is no option --max_turnz; did you mean --max_turns?"),
        (["--max_turn", "3"], "there is no option --max_turn; did you mean --max_turns?"),
    ],
)
def test_unknown_option_is_refused_with_the_nearest(
    config: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        train.main(["grpo", "--config", str(config), "--model_name_or_path", "model", *options])
    assert message in capsys.readouterr().err


def test_unknown_option_in_the_file_is_refused(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(config.read_text() + "max_tokens_new: 3\n")
    with pytest.raises(SystemExit):
        train.main(["grpo", "--config", str(config), "--model_name_or_path", "model"])
    assert "there is no option --max_tokens_new" in capsys.readouterr().err


def test_missing_model_is_refused(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.main(["grpo", "--config", str(config)])
    assert "--model_name_or_path is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"environment_args": "level=easy", "environment": "agile:guess_number"},
            "must be a JSON object.*got 10 characters that are none: Expecting value",
        ),
        (
            {"environment_args": "[1]", "environment": "agile:guess_number"},
            "must be a mapping of names to values, got a list",
        ),
        ({"environment_args": '{"a": {"x": 1, "x": 2}}', "environment": "e"}, "the name 'x' occurs twice"),
        ({"environment": '{"a": "e", "a": "f"}'}, "the name 'a' occurs twice"),
        ({"environment_args": {"level": "easy"}}, "no effect without environment"),
        ({"environment": '{"guess": '}, "environment must be an id, or a JSON object of ids by name"),
    ],
)
def test_bad_environment_arguments_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train.MultiTurnScriptArguments(**options)


def test_progress_is_a_table_or_that_of_transformers() -> None:
    with pytest.raises(ValueError, match=r"progress.*'table', 'wide' or 'dicts'.*'bar'"):
        train.MultiTurnScriptArguments(progress="bar")


def test_reward_functions_by_name_and_by_path() -> None:
    script = train.MultiTurnScriptArguments(
        reward_funcs=["accuracy_reward", "trl.rewards:think_format_reward", "get_soft_overlong_punishment"],
        reward_model_name_or_path="model",
    )
    functions = train.reward_functions(script)
    assert [getattr(function, "__name__", function) for function in functions] == [
        "model", "accuracy_reward", "think_format_reward", "soft_overlong_punishment_reward",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"'acuracy_reward'.*accuracy_reward"):
        train.reward_functions(train.MultiTurnScriptArguments(reward_funcs=["acuracy_reward"]))


def test_launch_hands_each_option_to_whom_it_belongs(
    config: Path, embedded_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list = []
    monkeypatch.setattr("accelerate.commands.launch.launch_command", launched.append)
    own = ["--config", str(config), "--model_name_or_path", str(embedded_model), "--max_steps", "2"]
    train.main(["grpo", *own[:4], "--num_processes", "2", *own[4:]])
    (arguments,) = launched
    assert arguments.num_processes == 2 and arguments.module
    assert arguments.training_script == "agile_trainers.cli.train"
    assert arguments.training_script_args == ["grpo", *own]


LAUNCHES = """
import os, sys
from accelerate.commands.launch import launch_command_parser
from agile_trainers.cli.train import start

os.environ["LAUNCHER"] = str(os.getpid())
start(launch_command_parser().parse_args(["--cpu", *sys.argv[1:]]))
"""
STOPS = """
import os, signal, sys, time

signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
os.kill(int(os.environ["LAUNCHER"]), signal.SIGTERM)
time.sleep(20)
"""


def test_a_signal_to_a_launch_of_one_process_reaches_the_training(tmp_path: Path) -> None:
    (tmp_path / "stops.py").write_text(STOPS, encoding="utf-8")
    assert forks.run(["-c", LAUNCHES, tmp_path / "stops.py"]).returncode == 143


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--accelerate_config zero2", [f"{FOLDER}/zero2.yaml"]),
        ("--accelerate_config=cpu/ddp --num_processes 3", [f"{FOLDER}/cpu/ddp.yaml", "--num_processes", "3"]),
        ("--accelerate_config accelerate_configs/ddp.yaml", ["accelerate_configs/ddp.yaml"]),
        ("--num_processes 3 --accelerate_config multi_gpu", [f"{TRLS}/multi_gpu.yaml", "--num_processes", "3"]),
    ],
)
def test_a_launch_configuration_is_a_file_or_a_name(monkeypatch, options: str, expected: list[str]) -> None:
    monkeypatch.chdir(FOLDER.parent)
    assert launch_configs.resolve(options.split()) == ["--config_file", *expected]


def test_a_launch_configuration_that_is_not_yaml_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER.parent)
    with pytest.raises(ValueError, match=r"pyproject\.toml"):
        launch_configs.resolve(["--accelerate_config", "pyproject.toml"])


def test_the_file_that_a_launch_configuration_names_is_found_from_anywhere(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = launch_configs.resolve(["--accelerate_config", "cpu/zero3"])
    named = ["--deepspeed_config_file", f"{FOLDER}/cpu/zero3.json"]
    assert found == ["--config_file", f"{FOLDER}/cpu/zero3.yaml", *named]
    (tmp_path / "own.yaml").write_text("deepspeed_config: {deepspeed_config_file: own.json}")
    assert launch_configs.resolve(["--accelerate_config", "own.yaml"]) == ["--config_file", "own.yaml"]


@pytest.mark.parametrize(("name", "nearest"), [("zero22", "did you mean zero2?"), ("megatron", "megatron")])
def test_a_launch_configuration_that_is_none_ends_the_command(capsys, name: str, nearest: str) -> None:
    with pytest.raises(SystemExit) as stop:
        train.main(["grpo", "--accelerate_config", name, "--model_name_or_path", "model"])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and f"--accelerate_config {name}" in said and nearest in said
    assert all(ours in said for ours in ("ddp", "fsdp2", "single", "zero1", "zero2", "zero3", "cpu/zero3"))


def test_a_data_set_may_be_a_file_or_a_saved_folder(tmp_path: Path) -> None:
    rows = [{"secret": 1}, {"secret": 2}]
    Dataset.from_list(rows).to_json(tmp_path / "rows.jsonl")
    Dataset.from_list(rows).save_to_disk(tmp_path / "rows")
    for name in ("rows.jsonl", "rows"):
        script = train.MultiTurnScriptArguments(dataset_name=str(tmp_path / name))
        found = train.script_dataset(script, DatasetMixtureConfig())
        assert train.split_of_dataset(found, "train").to_list() == rows
    with pytest.raises(ValueError, match=r"dataset_name='gone\.jsonl'"):
        train.script_dataset(train.MultiTurnScriptArguments(dataset_name="gone.jsonl"), DatasetMixtureConfig())
