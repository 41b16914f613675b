"""The tables of options in docs/agilerl.md, read."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]


PAGE = (ROOT / "docs" / "agilerl.md").read_text(encoding="utf-8")


FAMILIES = {"GRPO": ("grpo", "gspo", "cispo"), "REINFORCE": ("reinforce",), "PPO": ("ppo",)}


class Row(NamedTuple):
    """A row of an option table."""

    section: str
    theirs: list[str]
    of: list[str]
    """Families of algorithms."""
    ours: list[tuple[str, Any]]
    """Names, and the values written with them or None."""
    kind: str
    note: str


def _tables(header: str) -> list[tuple[str, list[str]]]:
    """(section, cells) of every row of the tables with this header."""
    rows, section, inside = [], "", False
    for line in PAGE.splitlines():
        if line.startswith("#"):
            section = line.lstrip("# ")
        inside = line.startswith("|") and (inside or line == header)
        if inside and line != header and not line.startswith("|---"):
            rows.append((section, [cell.strip() for cell in line.strip("|").split("|")]))
    assert rows, header
    return rows


def _spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def _options() -> list[Row]:
    rows = []
    for section, (theirs, ours, kind, note) in _tables("| AgileRL | here | where | note |"):
        of = re.search(r"\(([A-Z, ]+)\)", theirs)
        names = [span.partition("=") for span in _spans(ours)]
        values = [(name, ast.literal_eval(value) if value else None) for name, _, value in names]
        families = of.group(1).split(", ") if of else list(FAMILIES)
        rows.append(Row(section, _spans(theirs), families, values, kind.replace(" ", "_"), note))
    return rows


ROWS = _options()
