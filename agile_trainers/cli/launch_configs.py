"""Finds the launch configurations of ``accelerate_configs/`` by name, in a clone and in an installed package."""

from __future__ import annotations

import argparse
import importlib.resources
from collections.abc import Sequence
from pathlib import Path

from agile_trainers.cli.yaml_files import read_yaml
from agile_trainers.imports import nearest

_PACKAGE = Path(__file__).resolve().parents[1]
FOLDER = next(
    (place for place in (_PACKAGE / "accelerate_configs", _PACKAGE.parent / "accelerate_configs") if place.is_dir()),
    _PACKAGE / "accelerate_configs",
)
"""Folder of the configurations: inside the installed package, or beside it in a clone."""


def names() -> list[str]:
    """List the names that ``--accelerate_config`` accepts: ``ddp``, ``zero2``, ``cpu/ddp``, ..."""
    found = [path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.yaml")]
    return sorted(found, key=lambda name: ("/" in name, name))


def find(name: str) -> Path:
    """Find the file of a configuration.

    Args:
        name: A file, one of :func:`names`, or a name of TRL's (``multi_gpu``), in this order.

    Raises:
        ValueError: If the name is none of these.
    """
    theirs = Path(str(importlib.resources.files("trl"))) / "accelerate_configs"
    for path in (Path(name), FOLDER / f"{name}.yaml", theirs / f"{name}.yaml"):
        if path.is_file():
            return path
    raise ValueError(
        f"--accelerate_config {name} is neither a file nor a launch configuration"
        f"{nearest(name, names(), count=1) or '.'} Expected a file or one of {', '.join(names())}."
    )


def resolve(options: Sequence[str]) -> list[str]:
    """Translate ``--accelerate_config NAME`` into the options of ``accelerate launch``.

    Args:
        options: Options of ``accelerate launch``, with or without this one.

    Raises:
        ValueError: If there is no such configuration.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--accelerate_config")
    try:
        given, rest = parser.parse_known_args(options)
    except argparse.ArgumentError as error:
        raise ValueError(f"{error}. Expected a file or one of {', '.join(names())}.") from error
    if given.accelerate_config is None:
        return rest
    path = find(given.accelerate_config)
    return ["--config_file", str(path), *_deepspeed_file(path), *rest]


def _deepspeed_file(path: Path) -> list[str]:
    """Return the option of the DeepSpeed file that a configuration names, relative to the folder of all configurations."""
    config = read_yaml(path)
    if not path.resolve().is_relative_to(FOLDER):
        return []
    named = config.get("deepspeed_config", {}).get("deepspeed_config_file")
    return ["--deepspeed_config_file", str(FOLDER.parent / named)] if named else []
