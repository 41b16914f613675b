"""``agile-trainers envs``: lists the environments, and the packages that further ones need."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agile_environments import TASKS
from agile_trainers.envs.libraries import LIBRARIES
from agile_trainers.envs.registry import list_environments

_ABOUT = "Lists the environments, and the packages that further ones need."


def main(argv: Sequence[str], console: Console | None = None) -> int:
    """List the environments.

    Args:
        argv: Empty, or a text: the ids that contain it are listed, one per line.
        console: Console for the list.

    Returns:
        The exit code: 1 if no id contains the text.
    """
    parser = argparse.ArgumentParser(prog="agile-trainers envs", description=_ABOUT)
    parser.add_argument("text", nargs="?", help="list every id that contains this text, for example gem or Sudoku")
    text, console = parser.parse_args(argv).text, console or Console()
    ids = list_environments()
    if text is not None:
        found = [name for name in ids if text.lower() in name.lower()]
        for name in found or [f"No environment's id contains {text!r}; agile-trainers envs lists all."]:
            console.print(name, markup=False, highlight=False, soft_wrap=True)
        return 0 if found else 1
    console.print(_tasks(ids), _libraries(ids))
    console.print(
        "\nmodule.path:Name is any class or function of your own, agent:module.path:function an agent. agile-trainers envs "
        "TEXT lists the ids that contain TEXT, "
        "agile-trainers play --environment ID plays one.",
        markup=False,
        highlight=False,
    )
    return 0


def _tasks(ids: Sequence[str]) -> Table:
    table = Table("ready task", "", box=None, pad_edge=False)
    for name, where in TASKS.items():
        summary = (importlib.import_module(where.partition(":")[0]).__doc__ or "").partition(" See README.md")[0]
        table.add_row(f"agile:{name}", Text(summary))
    probes = [name for name in ids if name.startswith("agile:probe/")]
    table.add_row("agile:probe/...", f"{len(probes)} probes: small tasks, each of which detects one kind of bug.")
    for name in ids:
        if ":" not in name:
            table.add_row(name, "registered by register_environment")
    return table


def _libraries(ids: Sequence[str]) -> Table:
    table = Table("\nlibrary", "\nenvironments", "\noffers", box=None, pad_edge=False)
    for prefix, library in LIBRARIES.items():
        installed = library.is_installed
        count = sum(name.startswith(f"{prefix}:") for name in ids)
        state = (f"{count} listed" if count else "installed") if installed else "not installed"
        needs = (
            (f"For {library.also}" if installed else f"Run: {library.install}") if library.also or not installed else ""
        )
        table.add_row(prefix, state, Text(f"{library.offers}\n{needs}".strip()))
    return table
