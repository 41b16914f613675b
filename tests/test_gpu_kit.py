"""What is carried to a GPU machine without package registries, and how its cases are run and resumed; on CPU."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "on_gpu"))
import run as runner
import wheels
from case_log import CaseLog

HERE = Path(__file__).resolve().parent


def test_every_file_of_cases_is_run():
    assert sorted(runner.FILES) == sorted(f"tests/on_gpu/{path.name}" for path in (HERE / "on_gpu").glob("test_*.py"))


def test_the_assumed_machine_is_stated_once_and_fits_what_we_support():
    """Its versions lie within the package's own ranges."""
    assumed = wheels.requirements(wheels.MACHINE)
    project = wheels.tomllib.loads((wheels.ROOT / "pyproject.toml").read_text())["project"]
    for own in map(Requirement, project["dependencies"]):
        there = assumed.get(wheels.canonicalize_name(own.name))
        if there and there.specifier:
            (exact,) = there.specifier
            assert own.specifier.contains(exact.version), own
    assert {"trl", "datasets", "jsonschema"}.isdisjoint(assumed)


def _wheel(folder: Path, name: str, *requires: str) -> Path:
    """About 10 kB."""
    file = folder / f"{name.replace('-', '_')}-1.0-py3-none-any.whl"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {one}" for one in requires)]
    with zipfile.ZipFile(file, "w") as made:
        made.writestr(f"{name}-1.0.dist-info/METADATA", "\n".join(lines))
        made.writestr("content", bytes(10_000))
    return file


def test_what_is_carried_is_all_that_the_machine_lacks(tmp_path, monkeypatch):
    """Requirements of requirements, without those of other systems and extras; what does not fit is left out by name."""
    (tmp_path / "pyproject.toml").write_text("""[project]
dependencies = ["torch", "trl>=1; sys_platform == 'linux'", "pywin32; sys_platform == 'win32'"]
[project.optional-dependencies]
liger = ["liger-kernel"]
quantization = ["bitsandbytes"]
""")
    known = {
        "trl": ["datasets>=3", "Torch", "vllm; extra == 'vllm'", "numpy; python_version < '3.12'"], "datasets": ["dill<2"],
        "dill": [], "liger-kernel": ["einops", "more"], "more": [], "bitsandbytes": ["huge"], "huge": [],
    }  # fmt: skip
    monkeypatch.setattr(wheels, "ROOT", tmp_path)
    monkeypatch.setattr(wheels, "download", lambda one, folder: _wheel(folder, one.name, *known[one.name]))
    found, left_out = wheels.collect(tmp_path / "made", limit=65_000)
    names = {path.name.split("-1.0")[0] for path in (tmp_path / "made").iterdir()}
    assert names == {"trl", "datasets", "dill", "liger_kernel", "more"} and len(found) == 5
    assert list(left_out) == ["quantization"]
    with pytest.raises(SystemExit, match=r"The wheels take 0\.0 MiB of at most 0: .*datasets"):
        wheels.collect(tmp_path / "made", limit=1)


def test_what_differs_from_the_assumed_machine_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(wheels, "MACHINE", tmp_path / "machine.txt")
    wheels.MACHINE.write_text("# a comment\npytest==0.1\nnot-there  # one more\nnumpy\n")
    found = wheels.differences([_wheel(tmp_path, "carried", "numpy<1", "torch>=2")])
    assert [line.split(" is ")[0] for line in found] == ["pytest", "not-there", "numpy"]
    assert found[1] == "not-there is missing (requirements/gpu-machine.txt)" and found[2].endswith(
        "expected <1 (carried)"
    )


@pytest.fixture
def cases(tmp_path, monkeypatch):
    """The runner on cases of this test, a file of which it is given."""

    def run(text: str = "", **options):
        if text:
            (HERE / "on_gpu/test_made.py").write_text(f"import os, time, pytest\npytestmark = pytest.mark.gpu\n{text}")
        settings = {"seconds": 120.0, "case_seconds": 60.0, "rehearse": True, "only": ()}
        return runner.run(tmp_path / "results", **(settings | options)).results()

    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # where the wheel is installed, its tests do not import the clone
    monkeypatch.setattr(runner, "FILES", ("tests/on_gpu/test_made.py",))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a process that dies leaves its files
    yield run
    (HERE / "on_gpu/test_made.py").unlink(missing_ok=True)


@pytest.mark.slow
def test_a_case_that_ends_its_process_ends_no_other(cases):
    """What passed or was skipped is not run again; what died is."""
    text = """
def test_first(figures): figures["seen"] = 2.5
def test_broken(): os._exit(11)
def test_absent(): pytest.skip("liger is not installed")
def test_last(machine): assert machine.tiny
"""
    found = cases(text)
    assert {name: one["outcome"] for name, one in found.items()} == {
        "made.first": "passed", "made.broken": "died", "made.absent": "skipped",
        "made.last": "passed",
    }  # fmt: skip
    assert found["made.first"]["figures"] == {"seen": 2.5} and found["made.broken"]["reason"] == "exit code 11"
    assert found["made.absent"]["reason"] == "liger is not installed"
    again = cases(text.replace("os._exit(11)", "pass"), only=("first", "broken"))
    assert again["made.broken"]["outcome"] == "passed" and again["made.first"] == found["made.first"]


@pytest.mark.slow
def test_a_case_that_hangs_or_breaks_the_device_ends_no_other(cases):
    text = """
def test_hangs(): time.sleep(600)
def test_unusable(): raise RuntimeError("CUDA error: an illegal memory access")
def test_after(): pass
"""
    found = cases(text, case_seconds=2.0)
    outcomes = {"made.hangs": "died", "made.unusable": "failed", "made.after": "passed"}
    assert {name: one["outcome"] for name, one in found.items()} == outcomes
    assert found["made.hangs"]["reason"] == "took longer than 2 s"


def test_without_a_gpu_nothing_is_run(capsys):
    if not torch.cuda.is_available():
        assert runner.main([]) == 2 and "--rehearse" in capsys.readouterr().err


def test_the_table_names_outcome_and_figures(tmp_path):
    log = CaseLog(tmp_path / "a" / "cases.jsonl")
    log.write("one", "failed", 1.26, reason="3 GiB | 2")
    log.write("one", "passed", 2.0, figures={"ratio": 0.123456, "rows": 64})
    log.write("two", "skipped", 0.0, reason="a | b")
    assert log.table().splitlines()[2:] == [
        "| one | passed | 2.0 | ratio 0.1235, rows 64 |", "| two | skipped | 0.0 | a / b |"
    ]  # fmt: skip


@pytest.mark.slow
def test_the_rehearsal_of_every_case(tmp_path):
    command = [sys.executable, str(HERE / "on_gpu/run.py"), "--rehearse", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
