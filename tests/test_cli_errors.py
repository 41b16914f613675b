"""Mistakes on the command line: one message that names the value and the way out, exit code 2, no traceback."""

# ruff: noqa: E501 -- one line per mistake
from __future__ import annotations

import errno
import gc
import os
import re
import shutil
import signal
import sys
import time
from dataclasses import fields
from io import FileIO, TextIOWrapper
from pathlib import Path
from typing import Any, TextIO, cast

import forks
import pytest
from accelerate import Accelerator
from installed import skip_without_libraries
from rich.console import Console
from trl import GRPOConfig

from agile_trainers.checkpoints.stopping import TERMINATED, GracefulStop
from agile_trainers.cli import train
from agile_trainers.cli.errors import Progress, guard, is_mistake, message, take_debug
from agile_trainers.cli.main import main
from agile_trainers.cli.run_files import stage_rows
from agile_trainers.cli.yaml_files import YAMLFileError, read_yaml
from agile_trainers.imports import nearest
from agile_trainers.trainers.registry import find_algorithm

GUESS = ["--environment", "agile:guess_number"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, embedded_model: Path) -> Path:
    """Files with something wrong in each."""
    folder = tmp_path_factory.mktemp("mistakes")
    files = {
        "good.yaml": "max_steps: 1\n",
        "twice.yaml": "max_steps: 1\nmax_turns: 2\nmax_steps: 3\n",
        "malformed.yaml": "max_steps: 1\n  max_turns: [\n",
        "empty.yaml": "# nothing\n",
        "list.yaml": "- max_steps\n",
        "words.yaml": "max_turns: many\n",
        "listed.yaml": "max_turns: [1]\n",
        "boolean.yaml": "use_peft: 3\n",
        "unknown.yaml": "max_turnz: 3\n",
        "stages.yaml": "output_dir: out\nmodel: m\nenvironment: agile:guess_number\nstages: []\nstages: []\n",
        "fails_at_start.py": "\n\n1 / 0\n",
        "needs_more.py": "import no_such_library\n",
        "rewards_mine.py": "def brevity(**_): return []\n",
        "a_file": "",
        "rows.jsonl": '{"secret": 3}\n',
    }
    for name, content in files.items():
        (folder / name).write_text(content)
    (folder / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (folder / "nothing_in_it").mkdir()
    shutil.copytree(embedded_model, folder / "model")
    shutil.copytree(embedded_model, folder / "damaged")
    weights = folder / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    return folder


MODEL = ["--model_name_or_path", "model"]
MISTAKES: dict[str, tuple[list[str], str]] = {
    "no command of that name": (["gpro"], r"no command 'gpro'; did you mean .*grpo"),
    "no model": (["grpo"], r"--model_name_or_path is missing: the Hub id or folder"),
    "no environment": (["reinforce", *MODEL], r"--environment is missing"),
    "no teacher": (["distillation", *MODEL, *GUESS], r"Distillation needs a teacher: set teacher to the folder"),
    "no LoRA for ppo": (["ppo", *MODEL, *GUESS], r"--use_peft is missing.*Add --use_peft"),
    "environment misspelt": (["grpo", *MODEL, "--environment", "agile:guess_nmber"], r"'agile:guess_nmber'.*agile:guess_number.*agile-trainers envs"),
    "prefix misspelt": (["grpo", *MODEL, "--environment", "agil:guess_number"], r"'agil:guess_number'.*agile:guess_number"),
    "level": (["grpo", *MODEL, *GUESS, "--environment_args", '{"level": "eazy"}', "--max_steps", "1"], r"eazy.*easy"),
    "argument of the environment": (["grpo", *MODEL, *GUESS, "--environment_args", '{"levle": "easy"}'], r"levle.*signature is .*level"),
    "arguments that are no JSON": (["grpo", *MODEL, *GUESS, "--environment_args", "level=easy"], r"JSON object such as.*10 characters that are none: .*line 1"),
    "arguments without environment": (["grpo", *MODEL, "--environment_args", "{}", "--max_turns", "3"], r"max_turns.*environment"),
    "module fails": (["grpo", *MODEL, "--environment", "fails_at_start:It"], r"fails_at_start.*ZeroDivisionError.*line 3"),
    "module lacks a library": (["grpo", *MODEL, "--environment", "needs_more:It"], r"no_such_library.*Install"),
    "no such module": (["grpo", *MODEL, "--environment", "no_such_module:It"], r"no_such_module.*no module"),
    "no such name in a module": (["grpo", *MODEL, "--environment", "agile_environments.guess_number:GuessNumbr"], r"GuessNumbr.*did you mean GuessNumber"),
    "model folder": (["grpo", *GUESS, "--model_name_or_path", "./modle"], r"'./modle'; did you mean model\?"),
    "model id": (["grpo", *GUESS, "--model_name_or_path", "Qwen/no-such-model"], r"'Qwen/no-such-model'.*Expected a folder"),
    "model is a file": (["grpo", *GUESS, "--model_name_or_path", "a_file"], r"'a_file' is a file.*Expected a folder"),
    "model folder without model": (["grpo", *GUESS, "--model_name_or_path", "nothing_in_it"], r"nothing_in_it holds neither.*config.json"),
    "weights damaged": (["grpo", *GUESS, "--model_name_or_path", "damaged", "--max_steps", "1"], r"'damaged'.*weights.*[Dd]ownload|copy"),
    "output_dir below a file": (["grpo", *MODEL, *GUESS, "--output_dir", "a_file/run"], r"output_dir='a_file/run'.*choose"),
    "output_dir not writable": (["grpo", *MODEL, *GUESS, "--output_dir", "/proc/run"], r"output_dir='/proc/run'.*[Cc](heck|hoose)"),
    "option misspelt": (["grpo", *MODEL, "--max_turnz", "3"], r"no option --max_turnz; did you mean --max_turns"),
    "no number": (["grpo", *MODEL, "--max_turns", "many"], r"--max_turns.*int.*'many'"),
    "number out of range": (["grpo", *MODEL, *GUESS, "--gamma", "2"], r"gamma.*\[0, 1\], got 2"),
    "no choice": (["grpo", *MODEL, *GUESS, "--lr_scheduler_type", "cosin"], r"cosin.*cosine"),
    "left over": (["grpo", *MODEL, *GUESS, "--max_steps", "1", "stray"], r"'stray' belongs to no option"),
    "no steps": (["grpo", *MODEL, *GUESS], r"max_steps must say how long"),
    "batch against group": (["grpo", *MODEL, *GUESS, "--max_steps", "1", "--num_generations", "3", "--generation_batch_size", "8"], r"divisible"),
    "configuration misspelt": (["grpo", *MODEL, "--config", "god.yaml"], r"no file god.yaml; did you mean good.yaml"),
    "configuration is a folder": (["grpo", *MODEL, "--config", "model"], r"model cannot be read.*YAML file"),
    "configuration without a name": (["grpo", *MODEL, "--config"], r"--config: the name of a YAML file is missing"),
    "configuration malformed": (["grpo", *MODEL, "--config", "malformed.yaml"], r"malformed.yaml, line 2.*not YAML.*Expected"),
    "configuration empty": (["grpo", *MODEL, "--config=empty.yaml"], r"empty.yaml holds nothing.*Expected"),
    "configuration a list": (["grpo", *MODEL, "--config", "list.yaml"], r"list.yaml holds a list.*Expected"),
    "configuration binary": (["grpo", *MODEL, "--config", "binary.yaml"], r"binary.yaml: a value cannot be read.*UTF-8"),
    "configuration twice": (["grpo", *MODEL, "--config", "twice.yaml"], r"'max_steps' is given twice, in lines 1 and 3"),
    "two configurations": (["grpo", *MODEL, "--config", "good.yaml", "--config", "twice.yaml"], r"--config is given twice"),
    "word for a number": (["grpo", *MODEL, "--config", "words.yaml"], r"max_turns.*int.*'many'"),
    "list for a number": (["grpo", *MODEL, "--config", "listed.yaml"], r"max_turns must be a whole number, got \[1\]"),
    "number for a switch": (["grpo", *MODEL, "--config", "boolean.yaml"], r"use_peft must be true or false, got 3"),
    "unknown in the file": (["grpo", *MODEL, "--config", "unknown.yaml"], r"no option --max_turnz; did you mean --max_turns"),
    "data set": (["grpo", *MODEL, *GUESS, "--dataset_name", "./no_rows"], r"'./no_rows' cannot be loaded.*Expected"),
    "reward function": (["grpo", *MODEL, *GUESS, "--max_steps", "1", "--reward_funcs", "acuracy_reward"], r"'acuracy_reward'; did you mean accuracy_reward"),
    "reward function in a module": (["grpo", *MODEL, *GUESS, "--max_steps", "1", "--reward_funcs", "rewards_mine.brevit"], r"brevit'; did you mean brevity"),
    "modules of LoRA": (["grpo", *MODEL, *GUESS, "--max_steps", "1", "--use_peft", "--lora_target_modules", "q_prj"], r"q_prj"),
    "checkpoint": (["grpo", *MODEL, *GUESS, "--max_steps", "1", "--resume_from_checkpoint", "no_checkpoint"], r"no_checkpoint"),
    "vLLM not installed": (["grpo", *MODEL, *GUESS, "--max_steps", "1", "--use_vllm"], r"pip install 'agile-trainers\[vllm\]'"),
    "launch configuration": (["grpo", *MODEL, *GUESS, "--accelerate_config", "zero9"], r"zero9"),
    "number of processes": (["grpo", *MODEL, *GUESS, "--num_processes", "two"], r"num_processes.*int.*'two'"),
    "environment of check": (["check", "--environment", "agile:guess_nmber"], r"agile:guess_number.*agile-trainers envs"),
    "no environment to check": (["check"], r"--environment is missing"),
    "option of check": (["check", *GUESS, "--epizodes", "3"], r"--epizodes; did you mean --episodes"),
    "configuration of check": (["check", *GUESS, "--config", "twice.yaml"], r"'max_steps' is given twice"),
    "environment of eval": (["eval", "model", "--environment", "agile:guess_nmber"], r"agile:guess_number.*agile-trainers envs"),
    "eval without environment": (["eval", "model"], r"MODEL and --environment ID are required, or MODEL and --panel FILE"),
    "environment of eval twice": (["eval", "model", *GUESS, "agile:guess_number"], r"'agile:guess_number' twice"),
    "model of eval": (["eval", "./modle", *GUESS], r"MODEL='./modle'; did you mean model\?"),
    "model that eval compares with": (["eval", "model", *GUESS, "--against", "./modle"], r"--against='./modle'; did you mean model\?"),
    "weights of eval damaged": (["eval", "damaged", *GUESS, "--episodes", "1"], r"damaged cannot be loaded.*copy or download"),
    "episodes of eval": (["eval", "model", *GUESS, "--episodes", "0"], r"--episodes.*at least 1, got 0"),
    "limit of eval": (["eval", "model", *GUESS, "--max_turns", "0"], r"max_turns must be at least 1, got 0"),
    "option of eval": (["eval", "model", *GUESS, "--epizodes", "3"], r"--epizodes; did you mean --episodes"),
    "eval on vLLM": (["eval", "model", *GUESS, "--use_vllm"], r"pip install 'agile-trainers\[vllm\]'"),
    "eval on a device of vLLM": (["eval", "model", *GUESS, "--use_vllm", "--device", "cpu"], r"--device has no effect with --use_vllm"),
    "eval without vLLM": (["eval", "model", *GUESS, "--vllm_model_impl", "auto"], r"--vllm_model_impl has no effect without --use_vllm"),
    "limits of eval by name": (["eval", "model", *GUESS, "--environment_limits", '{"gess": {"max_turns": 1}}'], r"--environment_limits.*agile:guess_number.*'gess'"),
    "arguments of eval": (["eval", "model", *GUESS, "--environment_args", "easy"], r"'easy' is not JSON"),
    "temperature of eval": (["eval", "model", *GUESS, "--temperature", "0"], r"temperature.*0.*greedy"),
    "attempts without noise": (["eval", "model", *GUESS, "--greedy", "--attempts", "2"], r"--attempts has no effect with --greedy"),
    "metric of eval": (["eval", "model", *GUESS, "--metric", "acuracy_of"], r"no metric 'acuracy_of'.*answer_match"),
    "rows of eval": (["eval", "model", *GUESS, "--dataset_name", "./no_rows"], r"--dataset_name='./no_rows' cannot be loaded.*Expected"),
    "rows of several environments": (["eval", "model", *GUESS, "agile:countdown", "--dataset_name", "rows.jsonl"], r"no column 'environment'"),
    "split of eval": (["eval", "model", *GUESS, "--dataset_name", "rows.jsonl", "--dataset_test_split", "tset"], r"--dataset_test_split='tset'.*'train'"),
    "output of eval": (["eval", "model", *GUESS, "--output_dir", "a_file/run"], r"output_dir='a_file/run'.*choose"),
    "environment of play": (["play", "--environment", "agile:guess_nmber"], r"agile:guess_number.*agile-trainers envs"),
    "model of play": (["play", *GUESS, "--model", "./modle"], r"'./modle'; did you mean model"),
    "no pipeline": (["chain", "stagse.yaml"], r"no file stagse.yaml; did you mean stages.yaml"),
    "pipeline twice": (["chain", "stages.yaml"], r"'stages' is given twice, in lines 4 and 5"),
    "pipeline empty": (["chain", "empty.yaml"], r"empty.yaml holds nothing"),
    "folder of the demo": (["demo", "--quick", "--output_dir", "a_file/demo"], r"output_dir='a_file/demo'.*choose"),
    "option of env": (["env", "--jsn"], r"--jsn"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_message_with_the_way_out(
    mistake: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv, expected = MISTAKES[mistake]
    skip_without_libraries(" ".join(argv))
    monkeypatch.chdir(folder)
    try:
        code = main(argv)
    except SystemExit as stop:  # argparse's
        code = stop.code  # type: ignore[assignment]
    out, err = capsys.readouterr()
    said = err if argv[0] not in ("check",) or code == 2 else out
    assert code == (1 if argv[:2] == ["check", "--environment"] and "nmber" in argv[2] else 2)
    assert re.search(expected, " ".join(said.split()), re.DOTALL), said
    assert "Traceback" not in said and 'File "' not in said
    assert mistake == "no command of that name" or len(said.strip().splitlines()) <= 12, said


def test_a_real_process_prints_no_traceback_without_debug(folder: Path) -> None:
    done = forks.run(["-m", "agile_trainers.cli.main", *MISTAKES["environment misspelt"][0]], cwd=folder)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and "agile-trainers envs" in done.stderr


@pytest.mark.parametrize("mistake", ["number out of range", "pipeline twice", "model of play"])
def test_debug_raises_what_is_said_otherwise(mistake: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    argv, expected = MISTAKES[mistake]
    with pytest.raises(ValueError, match=expected):
        main([*argv, "--debug"])


@pytest.mark.launch
def test_processes_that_accelerate_starts_say_a_mistake_once_each(folder: Path) -> None:
    """What only they find out: here, that nothing says how long to train."""
    command = ["-m", "agile_trainers.cli.main", "grpo", *MODEL, *GUESS, "--num_processes", "1", "--cpu"]
    done = forks.run(command, cwd=folder)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.count("max_steps must say how long to train") == 1


def test_a_bare_command_speaks_of_the_model_and_not_of_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["grpo"])
    said = capsys.readouterr().err
    assert "--model_name_or_path is missing" in said and "bf16" not in said


class Crashes:
    """Goes wrong once training has begun: nothing the user gave."""

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        return "Say yes.", {}

    def step(self, action: str) -> Any:
        return "", float(len(action)), True, False, {}


def test_a_crash_in_training_keeps_its_traceback_and_the_cpu_is_announced(
    embedded_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def crash(*_: Any, **__: Any) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    trainer = find_algorithm("grpo")
    monkeypatch.setattr(trainer, "_generate_and_score_completions", crash)
    argv = [
        "grpo",
        "--model_name_or_path",
        str(embedded_model),
        "--environment",
        f"{__name__}:Crashes",
        "--max_steps",
        "1",
    ]
    with pytest.raises(ValueError, match="a bug"):
        main([*argv, "--output_dir", str(tmp_path), "--report_to", "none"])
    assert Progress.training and "There is no GPU: training runs on the CPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "training", "mistake", "said"),
    [
        (ValueError("x must be 1, got 2."), False, True, "x must be 1, got 2."),
        (ValueError("x"), True, False, "x"),
        (KeyError("x"), False, False, "'x'"),
        (RuntimeError("shape"), False, False, "shape"),
        (TypeError("f() takes 1"), False, True, "TypeError: f() takes 1"),
        (PermissionError(13, "Permission denied", "/a/b"), False, True, "/a/b: Permission denied. Choose a path"),
        (OSError(28, "No space left on device", "/a/b"), True, True, "/a/b: No space left on device. Free some space"),
        (OSError(5, "Input/output error", "/a/b"), True, False, "/a/b: Input/output error."),
        (ModuleNotFoundError("No module named 'gem'", name="gem"), False, True, "Install the package that 'gem'"),
    ],
)
def test_mistakes_and_crashes(
    error: Exception, training: bool, mistake: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Progress, "training", training)
    assert is_mistake(error) is mistake
    assert message(error).startswith(said) or said in message(error)


@pytest.mark.parametrize(("code", "status"), [(0, 1), (None, 1), (3, 3), ("over", 1)])
def test_code_that_exits_in_training_ends_the_command_with_a_message_and_no_success(
    code: Any, status: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Progress, "training", False)

    def train() -> None:
        Progress.training = True
        sys.exit(code)

    assert guard("grpo", train, debug=False) == status
    said = capsys.readouterr().err
    assert f"training was ended by SystemExit: {code}" in said and Path(__file__).name in said


def test_sigterm_with_an_error_after_it_is_no_exit_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Progress, "training", False)

    def train() -> None:
        Progress.training = True
        raise SystemExit(TERMINATED) from RuntimeError("the server is gone")

    with pytest.raises(SystemExit) as stop:
        guard("grpo", train, debug=False)
    assert stop.value.code == 143


class Collected:
    """Gets a signal while it is collected, where Python drops what the handler raises."""

    def __init__(self, number: int) -> None:
        self.number, self.itself = number, self

    def __del__(self) -> None:
        signal.raise_signal(self.number)


@pytest.mark.parametrize(
    ("number", "status", "said"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, r"terminated \(SIGTERM\)"),
        (signal.SIGHUP, 129, r"hung up \(SIGHUP\)"),
    ],
)
@pytest.mark.parametrize("collected", [True, False])
def test_a_signal_ends_a_command_wherever_it_falls(
    number: int, status: int, said: str, collected: bool, capsys: pytest.CaptureFixture[str], hears_hangups: None
) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP), sys.unraisablehook

    def run() -> None:
        if collected:
            Collected(number)
            gc.collect()
        else:
            signal.raise_signal(number)
        for _ in range(300):
            time.sleep(0.1)

    assert guard("chain", run, debug=False) == status
    assert re.fullmatch(rf"\nagile-trainers: {said}, running the same again goes on\n", capsys.readouterr().err)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP), sys.unraisablehook) == before


