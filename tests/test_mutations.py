"""The choice of mutations: those that a change affects, and those that a file of results leaves."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import mutations
import pytest
from mutations import Mutation, affected, fingerprint, read, unknown, write

SIGN = Mutation("a sign", "objectives/kl.py", "+", "-", "tests/test_kl.py -k sign")
SHIFT = Mutation("a shift", "rollout/collate.py", "+ 1", "", "tests/test_collate.py tests/test_layout.py")
MASK = Mutation("a mask", "objectives/kl.py", "* mask", "", "tests/test_mask.py")
ALL = [SIGN, SHIFT, MASK]
BEFORE = {("a sign", "objectives/kl.py", "+", "-", "tests/test_kl.py -k sign"),
          ("a shift", "rollout/collate.py", "+ 1", "", "tests/test_collate.py tests/test_layout.py"),
          ("a mask", "objectives/kl.py", "* mask", "", "tests/test_mask.py")}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "chosen"),
    [
        ([], []),
        (["objectives/kl.py", "docs/kl.md", "tests/games.py"], []),
        (["agile_trainers/objectives/kl.py"], [SIGN, MASK]),
        (["agile_trainers/objectives/kl.py", "agile_trainers/rollout/collate.py"], ALL),
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
    (project / "agile_trainers/objectives/kl.py").rename(project / "agile_trainers/objectives/divergence.py")
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
    (project / "agile_trainers/objectives/kl.py").write_text("z = 3", encoding="utf-8")
    assert unknown(ALL, results) == ALL
