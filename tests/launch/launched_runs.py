"""Runs that accelerate launches, and how far apart they end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from launching import run
from recorded import recorded
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]


SCRIPT = Path(__file__).with_name("launched.py")
HELPERS = ("", "trainers", "populations")
"""Folders of tests whose modules the launched scripts import."""


def launch(config: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """As a user would, from the repository's root."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", f"accelerate_configs/{config}.yaml"]
    return run(
        [*command, "--main_process_port", "0", *map(str, arguments)],
        timeout=900,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / "tests" / name) for name in HELPERS)},
    )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Of all adapters, or of the whole model, by file and name."""
    files = sorted(folder.rglob("*.safetensors"))
    return {
        f"{file.parent.relative_to(folder)}/{name}": value for file in files for name, value in load_file(file).items()
    }


def distance(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys() and left
    return sum(float(((left[name] - right[name]) ** 2).sum()) for name in left) ** 0.5


def of(adapter: str, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in named.items() if name.startswith(f"{adapter}/")}


def episodes(folder: Path) -> list[dict]:
    records = recorded(folder)
    return sorted(records, key=lambda record: (record["step"], record["seed"], record["group"], record["member"]))
