"""Adapters to environments of other libraries, one file each, imported when an id names the library."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from agile_trainers.imports import matplotlib_apart, nearest

_EXTRA, _NLTK = "pip install 'agile-trainers[envs]'", "python -m nltk.downloader"


@dataclass(frozen=True)
class Library:
    """A library that provides environments."""

    module: str
    """Name of the adapter's module in this folder. It defines ``make_factory(name, **kwargs)``, and where the names of
    environments are known ``listed()``, and ``knows(name)`` where it does not list all of them."""
    offers: str
    packages: tuple[str, ...]
    """The modules that the adapter imports."""
    install: str = _EXTRA
    also: str = ""
    """Further requirements of some environments."""

    @property
    def adapter(self) -> Any:
        """The imported module of the adapter."""
        return importlib.import_module(f"{__name__}.{self.module}")

    @property
    def is_installed(self) -> bool:
        """True if the library can be imported."""
        return all(importlib.util.find_spec(name) is not None for name in self.packages)

    def load(self) -> Any:
        """Import the library.

        Raises:
            ImportError: If it is not installed. The message names the command that installs it.
        """
        if not self.is_installed:
            raise ImportError(f"{' and '.join(self.packages)} cannot be imported. Run: {self.install}")
        with matplotlib_apart():  # reasoning-gym imports it
            return importlib.import_module(self.packages[-1])

    def listed(self) -> list[str]:
        """Return the names to list; none where they are not known."""
        return self.adapter.listed() if hasattr(self.adapter, "listed") else []

    def knows(self, name: str) -> bool:
        """Return whether there is an environment of this name; True where names are not known."""
        if hasattr(self.adapter, "knows"):
            return self.adapter.knows(name)
        return not hasattr(self.adapter, "listed") or name in self.adapter.listed()


def check_arguments(environment: str, given: Collection[str], known: Collection[str]) -> None:
    """Check that an environment reads all of its arguments; libraries ignore unknown ones, or fail later.

    Args:
        environment: Its id, for the error.
        given: Names of the arguments.
        known: Names that it reads.

    Raises:
        ValueError: If an argument is unknown; the message names the nearest known one.
    """
    for unknown in sorted(set(given) - set(known)):
        near = nearest(unknown, known, count=1) or "."
        raise ValueError(f"{environment} does not read the argument {unknown}{near} It reads: {', '.join(known)}.")


LIBRARIES = {
    "gem": Library(
        "gem", "games, and questions with tools", ("gem",), also=f"Wordle, Hangman, WordSearch: {_NLTK} words"
    ),
    "reasoning_gym": Library("reasoning_gym", "questions without end, each with its own scorer", ("reasoning_gym",)),
    "textarena": Library(
        "textarena",
        "games for one player",
        ("textarena",),
        also=f"Wordle, Hangman, WordLadder, WordSearch: {_NLTK} words averaged_perceptron_tagger_eng universal_tagset",
    ),
    "gymnasium": Library(
        "gymnasium", "text environments, gymnasium:<id>, and your own, gymnasium:my_module:MyEnv-v0", ("gymnasium",)
    ),
    "openenv": Library(
        "openenv",
        "any OpenEnv server, openenv:<url>",
        ("websockets", "httpx"),
    ),
    "trl": Library("trl_tools", "objects whose methods are tools, trl:my_module:MyEnvironment", ("trl",)),
    "verifiers": Library(
        "verifiers",
        "task sets, and environments with their harnesses, verifiers:<task set>",
        ("verifiers", "verifiers.v1"),
        install="pip install 'agile-trainers[verifiers]'",
    ),
}
"""Libraries by the prefix of their ids."""
