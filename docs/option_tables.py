"""Write the tables of options and the list of files in ``docs/`` from the source (``make docs-tables``)."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from agile_trainers.config.options import default_of, own_options
from agile_trainers.trainers import MultiTurnConfig
from agile_trainers.trainers.registry import ALGORITHMS, find_algorithm

DOCS = Path(__file__).resolve().parent
_CLASSES: list[type] = [MultiTurnConfig]
_CLASSES += (find_algorithm(name).config_class for name in ALGORITHMS)
CONFIGS = {config.__name__: config for config in _CLASSES}
"""Configurations with a table on some page, by the name that the page gives them."""
PACKAGE = DOCS.parent / "agile_trainers"
_TABLE = re.compile(r"(<!-- begin: options of (\w+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)
_FILES = re.compile(r"(<!-- begin: files of agile_trainers -->\n).*?(<!-- end -->)", flags=re.DOTALL)


def option_table(config: type) -> str:
    """Write a markdown table of the options that a dataclass declares: name, default and description."""
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for one in own_options(config):
        default = default_of(one)
        text, _, stands_for = one.metadata["help"].partition(" Default: ")
        shown = stands_for.rstrip(".") if stands_for else "none" if default in (None, []) else f"`{default}`"
        rows.append(f"| `{one.name}` | {shown} | {text} |".replace("||", r"\|\|"))
    return "\n".join(rows)


def with_tables(page: str) -> str:
    """A page with its tables as the fields have them.

    Args:
        page: Markdown with ``<!-- begin: options of MultiTurnGRPOConfig -->`` and ``<!-- end -->`` around each table, or
            ``files of agile_trainers`` around the list of files.
    """
    page = _TABLE.sub(lambda found: f"{found[1]}{option_table(CONFIGS[found[2]])}\n{found[3]}", page)
    return _FILES.sub(lambda found: f"{found[1]}{file_list()}\n{found[2]}", page)


def order_of_imports() -> list[set[str]]:
    """The parts of the package, level by level from what others import, as ``AGENTS.md`` states them."""
    rules = (DOCS.parent / "AGENTS.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^ *`((?:[\w, ]+ <- )+[\w, ]+)`", rules, flags=re.MULTILINE)
    return [set(level.split(", ")) for level in line.split(" <- ")]


def file_list() -> str:
    """A line for every file of the package, level by level: its path and the first sentence of its docstring."""
    levels = [{"__init__"}, *order_of_imports()]

    def place(path: Path) -> tuple[int, Path, bool, Path]:
        part = path.relative_to(PACKAGE).with_suffix("").parts[0]
        level = next((number for number, level in enumerate(levels) if part in level), len(levels))
        return level, path.parent, path.stem != "__init__", path

    lines = []
    for path in sorted(PACKAGE.rglob("*.py"), key=place):
        paragraph = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n\n")[0]
        first = re.split(r"(?<=[.?]) (?=[A-Z`])", " ".join(paragraph.split()))[0]
        text = re.sub(r":\w+:`|``", "`", first)
        lines.append(f"- `{path.relative_to(PACKAGE)}`: {text}")
    return "\n".join(lines)


def main() -> int:
    """Write every page whose tables are out of date, and name it."""
    for path in sorted(DOCS.rglob("*.md")):
        page = path.read_text(encoding="utf-8")
        if with_tables(page) != page:
            path.write_text(with_tables(page), encoding="utf-8")
            print(f"Written: {path.relative_to(DOCS.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
