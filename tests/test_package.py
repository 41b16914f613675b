"""The package as a whole: what may import what, and how heavy the core is. What is installed: test_wheel.py."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from mutations import MUTATIONS, Mutation

import agile_trainers
from agile_trainers import trainers

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "types": set(),
    "embedded": set(),
    "imports": set(),
    "train_batch": {"types"},
    "objectives": set(),
    "adapters": set(),
    "envs": {"types", "imports"},
    "rollout": {"types", "envs"},
    "sampling": {"types", "train_batch", "objectives", "adapters", "rollout"},
    "checkpoints": {"types", "train_batch", "adapters", "envs", "rollout"},
    "trainers": {"types", "train_batch", "objectives", "adapters", "envs", "rollout", "sampling", "checkpoints"},
    "cli": {"types", "embedded", "imports", "adapters", "envs", "rollout", "sampling", "checkpoints", "trainers"},
}
"""Imports point one way only: a part of the package, and the parts it may use."""


def _modules() -> list[Path]:
    return [path for path in (ROOT / "agile_trainers").rglob("*.py") if path.parent.name != "agile_trainers"] + [
        ROOT / "agile_trainers" / f"{name}.py" for name in ("types", "embedded", "imports", "train_batch")
    ]


def _imported_parts(path: Path) -> set[str]:
    """First-level parts of ``agile_trainers`` that a module imports, itself included."""
    parts: set[str] = set()
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = (*base, *(node.module.split(".") if node.module else ()))
            names = [module] if len(module) > 1 else [(*module, alias.name) for alias in node.names]
        else:
            continue
        parts |= {name[1] for name in names if name[0] == "agile_trainers" and len(name) > 1}
    return parts


@pytest.mark.parametrize("path", _modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    part = path.relative_to(ROOT / "agile_trainers").with_suffix("").parts[0]
    assert _imported_parts(path) <= MAY_IMPORT[part] | {part}


@pytest.mark.parametrize(
    ("files", "foreign"),
    [
        ("objectives/*.py", {"trl", "transformers", "peft", "datasets", "accelerate"}),
        ("rollout/**/*.py", {"datasets", "accelerate"}),
        ("rollout/engine.py", {"trl", "transformers"}),
        ("rollout/environment_pool.py", {"trl", "transformers", "torch"}),
        ("envs/**/*.py", {"trl", "transformers", "peft", "torch", "accelerate"}),
    ],
)
def test_lower_parts_know_nothing_of_the_training_libraries(files: str, foreign: set[str]) -> None:
    paths = list((ROOT / "agile_trainers").glob(files))
    assert paths
    for path in paths:
        known = {"transformers"} if path.parent.name == "tools" else set()  # makes the schemas of tools
        assert not (foreign - known) & {name.split(".")[0] for name in _top_level_imports(path)}, path


def _top_level_imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return names


def test_the_package_itself_is_light() -> None:
    heavy = "{'torch', 'trl', 'transformers', 'peft', 'datasets', 'accelerate', 'numpy'}"
    code = (
        f"import sys, agile_trainers; print(*{heavy} & set(sys.modules), 'MultiTurnPPOTrainer' in dir(agile_trainers))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["True"], done.stderr


def test_every_trainer_can_be_imported_from_the_package() -> None:
    assert set(agile_trainers.__all__) == set(trainers.__all__) <= set(dir(agile_trainers))
    assert all(getattr(agile_trainers, name) is getattr(trainers, name) for name in trainers.__all__)
    assert {name for name in vars(trainers) if name.startswith("MultiTurn")} == set(trainers.__all__)
    with pytest.raises(AttributeError, match="no attribute 'MultiTurnGRPO'"):
        agile_trainers.MultiTurnGRPO  # noqa: B018


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_finds_its_line(mutation: Mutation) -> None:
    source = (ROOT / "agile_trainers" / mutation.file).read_text(encoding="utf-8")
    assert source.count(mutation.old) == 1 and mutation.new != mutation.old
    assert all((ROOT / word).exists() for word in mutation.tests.split() if word.endswith(".py"))


def test_constraints_pin_every_core_requirement_exactly() -> None:
    lines = (ROOT / "requirements" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert not any("+" in version for version in pins.values()), "a local version such as +cpu cannot be installed"
    core = [requirement for requirement in requires("agile-trainers") or [] if "extra ==" not in requirement]
    names = {requirement.split(">")[0].split("<")[0].strip() for requirement in core}
    assert {"torch", "trl", "transformers", "peft"} <= names <= set(pins)


def test_no_test_imports_another() -> None:
    """Helpers are in modules of their own, shared fixtures in conftest files."""
    for path in (ROOT / "tests").rglob("*.py"):
        assert not {name for name in _top_level_imports(path) if name.startswith("test_")}, path
