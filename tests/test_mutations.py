"""The choice of mutations, and how they are run: each against tests that pass without it, in a fork that reads it anew."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path

import mutations
import pytest
from forked_pytest import Pytest
from mutations import Mutation, affected, fingerprint, read, unknown, write

SIGN = Mutation("a sign", "objectives/ratios.py", "+", "-", "tests/test_kl.py -k sign")
SHIFT = Mutation("a shift", "rollout/collate.py", "+ 1", "", "tests/test_collate.py tests/test_layout.py")
MASK = Mutation("a mask", "objectives/ratios.py", "* mask", "", "tests/test_mask.py")
ALL = [SIGN, SHIFT, MASK]
BEFORE = {("a sign", "objectives/ratios.py", "+", "-", "tests/test_kl.py -k sign"),
          ("a shift", "rollout/collate.py", "+ 1", "", "tests/test_collate.py tests/test_layout.py"),
          ("a mask", "objectives/ratios.py", "* mask", "", "tests/test_mask.py")}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "chosen"),
    [
        ([], []),
        (["objectives/ratios.py", "docs/kl.md", "tests/games.py"], []),
        (["agile_trainers/objectives/ratios.py"], [SIGN, MASK]),
        (["agile_trainers/objectives/ratios.py", "agile_trainers/rollout/collate.py"], ALL),
        (["tests/test_layout.py"], [SHIFT]),
        (["tests/test_kl.py"], [SIGN]),
    ],
)
def test_a_change_of_the_file_or_of_a_test_chooses(changed: list[str], chosen: list[Mutation]) -> None:
    assert affected(ALL, changed, BEFORE) == chosen


@pytest.mark.parametrize("field", ["name", "file", "old", "new", "tests"])
def test_a_new_or_changed_mutation_is_chosen(field: str) -> None:
    other = replace(SIGN, **{field: "another"})
    assert affected([other, SHIFT], [], BEFORE) == [other]


def commit(folder: Path) -> str:
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "add", "-A"], cwd=folder, check=True)
    subprocess.run(["git", *author, "commit", "-qm", "x"], cwd=folder, check=True)
    return subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with the mutations above and the files that they name."""
    for name in {name for one in ALL for name in one.reads}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1 + 1 * mask", encoding="utf-8")
    source = Path(mutations.__file__).read_text(encoding="utf-8")
    head = source.partition("\nENUMERATION = ")[0]
    (tmp_path / "tests/mutations.py").write_text(f"{head}\nMUTATIONS = {ALL!r}\n", encoding="utf-8")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    monkeypatch.setattr(mutations, "ROOT", tmp_path)
    monkeypatch.setattr(mutations, "MUTATIONS", ALL)
    return tmp_path


def test_commits_the_working_tree_and_new_files_count(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = commit(project)
    assert mutations.since(first) == []
    (project / "agile_trainers/rollout/collate.py").write_text("x = 2 + 1", encoding="utf-8")
    assert mutations.since(first) == [SHIFT]
    second = commit(project)
    assert mutations.since(first) == [SHIFT] and mutations.since(second) == []
    new = Mutation("new", "objectives/new.py", "+", "-", "tests/test_new.py")
    renamed = replace(SIGN, file="objectives/divergence.py")
    (project / "agile_trainers/objectives/ratios.py").rename(project / "agile_trainers/objectives/divergence.py")
    (project / "tests/test_mask.py").write_text("y = 2", encoding="utf-8")
    monkeypatch.setattr(mutations, "MUTATIONS", [renamed, SHIFT, replace(MASK, file="objectives/divergence.py"), new])
    assert [one.name for one in mutations.since(second)] == ["a sign", "a mask", "new"]
    with pytest.raises(subprocess.CalledProcessError):
        mutations.since("no-such-commit")


def test_what_was_noticed_is_left_out_until_its_file_or_tests_change(project: Path) -> None:
    results = project / "results.jsonl"
    assert unknown(ALL, results) == ALL
    write(results, {"name": "gone", "verdict": "noticed", "fingerprint": "0"})
    for one, verdict in ((MASK, "TESTS FAIL ANYWAY"), (SHIFT, "SURVIVED"), (SIGN, "noticed")):
        write(results, {"name": one.name, "verdict": verdict, "fingerprint": fingerprint(one, project)})
    assert list(read(results)) == ["a sign", "a shift", "a mask"]
    assert unknown(ALL, results) == [SHIFT, MASK]
    write(results, {**read(results)["a shift"], "verdict": "noticed"})
    assert unknown(ALL, results) == [MASK]
    (project / "tests/test_layout.py").write_text("z = 3", encoding="utf-8")
    (project / "agile_trainers/objectives/ratios.py").write_text("z = 3", encoding="utf-8")
    assert unknown(ALL, results) == ALL


TESTS = """
import sys
from agile_trainers.objectives.sign import f

def ran(name):
    with open("{runs}", "a") as file: file.write(name + " ")

def test_sign():
    ran("sign")
    assert "json" in sys.modules and "torch" not in sys.modules
    assert f(3) == 4

def test_size():
    ran("size")
    assert f(0) < 9

def test_red():
    assert False
"""
GREEN = "tests/test_sign.py::test_sign tests/test_sign.py::test_size"


def plus(name: str, old: str, new: str, tests: str = GREEN) -> Mutation:
    return Mutation(name, "objectives/sign.py", old, new, tests)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose package is a function that adds 1, in place of this one; the tests write here which of them ran."""
    project = tmp_path / "small"
    for name, text in (
        ("agile_trainers/__init__.py", ""),
        ("agile_trainers/objectives/sign.py", "def f(x):\n    return x + 1\n"),
        ("tests/test_sign.py", TESTS.format(runs=tmp_path / "runs")),
    ):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(mutations, "copy_project", partial(shutil.copytree, project, dirs_exist_ok=True))
    monkeypatch.setattr(mutations, "Pytest", partial(Pytest, libraries=("json",)))
    monkeypatch.setattr(mutations, "fingerprint", lambda mutation, project: mutation.name)
    return tmp_path / "runs"


def test_tests_run_once_without_a_mutation_and_up_to_the_first_failure_with_each(runs: Path) -> None:
    assert mutations.run([plus("minus", "+", "-"), plus("a float", "1", "1.0"), plus("ten", "1", "10")], None) == [
        "a float"
    ]
    assert runs.read_text().split() == ["sign", "size"] + ["sign"] + ["sign", "size"] + ["sign"]


def test_what_cannot_be_run_is_no_success(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = [
        plus("red before", "+", "-", "tests/test_sign.py"),
        plus("no such test", "+", "-", "tests/test_sign.py::test_none"),
        plus("no such line", "x + 2", "x - 2"),
        plus("no syntax", "x + 1", "x +"),
        plus("minus", "+", "-"),
    ]
    assert mutations.run(made, None) == [one.name for one in made[:-1]]
    printed = capsys.readouterr().out
    assert printed.count("CANNOT BE RUN") == 3 and printed.count("TESTS FAIL ANYWAY") == 1
    assert "occurs 0 times" in printed and "test_none" in printed and "SyntaxError" in printed


def test_the_package_of_another_folder_is_refused(runs: Path, tmp_path: Path) -> None:
    with Pytest(tmp_path, libraries=()) as pytest_, pytest.raises(RuntimeError, match="instead of the package in"):
        pytest_.passes(tmp_path, "tests/test_sign.py")
