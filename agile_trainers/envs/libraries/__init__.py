"""Adapters to environments of other libraries, one file each, imported when an id names the library."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

_EXTRA, _NLTK = "pip install 'agile-trainers[envs]'", "python -m nltk.downloader"


@dataclass(frozen=True)
class Library:
    """A library that provides environments."""

    module: str
    """Name of the adapter's module in this folder. It defines ``is_installed()``, ``listed()`` (names to list),
    ``knows(name)`` and ``make_factory(name, **kwargs)``."""
    offers: str
    install: str = _EXTRA
    also: str = ""
    """Further requirements of some environments."""

    @property
    def adapter(self) -> Any:
        """The imported module of the adapter."""
        return importlib.import_module(f"{__name__}.{self.module}")


LIBRARIES = {
    "gem": Library("gem", "games, and questions with tools", also=f"Wordle, Hangman, WordSearch: {_NLTK} words"),
    "reasoning_gym": Library("reasoning_gym", "questions without end, each with its own scorer"),
    "textarena": Library(
        "textarena",
        "games for one player",
        also=f"Wordle, Hangman, WordLadder, WordSearch: {_NLTK} words averaged_perceptron_tagger_eng universal_tagset",
    ),
    "gymnasium": Library("gymnasium", "text environments, gymnasium:<id>, and your own, gymnasium:my_module:MyEnv-v0"),
    "openenv": Library("openenv", "any OpenEnv server, openenv:<url>"),
    "trl": Library("trl_tools", "objects whose methods are tools, trl:my_module:MyEnvironment"),
    "verifiers": Library(
        "verifiers", "task sets of one answer, verifiers:<task set>", install="pip install 'verifiers>=0.4'"
    ),
}
"""Libraries by the prefix of their ids."""
