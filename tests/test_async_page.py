"""The recipes of ``docs/async.md``: each command is planned without GPU and vLLM, as the page says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from recipe_plans import SHAPES, TINY, folder_of

from agile_trainers.cli import main

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/async.md").read_text(encoding="utf-8")
COMMANDS = [
    words
    for block in re.findall(r"```sh\n(.*?)```", PAGE, flags=re.S)
    if (words := shlex.split(block.replace("\\\n", "")))[:2] == ["agile-trainers", "grpo"]
]
MACHINES = [
    ("--gpus 1 --gpu_memory 24", "GPU 0, which"),
    ("--gpus 2 --gpu_memory 79", "GPU 1,"),
    ("--gpus 8 --gpu_memory 79", "GPUs 6, 7,"),
]
"""Of each command: what to plan for, and where the server runs."""


def report(words: list[str], machine: str, model: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    words = [str(ROOT / word) if word.startswith(("examples/", "accelerate_configs/")) else word for word in words[1:]]
    more = ["--model_name_or_path", str(model), "--episodes", "2", "--output_dir", str(folder)]
    code = main.main(["check", *words, *machine.split(), *more])
    said = " ".join(capsys.readouterr().out.split())
    assert code == 0, said
    return said


@pytest.mark.parametrize(("words", "machine"), [*zip(COMMANDS, MACHINES, strict=True)], ids=["1", "2", "8"])
def test_each_command_is_planned(
    words: list[str], machine: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = report(words, machine[0], folder_of(TINY, tmp_path), tmp_path, capsys)
    assert f"starts a server on {machine[1]}" in said and "room for 3 adapters (batches_ahead=1)" in said


@pytest.mark.slow
@pytest.mark.parametrize(("words", "machine"), [*zip(COMMANDS, MACHINES, strict=True)], ids=["1", "2", "8"])
def test_the_servers_hold_what_the_page_says(
    words: list[str], machine: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = Path(words[words.index("--config") + 1]).name
    (size,) = re.findall(r"_([\d.]+)b_", name)
    said = report(words, machine[0], folder_of(SHAPES[f"{size}B"], tmp_path), tmp_path, capsys)
    ((held, played),) = re.findall(rf"{re.escape(name)}`.*\| (\d+) of (\d+) \|", PAGE)
    assert f"{held} of the longest episodes fit at the same time; {played} are played" in said


def test_the_peaks_are_those_of_the_recipes() -> None:
    recipes = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    peaks = re.findall(r"(\w+[\w.]+_ahead\.yaml)`.*?\| ([\d.]+) GiB", PAGE)
    assert len(peaks) == 3
    for name, peak in peaks:
        assert re.search(rf"{re.escape(name)}`.*\| {re.escape(peak)} GiB \|", recipes), name
