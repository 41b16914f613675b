"""Finds the launch configurations of ``accelerate_configs/`` by name, in a clone and in an installed package."""

from __future__ import annotations

import argparse
import importlib.resources
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agile_trainers.cli.yaml_files import read_yaml
from agile_trainers.imports import nearest

_PACKAGE = Path(__file__).resolve().parents[1]
FOLDER = next(
    (place for place in (_PACKAGE / "accelerate_configs", _PACKAGE.parent / "accelerate_configs") if place.is_dir()),
    _PACKAGE / "accelerate_configs",
)
"""Folder of the configurations: inside the installed package, or beside it in a clone."""


_SHARED = {
    "zero1": frozenset({"optimizer"}),
    "zero2": frozenset({"optimizer", "gradients"}),
    "zero3": frozenset({"optimizer", "gradients", "weights"}),
    "fsdp2": frozenset({"optimizer", "gradients", "weights"}),
}
"""Engine to what its processes share."""


@dataclass(frozen=True)
class Launch:
    """The processes that a launch configuration starts, and how they share a model."""

    engine: str = "single"
    """``single``, ``ddp``, ``zero1``, ``zero2``, ``zero3`` or ``fsdp2``."""
    processes: int = 1
    """On all machines."""
    mixed_precision: str = "no"

    @property
    def zero(self) -> bool:
        """True for DeepSpeed."""
        return self.engine.startswith("zero")

    @property
    def shared(self) -> frozenset[str]:
        """Names of what each process keeps a share of: some of ``weights``, ``gradients`` and ``optimizer``."""
        return _SHARED.get(self.engine, frozenset())


SINGLE = Launch()
"""One process."""


def planned(options: argparse.Namespace) -> Launch:
    """Return what the options of ``accelerate launch`` would start, without starting it.

    Args:
        options: The parsed result of :func:`resolve`. What is not given is read from the file.
    """
    file = read_yaml(Path(options.config_file)) if options.config_file else {}
    kind = str(file.get("distributed_type", "NO")).upper()
    processes = int(options.num_processes or file.get("num_processes") or 1)
    engine = "ddp" if processes > 1 else "single"
    if options.use_deepspeed or kind == "DEEPSPEED":
        engine = f"zero{_zero_stage(options, file.get('deepspeed_config') or {})}"
    elif options.use_fsdp or kind == "FSDP":
        engine = "fsdp2"
    engine = "ddp" if engine == "zero0" else engine
    return Launch(engine, processes, options.mixed_precision or str(file.get("mixed_precision", "no")))


def _zero_stage(options: argparse.Namespace, config: dict[str, Any]) -> int:
    """Return the stage of ZeRO; accelerate's default is 2."""
    named = options.deepspeed_config_file or config.get("deepspeed_config_file")
    if named is not None:
        return int(read_yaml(Path(named)).get("zero_optimization", {}).get("stage", 0))
    return int(options.zero_stage or config.get("zero_stage", 2))


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
