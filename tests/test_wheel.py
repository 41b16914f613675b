"""The wheel holds every file, and works in an environment without the clone (``make wheel``)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

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


class Installed:
    """A fresh environment with the wheel and, from the one that runs the tests, its dependencies; and an empty folder."""

    def __init__(self, wheel: Path, folder: Path):
        self.folder, environment = folder / "empty", folder / "environment"
        self.folder.mkdir()
        venv.create(environment)
        self.binaries = environment / "bin"
        (packages,) = (environment / "lib").glob("python*/site-packages")
        pip = [sys.executable, "-m", "pip", "--python", str(self.binaries / "python")]
        done = subprocess.run([*pip, "install", "--no-deps", "--no-index", str(wheel)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        # A folder that a .pth file names is searched, but its own .pth files, which find the clone, are not read.
        (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
        self.variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(self, command: str, *arguments: str) -> str:
        print("$", command, *arguments if len(str(arguments)) < 400 else (f"{arguments[0]} ...",))
        done = subprocess.run(
            [str(self.binaries / command), *arguments],
            cwd=self.folder,
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(wheel, tmp_path_factory.mktemp("installed"))


@pytest.mark.slow
def test_nothing_is_imported_from_the_clone(installed: Installed) -> None:
    code = """
import importlib, pkgutil, sys
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
    print(installed.run("python", "-c", code))


@pytest.mark.slow
def test_the_readmes_first_snippet_runs(installed: Installed, embedded_model: Path) -> None:
    """With another model and environment, fewer and shorter steps, and without the Hub."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    snippet = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert snippet is not None
    code = snippet[1]
    for pattern, replacement in {
        r'model="[^"]*"': f"model={str(embedded_model)!r}",
        r'environment="[^"]*"': 'environment="agile:guess_number"',
        r"max_steps=\d+": 'max_steps=1, use_cpu=True, bf16=False, report_to="none"',
        r"max_new_tokens=\d+": "max_new_tokens=4",
        r"(?m)^trainer\.push_to_hub\(\)$": "trainer.save_model()",
    }.items():
        code, found = re.subn(pattern, replacement, code)
        assert found == 1, pattern
    print(code)
    installed.run("python", "-c", code)
    assert list(installed.folder.rglob("adapter_model.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(installed: Installed, command: str) -> None:
    assert f"agile-trainers {command}" in installed.run("agile-trainers", command, "--help")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cpu/single", "cpu/zero3"])
def test_launch_configurations_are_found(installed: Installed, embedded_model: Path, name: str) -> None:
    if "zero" in name:
        pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'agile-trainers[deepspeed]'")
    options = f"""grpo --accelerate_config {name} --main_process_port 0 --use_cpu --bf16 False --use_peft
        --lora_target_modules all-linear --environment agile:guess_number --max_turns 2 --max_new_tokens 2 --max_steps 1
        --per_device_train_batch_size 4 --num_generations 4 --report_to none --model_name_or_path {embedded_model}
        --output_dir {name}"""
    assert f"Saved to {name}" in installed.run("agile-trainers", *options.split())
