"""Skips what asks for a library that is not installed: `make test-newest` and `test-lowest` begin without extras."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from agile_trainers.envs.libraries import LIBRARIES

ASKED_BY = {
    **{f"{name}:": library.packages for name, library in LIBRARIES.items()},
    "import evaluate": ("evaluate",),
    "--metric": ("evaluate",),
    "import requests": ("requests",),
    "BitsAndBytesConfig": ("bitsandbytes",),
}
"""Parts of a command or of code, and the modules that they need."""


def needs(module: str) -> None:
    """Skip the test that runs, or the file, where a library is not installed.

    Nothing is imported: that may write to the home folder, and takes every worker the seconds of the file's tests alone.
    """
    if find_spec(module) is None:
        pytest.skip(f"{module} is not installed: pip install 'agile-trainers[dev]'", allow_module_level=True)


def skip_without_libraries(text: str) -> None:
    """Skip the test that runs where it reads a library that is not installed."""
    for asked, modules in ASKED_BY.items():
        for module in modules if asked in text else ():
            needs(module)
