"""Files of options that somebody else may have written: bounded in size, depth and time; errors name the place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from trl import GRPOConfig

from agile_trainers.cli.errors import cut
from agile_trainers.cli.launch_configs import resolve
from agile_trainers.cli.main import main
from agile_trainers.cli.parser import Parser
from agile_trainers.cli.yaml_files import YAMLFileError, read_yaml


def aliases(levels: int, line: str) -> str:
    return "\n".join(
        ["a0: &a0 [lol, lol]", *(f"a{n}: &a{n} " + line.replace("*", f"*a{n - 1}") for n in range(1, levels))]
    )


BOMB = aliases(9, "[*, *, *, *, *, *, *, *, *]")
"""86 million values in 400 bytes."""
REFUSED = {
    "a bomb of aliases": (BOMB, r"line 6: with its aliases written out, this holds 184,528 values"),
    "a bomb of merged maps": (
        "a0: &a0 {x: 1}\n" + "\n".join(f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)),
        "written out",
    ),
    "a chain of aliases": (aliases(2000, "[*]"), "line 50.* 51 levels"),
    "a list that holds itself": ("a: &a [*a]", "line 1: an alias stands for the value that holds it"),
    "a mapping that holds itself": ("a: &a {b: {c: *a}}", "line 1: an alias stands for the value that holds it"),
    "deep lists": ("a: " + "[" * 5000, "more than 50 levels"),
    "deep mappings": ("a: " + "{b: " * 5000, "more than 50 levels"),
    "deep blocks": ("a:\n" + "- " * 5000 + "1", "more than 50 levels"),
    "a long number": ("a: " + "1" * 50_000, "line 1: a number or date of 50,000 characters"),
    "a long number of base 60": ("a: 1" + ":1" * 50_000, "line 1: a number or date of 100,001 characters"),
    "no date": ("a: 2024-99-99", "a value cannot be read: month"),
    "no whole number": ("a: !!int abc", "a value cannot be read"),
    "an empty number": ("a: !!int ''", "a value cannot be read"),
    "no flag": ("a: !!bool maybe", "a value cannot be read"),
    "code": ("a: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
    "a number as a name": ("1: 2", "1 is not the name of an option"),
    "equal keys of two spellings": ("a: {1: x, 0x1: y}", "1 is given twice, in lines 1 and 1"),
    "equal keys of two types": ("a:\n  1: x\n  1.0: y", "1.0 is given twice, in lines 2 and 3"),
    "a list as a key": ("? [a]\n: b", "unhashable key"),
    "control characters": ("a: \x1b[2J", "special characters are not allowed"),
    "megabytes": ("a: " + "x" * 1_000_001, "has 1,000,004 bytes. At most 1,000,000"),
    "a long key twice": ("a:\n" + 2 * ("  ? " + "k" * 2000 + "\n  : 1\n"), "characters left out"),
    "a long tag": ("a: !" + "t" * 50_000 + " 1", "characters left out"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_is_no_file_of_options_is_refused_in_one_short_message(name: str, tmp_path: Path) -> None:
    content, said = REFUSED[name]
    path = tmp_path / "file.yaml"
    path.write_text(content)
    with pytest.raises(YAMLFileError, match=said) as raised:
        read_yaml(path)
    assert len(str(raised.value)) < 700 and str(path) in str(raised.value)


def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.yaml")
    for path in (tmp_path, tmp_path / "fifo.yaml", Path("/dev/zero")):
        with pytest.raises(YAMLFileError, match="no regular file"):
            read_yaml(path)


def test_every_command_reads_files_with_the_one_reader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(BOMB)
    for command in (
        ["chain", str(path)],
        ["evolve", str(path)],
        ["grpo", "--config", str(path)],
        ["check", "--config", str(path)],
    ):
        try:
            assert main(command) == 2
        except SystemExit as stop:  # argparse's
            assert stop.code == 2
        said = capsys.readouterr().err
        assert "184,528 values" in said and len(said) < 700
    with pytest.raises(YAMLFileError, match="184,528 values"):
        resolve(["--accelerate_config", str(path)])


DEEP = '{"a":' * 200_000  # a tenth is enough up to Python 3.13
GUESS = ("--environment", "agile:guess_number")


@pytest.mark.parametrize(
    "command",
    [
        *([name, *GUESS, "--environment_args", DEEP] for name in ("grpo", "check", "play")),
        ["eval", "m", *GUESS, "--environment_limits", DEEP],
        ["grpo", *GUESS, "--chat_template_kwargs", DEEP],
    ],
    ids=lambda command: command[0],
)
def test_json_of_any_depth_is_one_message(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main([*command, *(["--model_name_or_path", "m"] if command[0] == "grpo" else [])]) == 2
    except SystemExit as stop:  # argparse's
        assert stop.code == 2
    said = capsys.readouterr().err
    assert "nested too deep" in said and len(said) < 1000


def test_a_value_of_another_type_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file.yaml"
    for lines, named in (
        ("stages: [{algorithm: {a: b}}]", "{'a': 'b'}"),
        ("stages: [{algorithm: ['a:b']}]", "['a:b']"),
        ("stages: [{algorithm: grpo}]\nenvironment_args: {1: 2}", "1 is not a name"),
    ):
        path.write_text(f"output_dir: out\nmodel: m\nenvironment: agile:guess_number\n{lines}\n")
        with pytest.raises(SystemExit):
            main(["chain", str(path)])
        assert named in capsys.readouterr().err


def test_a_quoted_value_is_cut_and_the_way_out_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cut("short") == "short"
    assert cut("ab" * 500, 10) == "ababa ... (990 characters left out) ... babab"
    path = tmp_path / "file.yaml"
    path.write_text(f"max_steps: [{'1, ' * 30_000}1]\n")
    with pytest.raises(SystemExit):
        Parser([GRPOConfig], prog="p", usage="p").parse_args_and_config(["--config", str(path)])
    said = capsys.readouterr().err
    assert "max_steps must be" in said and "characters left out" in said and len(said) < 4200
