"""Checks the mechanical part of the rule for docstrings: their first sentence says what the thing does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BANNED = re.compile(r"(?:What|Who|Whose|Whether|How|When|Where|Which|Why|Does|Is|Are|Those|Of|As|Told)\b")
"""First words of a riddle: a question, a subordinate clause or an elliptic sentence."""


def _documented(node: ast.AST, name: str) -> Iterator[tuple[str, str | None]]:
    """Yield name and docstring of a module, its classes and functions; those inside functions are left out."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        yield name, ast.get_docstring(node)
    if isinstance(node, (ast.Module, ast.ClassDef)):
        for child in node.body:
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from _documented(child, f"{name}.{child.name}")


def _files() -> list[Path]:
    return [*(ROOT / "agile_trainers").rglob("*.py"), *(ROOT / "environments").rglob("*.py")]


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_do_not_open_with_a_riddle(path: Path) -> None:
    found = list(_documented(ast.parse(path.read_text(encoding="utf-8")), path.stem))
    assert [(name, text) for name, text in found if text and BANNED.match(text)] == []
    # Methods without a docstring override one of a library or a protocol.
    public = [(name, text) for name, text in found if not re.search(r"\..*\.|\._", name)]
    assert [name for name, text in public if text is None] == []
