"""Checks the mechanical part of the rule for texts: the first sentence says what the thing does.

It holds for docstrings (attributes included), pages, and the help of options, commands and make's targets.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_blocks import PAGES

ROOT = Path(__file__).resolve().parents[1]
QUESTION = "What Who Whom Whose Whether How When Where Which Why Do Does Did Is Are Can Could Should Would Will"
CLAUSE = "If Since Because While Although Though Unless Until After Before Once Provided That"
ELLIPSIS = "Those Of As Told"
BANNED = re.compile(rf"(?:{'|'.join(f'{QUESTION} {CLAUSE} {ELLIPSIS}'.split())})\b", flags=re.IGNORECASE)
"""First words of a riddle: a question, a subordinate clause or an elliptic sentence."""
EXCEPTIONS: dict[str, str] = {}
"""Openings that are allowed all the same, and the reason."""
FOLDERS = ("agile_trainers", "environments", "examples", "benchmarks", "docs")


def is_riddle(text: str) -> bool:
    return bool(BANNED.match(text)) and not any(text.startswith(opening) for opening in EXCEPTIONS)


def _documented(node: ast.AST, name: str) -> Iterator[tuple[str, str | None]]:
    """Yield name and docstring of a module, its classes and functions; those inside functions are left out."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        yield name, ast.get_docstring(node)
    if isinstance(node, (ast.Module, ast.ClassDef)):
        for child in node.body:
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from _documented(child, f"{name}.{child.name}")


def _literal(node: ast.AST) -> str | None:
    """The text of a string, with ``{}`` for what a format string fills in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return None


def texts(tree: ast.AST) -> Iterator[str]:
    """Yield the docstrings of attributes, and the help and description of options and parsers."""
    for node in ast.walk(tree):
        found: list[ast.AST] = []
        if isinstance(node, ast.Expr):
            found = [node.value]
        elif isinstance(node, ast.Call):
            found = [word.value for word in node.keywords if word.arg in ("help", "description", "epilog")]
            if getattr(node.func, "id", "") == "option":
                found += node.args[1:2]
        yield from (text for one in found if (text := _literal(one)))


def _files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", _files("agile_trainers", "environments"), ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_do_not_open_with_a_riddle(path: Path) -> None:
    found = list(_documented(ast.parse(path.read_text(encoding="utf-8")), path.stem))
    assert [(name, text) for name, text in found if text and is_riddle(text)] == []
    # Methods without a docstring override one of a library or a protocol.
    public = [(name, text) for name, text in found if not re.search(r"\..*\.|\._", name)]
    assert [name for name, text in public if text is None] == []


def test_help_texts_and_attributes_do_not_open_with_a_riddle() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in _files(*FOLDERS)}
    found = {path: list(texts(tree)) for path, tree in trees.items()}
    assert sum(map(len, found.values())) > 300
    assert [(path.name, text) for path, all_ in found.items() for text in all_ if is_riddle(text)] == []


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "AGENTS.md", ROOT / "CHANGELOG.md"], ids=lambda path: str(path.relative_to(ROOT))
)
def test_pages_open_with_a_statement(page: Path) -> None:
    title, opening = re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.S).split("\n\n")[:2]
    assert title.startswith("# ") and re.match(r"[A-Z`\[\*a-z]", opening), opening
    assert not is_riddle(opening.lstrip("*`["))


def test_targets_of_make_say_what_they_do() -> None:
    helps = re.findall(r"## (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M)
    assert len(helps) > 15 and not [text for text in helps if is_riddle(text)]


@pytest.mark.parametrize("text", ["What it does.", "whether to save", "If set, saves.", "Once per step, saves."])
def test_riddles_are_found(text: str) -> None:
    assert is_riddle(text) and list(texts(ast.parse(f"parser.add_argument('--x', help={text!r})"))) == [text]