def test_a_command_under_nohup_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert guard("eval", lambda: signal.raise_signal(signal.SIGHUP), debug=False) == 0
        with GracefulStop(Accelerator()).heard():
            signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_number_of_processes_that_is_empty_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "")
    assert guard("envs", lambda: signal.raise_signal(signal.SIGTERM), debug=False) == 143


def test_a_fork_of_a_command_ends_by_sigterm_as_any_process() -> None:
    def run() -> int:
        child = os.fork()
        if child == 0:
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                os._exit(3)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert guard("eval", run, debug=False) == -signal.SIGTERM


def test_before_training_an_exit_keeps_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Progress, "training", True)  # of an earlier command
    with pytest.raises(SystemExit) as stop:
        guard("grpo", lambda: sys.exit(0), debug=False)
    assert stop.value.code == 0


def exiting_rows() -> Any:
    sys.exit(0)


def test_a_function_of_rows_that_exits_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"data set's function '.*:exiting_rows' raised SystemExit: 0"):
        stage_rows(f"{__name__}:exiting_rows", {})


def test_debug_is_ours_unless_it_has_a_value_of_the_trainers() -> None:
    assert take_debug(["a", "--debug", "--b"]) == (True, ["a", "--b"])
    assert take_debug(["--debug", "underflow_overflow"]) == (False, ["--debug", "underflow_overflow"])
    assert nearest("max_turn", ["max_turns", "beta"]) == "; did you mean max_turns?" and nearest("zzz", ["a"]) == ""


