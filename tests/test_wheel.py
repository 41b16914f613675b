"""The wheel holds every file, and works with its core dependencies alone, without the clone (``make wheel``)."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import distribution, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from agile_trainers.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
INSTALLED = {
    "agile_trainers": "agile_trainers",
    "environments": "agile_environments",
    "accelerate_configs": "agile_trainers/accelerate_configs",
}
"""Where each folder of the clone is installed."""
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources, which building would litter."""
    pytest.importorskip("setuptools", minversion="77", reason="pyproject.toml asks for setuptools 77")
    source = tmp_path_factory.mktemp("source")
    for name in INSTALLED:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    built = tmp_path_factory.mktemp("built")
    done = subprocess.run([sys.executable, "-c", BUILD, str(built)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    (found,) = built.iterdir()
    return found


def test_it_holds_every_file_and_no_other(wheel: Path) -> None:
    expected = {
        f"{installed}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, installed in INSTALLED.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    found = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert found == expected
    assert {"agile_trainers/py.typed", "agile_trainers/accelerate_configs/cpu/zero3.json"} <= found


# ----------------------------------------------------------------------------------------------------------- installed


def needed(requirements: list[str], extras: set[str], found: dict[str, set[str]]) -> None:
    """Collect distributions that these requirements need, directly or not, each with the extras that are asked of it."""
    for requirement in map(Requirement, requirements):
        marker, name = requirement.marker, canonicalize_name(requirement.name)
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in extras | {""}):
            continue
        if name not in found or not requirement.extras <= found[name]:
            found[name] = found.get(name, set()) | requirement.extras
            needed(requires(name) or [], found[name], found)


class Installed:
    """A fresh environment with the wheel and, from the one that runs the tests, its dependencies alone; an empty folder."""

    def __init__(self, wheel: Path, folder: Path, *extras: str):
        self.folder, environment = folder / "empty", folder / "environment"
        self.folder.mkdir()
        venv.create(environment)
        self.binaries = environment / "bin"
        (packages,) = (environment / "lib").glob("python*/site-packages")
        pip = [sys.executable, "-m", "pip", "--python", str(self.binaries / "python")]
        done = subprocess.run(
            [*pip, "install", "--no-deps", "--no-index", str(wheel)],
            env={
                **os.environ,
                "PATH": os.defpath,
            },  # pip asks rustc for its version, and that may be rustup, which writes
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        needed(requires("agile-trainers") or [], set(extras), found := {})
        for name in found:
            top = {
                file.parts[0] for file in distribution(name).files or () if file.parts[0] not in ("..", "__pycache__")
            }
            for part in top:
                if not (packages / part).exists():  # of a namespace that several share, the first one's folder has all
                    (packages / part).symlink_to(distribution(name).locate_file(part))
        self.variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(self, command: str, *arguments: str, given: str | None = None) -> str:
        print("$", command, *arguments if len(str(arguments)) < 400 else (f"{arguments[0]} ...",))
        done = subprocess.run(
            [str(self.binaries / command), *arguments],
            cwd=self.folder,
            env=self.variables,
            input=given,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(wheel, tmp_path_factory.mktemp("installed"))


def test_what_is_needed_of_a_requirement() -> None:
    needed(["trl"], set(), plain := {})
    assert {"trl", "transformers", "huggingface-hub", "pyyaml"} <= plain.keys() and "pytest" not in plain
    pytest.importorskip("verifiers", reason="needs verifiers: pip install 'agile-trainers[verifiers]'")
    needed(["agile-trainers[verifiers]"], set(), more := {})
    assert "verifiers" in more and more["agile-trainers"] == {"verifiers"}


STRANGER = """
import importlib, json, pkgutil, sys
from agile_trainers.cli.main import main

given = json.load(sys.stdin)
sys.stdin = open(given["answers"])
for arguments in given["commands"]:
    print("$ agile-trainers", *arguments, flush=True)
    try:
        code = main(arguments)
    except SystemExit as ended:
        code = ended.code
    assert not code, (arguments, code)
exec(given["snippet"], {"__name__": "__main__"})

import agile_environments, agile_trainers
for package in (agile_trainers, agile_environments):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        try:
            importlib.import_module(module.name)
        except ImportError as error:  # of a library that is not installed here
            assert "agile_" not in str(error.name), error
            print("left out:", module.name, error)
files = [m.__file__ for n, m in sys.modules.items() if n.startswith("agile_") and getattr(m, "__file__", None)]
print(len(files), "modules of", agile_trainers.__path__)
assert len(files) > 80 and all(file.startswith(sys.prefix) for file in files)
"""


def readmes_snippet(model: Path) -> str:
    """README's first snippet on its environment class, with another model, fewer and shorter steps, and without the Hub."""
    first, environment = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )[:2]
    code = f"{environment}\n{first}"
    for pattern, replacement in {
        r'model="[^"]*"': f"model={str(model)!r}",
        r'environment="[^"]*"': "environment=Echo",
        r"max_steps=\d+": 'max_steps=1, use_cpu=True, bf16=False, report_to="none"',
        r"max_new_tokens=\d+": "max_new_tokens=4",
        r"(?m)^trainer\.push_to_hub\(\)$": "trainer.save_model()",
    }.items():
        code, found = re.subn(pattern, replacement, code)
        assert found == 1, pattern
    return code


def test_a_stranger_needs_the_core_dependencies_alone(installed: Installed, embedded_model: Path) -> None:
    """Every command's help, check, demo, eval, view and play, README's snippet, every module, in one process."""
    training = (
        f"--model_name_or_path {embedded_model} --environment agile:guess_number --max_turns 2 --max_new_tokens 2"
    )
    commands = [
        *(f"{command} --help" for command in COMMANDS),
        "env",
        "envs",
        f"check grpo {training} --max_steps 1 --use_cpu --bf16 False --output_dir checked --scripted_policy random",
        "demo --quick --output_dir demo",
        "eval demo/adapter --environment agile:guess_number --episodes 8 --output_dir evaluated",
        "view demo --output demo.html",
        "play --environment agile:guess_number --max_turns 2",
    ]
    (answers := installed.folder / "answers").write_text("6\n3\n")
    print(installed.run("python", "-c", STRANGER, given=json.dumps({
        "commands": [one.split() for one in commands], "answers": str(answers), "snippet": readmes_snippet(embedded_model)
    })))  # fmt: skip
    written = {"demo.html", "demo/adapter/adapter_model.safetensors", "runs/guess/adapter_model.safetensors"}
    assert all((installed.folder / path).exists() for path in written)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cpu/single", "cpu/zero3"])
def test_launch_configurations_are_found(wheel: Path, tmp_path: Path, embedded_model: Path, name: str) -> None:
    if "zero" in name:
        pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'agile-trainers[deepspeed]'")
    installed = Installed(wheel, tmp_path, "deepspeed" if "zero" in name else "")
    options = f"""grpo --accelerate_config {name} --main_process_port 0 --use_cpu --bf16 False --use_peft
        --lora_target_modules all-linear --environment agile:guess_number --max_turns 2 --max_new_tokens 2 --max_steps 1
        --per_device_train_batch_size 4 --num_generations 4 --report_to none --model_name_or_path {embedded_model}
        --output_dir {name}"""
    assert f"Saved to {name}" in installed.run("agile-trainers", *options.split())
