"""Checks the mechanical part of the rule for texts: the first sentence says what the thing does.

It holds for docstrings (attributes included), pages, and the help of options, commands and make's targets.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from doc_blocks import MEASURED, PAGES
from sources import forget, nodes, tree

ROOT = Path(__file__).resolve().parents[1]
QUESTION = "What Who Whom Whose Whether How When Where Which Why Do Does Did Is Are Can Could Should Would Will"
CLAUSE = "If Since Because While Although Though Unless Until After Before Once Provided That"
ELLIPSIS = "Those Of As Told"
BANNED = re.compile(rf"(?:{'|'.join(f'{QUESTION} {CLAUSE} {ELLIPSIS}'.split())})\b", flags=re.IGNORECASE)
"""First words of a riddle: a question, a subordinate clause or an elliptic sentence."""
EXCEPTIONS: dict[str, str] = {}
"""Openings that are allowed all the same, and the reason."""
ARGUMENTS_ELSEWHERE = {
    "trainer.MultiTurnTrainer": "it names the arguments in which it differs from TRL's GRPOTrainer",
    "ahead_clock.Process": "it refers to the function beside it for the others",
}
"""Classes and functions whose ``Args:`` may leave parameters out, and the reason."""
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


def documented_arguments(docstring: str | None) -> set[str] | None:
    """The names under ``Args:``, without stars; None without such a section."""
    section = re.search(r"^Args:\n((?: +.*\n?|\n)+)", docstring or "", flags=re.M)
    if section is None:
        return None
    entries = re.findall(r"^ {4}((?:\*{0,2}\w+(?:, )?)+):", section[1], flags=re.M)
    return {name.strip(" *") for entry in entries for name in entry.split(",")}


def parameters(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Parameters of a function, or of a class's constructor; of a class without one, its fields."""
    if isinstance(node, ast.ClassDef):
        for child in node.body:
            if isinstance(child, ast.FunctionDef) and child.name == "__init__":
                return parameters(child)
        fields = (child for child in node.body if isinstance(child, ast.AnnAssign))
        return {ast.unparse(one.target) for one in fields if not re.search(r"KW_ONLY|init=False", ast.unparse(one))}
    every = node.args
    named = [*every.posonlyargs, *every.args, *every.kwonlyargs, every.vararg, every.kwarg]
    return {one.arg for one in named if one is not None} - {"self", "cls"}


def wrong_arguments(among: Iterable[ast.AST], name: str) -> list[str]:
    """Arguments that a docstring documents and the code does not take, and parameters that its ``Args:`` leaves out."""
    wrong = []
    for node in among:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            documented, taken, of = (
                documented_arguments(ast.get_docstring(node)),
                parameters(node),
                f"{name}.{node.name}",
            )
            if documented is None or (isinstance(node, ast.ClassDef) and node.bases and not taken):
                continue  # The constructor of a base takes them.
            wrong += [f"{of} takes no {one!r}" for one in sorted(documented - taken)]
            has_fields = isinstance(node, ast.ClassDef) and "__init__" not in {
                getattr(c, "name", "") for c in node.body
            }
            if not has_fields and of not in ARGUMENTS_ELSEWHERE:  # a field may have a docstring of its own
                wrong += [f"{of} does not document {one!r}" for one in sorted(taken - documented)]
    return wrong


def texts(among: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the docstrings of attributes, and the help and description of options and parsers."""
    for node in among:
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


@pytest.fixture(autouse=True, scope="module")
def _forget() -> Iterator[None]:
    yield
    forget()


def test_docstrings_do_not_open_with_a_riddle() -> None:
    files = _files("agile_trainers", "environments")
    found = [(path, name, text) for path in files for name, text in _documented(tree(path), path.stem)]
    assert [one for one in found if one[2] and is_riddle(one[2])] == []
    # Methods without a docstring override one of a library or a protocol.
    assert [one for one in found if one[2] is None and not re.search(r"\..*\.|\._", one[1])] == []


def test_documented_arguments_are_those_that_are_taken() -> None:
    assert [one for path in _files(*FOLDERS) for one in wrong_arguments(nodes(path), path.stem)] == []


def in_text(source: str) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(source))


def test_a_wrong_argument_is_found() -> None:
    docstring = '"""Text.\n\n    Args:\n        a, b: Both.\n            more: of it.\n        *rest: Others.\n    """'
    function = f"def f(self, a, {{}}, *rest):\n    {docstring}"
    assert wrong_arguments(in_text(function.format("b")), "m") == []
    assert wrong_arguments(in_text(function.format("c")), "m") == ["m.f takes no 'b'", "m.f does not document 'c'"]
    assert wrong_arguments(in_text(f"class A:\n    {docstring}\n    a: int\n    b: int"), "m") == [
        "m.A takes no 'rest'"
    ]


def test_help_texts_and_attributes_do_not_open_with_a_riddle() -> None:
    found = {path: list(texts(nodes(path))) for path in _files(*FOLDERS)}
    assert sum(map(len, found.values())) > 300
    assert [(path.name, text) for path, all_ in found.items() for text in all_ if is_riddle(text)] == []


def test_pages_open_with_a_statement() -> None:
    wrong = {}
    for page in (*PAGES, *MEASURED, ROOT / "AGENTS.md", ROOT / "CHANGELOG.md"):
        title, opening = re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.S).split("\n\n")[:2]
        if not (title.startswith("# ") and re.match(r"[A-Z`\[\*a-z]", opening)) or is_riddle(opening.lstrip("*`[")):
            wrong[page] = title, opening
    assert wrong == {}


def test_targets_of_make_say_what_they_do() -> None:
    helps = re.findall(r"## (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M)
    assert len(helps) > 15 and not [text for text in helps if is_riddle(text)]


@pytest.mark.parametrize("text", ["What it does.", "whether to save", "If set, saves.", "Once per step, saves."])
def test_riddles_are_found(text: str) -> None:
    assert is_riddle(text) and list(texts(in_text(f"parser.add_argument('--x', help={text!r})"))) == [text]