def test_equal_keys_are_refused_at_any_depth_and_merged_ones_are_not(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text("a: &a {x: 1, y: 2}\nb:\n  <<: *a\n  x: 3\n")
    assert read_yaml(path) == {"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 2}}
    path.write_text("stages:\n- name: one\n  beta: 1\n  beta: 2\n")
    with pytest.raises(YAMLFileError, match=r"'beta'.* 3 .* 4"):
        read_yaml(path)


def test_help_shows_our_options_first_and_all_of_them_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    pages = []
    for option in ("--help", "--help_all"):
        with pytest.raises(SystemExit) as stop:
            main(["grpo", option])
        assert stop.value.code == 0
        pages.append(capsys.readouterr().out)
    brief, whole = pages
    assert brief.index("--environment ") < brief.index("--max_turns ") < brief.index("--learning_rate ")
    assert "--adafactor" not in brief and "--optim_target_modules" not in brief and "--optim_target_modules" in whole
    own = {one.name for one in fields(train.MultiTurnConfig)} - {one.name for one in fields(GRPOConfig)}
    assert all(f"--{name} " in brief for name in own)
    options = train.make_parser("grpo")._option_string_actions
    assert all(name in whole for name in options if name.startswith("--") and "-" not in name[2:] and "no_" not in name)
    assert "](" not in whole, "a terminal opens no link"
    assert len(brief.splitlines()) < 280 and max(map(len, brief.splitlines())) <= 110


SMALL_DISK = """
import ctypes, os, runpy, subprocess, sys

disk, size, *sys.argv = sys.argv[1:]
NEWNS, NEWUSER = 0x20000, 0x10000000
user, group = os.getuid(), os.getgid()
if sys.platform != "linux" or ctypes.CDLL(None).unshare(NEWUSER | NEWNS):
    sys.exit(100)
for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
    open(f"/proc/self/{name}", "w").write(text)
if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], capture_output=True).returncode:
    sys.exit(100)
runpy.run_module("agile_trainers.cli.main", run_name="__main__")
"""
"""A command on a disk that holds so much, mounted for this process alone; 100 where nothing can be mounted."""


def unread(monkeypatch: pytest.MonkeyPatch) -> TextIO:
    """Make standard output a pipe whose reader has gone, written at once as with PYTHONUNBUFFERED."""
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w", buffering=1)
    monkeypatch.setattr(sys, "stdout", stream)
    return stream


def test_a_reader_that_goes_ends_a_command_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `agile-trainers --help | head -1` does; a broken pipe to anything else is an error as before."""
    with unread(monkeypatch):
        assert main(["--help"]) == 141
        print("written to nothing")
    assert capsys.readouterr().err == ""

    def breaks() -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    assert guard("eval", breaks, debug=False) == 2 and "Broken pipe" in capsys.readouterr().err


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("lost", ["pipe", "terminal"])
@pytest.mark.parametrize(("name", "status"), [("stdout", 141), ("stderr", 0)])
def test_what_prints_outlives_its_reader(
    name: str, status: int, lost: str, buffered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment's print failed, which counted against the policy: a chain kept the scores of the episodes that were left."""
    reader, writer = os.pipe() if lost == "pipe" else os.openpty()
    # Without a buffer, as Python writes with PYTHONUNBUFFERED.
    stream = os.fdopen(writer, "w") if buffered else TextIOWrapper(cast(Any, FileIO(writer, "w")), write_through=True)
    monkeypatch.setattr(sys, name, stream)
    done = []

    def run() -> None:
        Progress.training = True
        os.close(reader)
        print("reset", file=stream, flush=True)
        Console(file=stream).print("step 1")  # rich exits where a pipe is broken
        done.append("evaluated")

    assert guard("chain", run, debug=False) == status and done
    with stream:
        print("goes nowhere", file=stream, flush=True)


def test_an_exit_beside_a_pipe_that_broke_keeps_its_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a reward function's helper process, which SIGTERM ends too; the output may have lost its reader by then."""

    def train(code: int) -> None:
        Progress.training = True
        try:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        except BrokenPipeError as error:
            raise SystemExit(code) from error

    assert guard("grpo", lambda: train(3), debug=False) == 3
    said = capsys.readouterr().err
    assert "training was ended by SystemExit: 3" in said and "nothing reads" not in said
    for stream in (sys.stdout, unread(monkeypatch)):
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit) as stop:
            guard("grpo", lambda: train(TERMINATED), debug=False)
        assert stop.value.code == TERMINATED and "nothing reads" not in capsys.readouterr().err
    with stream:
        print("written to nothing")  # as Python does at its end, with exit code 120 if it fails


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_command_whose_output_is_closed_is_done(closed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by `>&-`, and by some service managers: a finished run failed at its end."""

    def mistaken() -> None:
        raise ValueError("x must be 1")

    for run in (lambda: print("all is well"), mistaken):
        monkeypatch.setattr(sys, closed, None)
        assert guard("grpo", run, debug=False) == (2 if run is mistaken else 0)
        getattr(sys, closed).close()


@pytest.mark.parametrize(
    "size", ["600k", pytest.param("2m", marks=pytest.mark.slow)], ids=["the model", "the optimizer"]
)
def test_a_full_disk_is_named_with_the_way_out(size: str, folder: Path, tmp_path: Path) -> None:
    """On a disk that holds so much, in a mount namespace of the process's own. What safetensors and PyTorch say differs."""
    options = {
        "model_name_or_path": "model", "environment": "agile:guess_number", "max_steps": 1, "max_turns": 1,
        "max_new_tokens": 2, "save_steps": 1, "num_generations": 2, "per_device_train_batch_size": 2,
        "generation_batch_size": 2, "report_to": "none", "output_dir": tmp_path / "run",
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    done = forks.run(["-c", SMALL_DISK, tmp_path, size, "agile-trainers", "grpo", *words], cwd=folder)
    if done.returncode == 100:
        pytest.skip("nothing can be mounted here")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert f"{tmp_path / 'run'}" in done.stderr and "No space left on device. Free some space" in done.stderr
    assert "--resume_from_checkpoint auto" in done.stderr
