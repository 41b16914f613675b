"""The architecture page answers a reader's questions, which were written before it, with a file that defines the answer."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
QUESTIONS = (ROOT / "tests/reader_questions.txt").read_text(encoding="utf-8").splitlines()


def defined(file: Path) -> set[str]:
    """Functions and classes of a file, and methods as ``Class.method``."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    top = [node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, kinds)]
    methods = {
        f"{node.name}.{own.name}"
        for node in top
        if isinstance(node, ast.ClassDef)
        for own in node.body
        if isinstance(own, kinds)
    }
    return {node.name for node in top} | methods


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_leads_to_a_file_that_defines_the_answer(question: str) -> None:
    (answer,) = re.findall(rf"^\| {re.escape(question)} \| `([\w/]+\.py)` \| `([\w.]+)` \|$", PAGE, flags=re.M)
    file, name = answer
    assert name in defined(ROOT / "agile_trainers" / file)


def test_the_page_is_two_pages_long() -> None:
    assert len(QUESTIONS) == 20 and len(PAGE.splitlines()) <= 100


def test_folders_are_listed_in_the_order_of_imports() -> None:
    table = PAGE.partition("| folder |")[2].partition("## Where")[0]
    listed = [
        re.findall(r"`(\w+)(?:\.py|/)`", row.split("|")[1]) for row in table.splitlines() if row.startswith("| `")
    ]
    (line,) = re.findall(
        r"^ *`((?:[\w, ]+ <- )+[\w, ]+)`", (ROOT / "AGENTS.md").read_text(encoding="utf-8"), flags=re.M
    )
    level_of = {part: number for number, level in enumerate(line.split(" <- ")) for part in level.split(", ")}
    order = [level_of[part] for row in listed for part in row]
    assert order == sorted(order) and {part for row in listed for part in row} == level_of.keys()
