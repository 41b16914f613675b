"""Collects the wheels that a GPU machine without package registries lacks (`make gpu-wheels`), and installs them there.

The wheels are every requirement of this package, and of the extras in ``EXTRAS``, that `requirements/gpu-machine.txt` does
not list, with the requirements of these wheels and so on. Each is of the version in `requirements/constraints.txt`. An extra
that does not fit into the folder is left out, and the tests that need it are skipped with its name.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, PathDistribution, version
from pathlib import Path
from zipfile import Path as ZipPath

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
MACHINE = ROOT / "requirements/gpu-machine.txt"
CONSTRAINTS = ROOT / "requirements/constraints.txt"
PYTHON = "3.12"
MARKERS = {"python_version": PYTHON, "python_full_version": f"{PYTHON}.0", "sys_platform": "linux", "extra": ""}
PLATFORMS = [*(f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17, 12, 5)), "manylinux2014_x86_64"]
EXTRAS = ("liger", "quantization")
"""Carried if they fit, in this order."""
LIMIT = 46 * 2**20
"""Bytes that the folder may hold."""


def requirements(file: Path) -> dict[str, Requirement]:
    """The lines of a requirements file, by canonical name."""
    lines = (line.split("#")[0].strip() for line in file.read_text().splitlines())
    return {canonicalize_name(found.name): found for found in map(Requirement, filter(None, lines))}


def needed(lines: Iterable[str]) -> Iterator[Requirement]:
    """The requirements among ``lines`` that apply on the machine."""
    for found in map(Requirement, lines):
        if found.marker is None or found.marker.evaluate(MARKERS):
            yield found


def download(requirement: Requirement, folder: Path) -> Path:
    """Download the wheel of one requirement, without its own requirements, and return it."""
    before = set(folder.iterdir())
    pins = requirements(CONSTRAINTS)
    name = canonicalize_name(requirement.name)
    platforms = [part for name in PLATFORMS for part in ("--platform", name)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", *platforms]
    command += ["--implementation", "cp", "--python-version", PYTHON, "--dest", str(folder)]
    done = subprocess.run([*command, str(pins.get(name, requirement))], capture_output=True, text=True)
    made = set(folder.iterdir()) - before
    if done.returncode or len(made) != 1:
        raise SystemExit(f"No wheel of {pins.get(name, requirement)} for Python {PYTHON}:\n{done.stderr.strip()}")
    return made.pop()


def closure(wanted: Iterable[str], present: set[str], folder: Path) -> list[Path]:
    """Download ``wanted`` and, wheel by wheel, all that they require and ``present`` does not name."""
    queue, seen, wheels = list(needed(wanted)), set(present), []
    while queue:
        requirement = queue.pop()
        if (name := canonicalize_name(requirement.name)) in seen:
            continue
        seen.add(name)
        wheels.append(download(requirement, folder))
        queue += needed(_metadata(wheels[-1]).requires or [])
    return wheels


def _metadata(wheel: Path) -> PathDistribution:
    info = next(part for part in ZipPath(wheel).iterdir() if part.name.endswith(".dist-info"))
    return PathDistribution(info)


def collect(folder: Path, limit: int = LIMIT) -> tuple[list[Path], dict[str, str]]:
    """Fill ``folder`` with the wheels.

    Returns:
        The wheels, and the extras that are left out with the reason of each.

    Raises:
        SystemExit: If a wheel cannot be had, or the requirements of the package itself exceed ``limit`` bytes.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    kept = closure(project["dependencies"], set(requirements(MACHINE)), folder)
    left_out = {}
    for extra in EXTRAS:
        present = set(requirements(MACHINE)) | {parse_wheel_filename(wheel.name)[0] for wheel in kept}
        with tempfile.TemporaryDirectory() as apart:
            more = closure(project["optional-dependencies"][extra], present, Path(apart))
            if (total := _size([*kept, *more])) > limit:
                left_out[extra] = f"{_size(more) / 2**20:.1f} MiB more would make {total / 2**20:.1f} MiB"
            else:
                kept += [Path(shutil.move(wheel, folder / wheel.name)) for wheel in more]
    if _size(kept) > limit:
        parts = ", ".join(f"{wheel.name} {_size([wheel]) / 2**20:.1f}" for wheel in sorted(kept))
        raise SystemExit(f"The wheels take {_size(kept) / 2**20:.1f} MiB of at most {limit / 2**20:.0f}: {parts}.")
    return kept, left_out


def _size(wheels: Iterable[Path]) -> int:
    return sum(wheel.stat().st_size for wheel in wheels)


def differences(wheels: Iterable[Path]) -> list[str]:
    """What this Python lacks of the assumed machine or of what the wheels require, or has in another version."""
    carried = {name: version for name, version, *_ in (parse_wheel_filename(wheel.name) for wheel in wheels)}
    asked = [("requirements/gpu-machine.txt", one) for one in requirements(MACHINE).values()]
    asked += [(wheel.name.split("-")[0], one) for wheel in wheels for one in needed(_metadata(wheel).requires or [])]
    found = []
    for by, requirement in asked:
        try:
            here = carried.get(canonicalize_name(requirement.name)) or Version(version(requirement.name))
        except PackageNotFoundError:
            found.append(f"{requirement.name} is missing ({by})")
        else:
            if not requirement.specifier.contains(here.public, prereleases=True):
                found.append(f"{requirement.name} is {here}, expected {requirement.specifier} ({by})")
    return found


def install(folder: Path, site: Path) -> None:
    """Install the wheels and this package into ``site``, without any registry, and say what is not as assumed."""
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise SystemExit(
            f"{folder} holds no wheels. Run `make gpu-wheels` where a package registry is, and bring the folder."
        )
    found = differences(wheels)
    if any(line.startswith("torch is missing") for line in found):
        raise SystemExit(
            f"{sys.executable} has no torch, so this is not the machine of requirements/gpu-machine.txt. "
            f"Name its Python (make PYTHON=...), or remove {folder} to use .venv and a package registry."
        )
    for line in found:
        print(f"not as assumed: {line}", file=sys.stderr)
    shutil.rmtree(site, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    pip += ["--no-build-isolation", "--target", str(site), *map(str, wheels), str(ROOT)]
    subprocess.run(pip, check=True)


def main() -> None:
    """Collect the wheels, or install them with ``--install``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the wheels are")
    parser.add_argument("--install", type=Path, metavar="SITE", help="install them into this folder")
    options = parser.parse_args()
    if options.install:
        install(options.folder, options.install)
        return
    wheels, left_out = collect(options.folder)
    for wheel in sorted(wheels):
        print(f"{wheel.stat().st_size / 2**20:6.1f} MiB  {wheel.name}")
    print(f"{_size(wheels) / 2**20:6.1f} MiB  in {options.folder}, of at most {LIMIT / 2**20:.0f}")
    for extra, reason in left_out.items():
        print(f"left out: {extra} ({reason}); the tests that need it are skipped with its name")


if __name__ == "__main__":
    main()
