"""Source files as syntax trees. Reading one takes ten times as long as going through it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file, as ``ast.walk`` yields them."""
    return tuple(ast.walk(tree(path)))


def forget() -> None:
    """Later collections of garbage would go through half a million nodes."""
    tree.cache_clear()
    nodes.cache_clear()
