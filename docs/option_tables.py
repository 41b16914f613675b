"""Write the tables of options and the list of files in ``docs/`` from the source (``make docs-tables``)."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from agile_trainers.trainers import MultiTurnConfig
from agile_trainers.trainers.algorithms import ALGORITHMS, find_algorithm
from agile_trainers.trainers.options import option_table

DOCS = Path(__file__).resolve().parent
CONFIGS: dict[str, type] = {
    config.__name__: config for config in [MultiTurnConfig, *(find_algorithm(name).config_class for name in ALGORITHMS)]
}
"""What has a table on some page, by the name that the page gives it."""
PACKAGE = DOCS.parent / "agile_trainers"
PARTS = (
    "types.py", "imports.py", "embedded.py", "train_batch.py", "objectives", "adapters", "envs", "rollout", "sampling",
    "checkpoints", "trainers", "cli",
)  # fmt: skip
"""The parts of the package, those that others import first; what is not named here comes last."""
_TABLE = re.compile(r"(<!-- begin: options of (\w+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)
_FILES = re.compile(r"(<!-- begin: files of agile_trainers -->\n).*?(<!-- end -->)", flags=re.DOTALL)


def with_tables(page: str) -> str:
    """A page with its tables as the fields have them.

    Args:
        page: Markdown with ``<!-- begin: options of MultiTurnGRPOConfig -->`` and ``<!-- end -->`` around each table, or
            ``files of agile_trainers`` around the list of files.
    """
    page = _TABLE.sub(lambda found: f"{found[1]}{option_table(CONFIGS[found[2]])}\n{found[3]}", page)
    return _FILES.sub(lambda found: f"{found[1]}{file_list()}\n{found[2]}", page)


def file_list() -> str:
    """A line for every file of the package, part by part: its path and the first sentence of its docstring."""

    def place(path: Path) -> tuple[int, int, Path]:
        part = path.relative_to(PACKAGE).parts[0]
        number = PARTS.index(part) if part in PARTS else len(PARTS)
        return (-1 if path.parent == PACKAGE and path.stem == "__init__" else number), path.stem != "__init__", path

    lines = []
    for path in sorted(PACKAGE.rglob("*.py"), key=lambda path: (place(path)[0], path.parent, *place(path)[1:])):
        text = " ".join(
            (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n\n")[0].split()
        )
        first = re.split(r"(?<=[.?]) (?=[A-Z`])", text)[0]
        lines.append(f"- `{path.relative_to(PACKAGE)}`: {first}")
    return "\n".join(lines)


def main() -> int:
    """Write every page whose tables are out of date, and name it."""
    for path in sorted(DOCS.glob("*.md")):
        page = path.read_text(encoding="utf-8")
        if with_tables(page) != page:
            path.write_text(with_tables(page), encoding="utf-8")
            print(f"Written: {path.relative_to(DOCS.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
