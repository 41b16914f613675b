"""Finds the packages, two of which lie in folders of another name. All else is in pyproject.toml."""

from setuptools import find_packages, setup

FOLDERS = {
    "agile_trainers": "agile_trainers",
    "agile_environments": "environments",
    "agile_trainers.accelerate_configs": "accelerate_configs",
}

setup(
    package_dir=FOLDERS,
    packages=[*FOLDERS, *(f"{name}.{part}" for name, folder in FOLDERS.items() for part in find_packages(folder))],
)
