"""Options are described once, at their fields: docstrings, ``--help`` and the tables in ``docs/`` are made from them."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOConfig

from agile_trainers.cli.check.command import CheckArguments
from agile_trainers.cli.train import MultiTurnScriptArguments
from agile_trainers.config.options import changed_default, default_of, option, own_options, with_args

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))

from option_tables import CONFIGS, DOCS, option_table, with_tables

DESCRIBED = [*CONFIGS.values(), CheckArguments, MultiTurnScriptArguments]


@with_args
@dataclass
class Parent:
    """Settings."""

    size: int = option(3, "How large it is.")
    names: list[str] = option([], "What it is called: `a||b`.")
    limit: float | None = option(None, "How far it goes. Default: to the end.")


@with_args
@dataclass
class Child(Parent):
    """Other settings."""

    size: int = changed_default(Parent, "size", 5, "Children are larger.")


def test_a_description_makes_docstring_and_table() -> None:
    assert Parent.__doc__ == (
        "Settings.\n\nArgs:\n    size: How large it is.\n    names: What it is called: `a||b`.\n"
        "    limit: How far it goes. Default: to the end.\n"
    )
    assert option_table(Parent).splitlines()[2:] == [
        "| `size` | `3` | How large it is. |",
        r"| `names` | none | What it is called: `a\|\|b`. |",
        "| `limit` | to the end | How far it goes. |",
    ]
    assert Parent().names is not Parent().names
    assert option_table(Child).splitlines()[2:] == ["| `size` | `5` | How large it is. Children are larger. |"]
    assert (Child().size, Child().limit) == (5, None)


@pytest.mark.parametrize("config", DESCRIBED)
def test_every_option_is_described(config: Any) -> None:
    options = own_options(config)
    assert options
    for one in options:
        help = one.metadata["help"]
        assert re.match(r"[A-Z`]", help) and help.endswith("."), one.name
        assert "%" not in help, one.name  # argparse would read it as a format
        if "Default: " in help:
            assert default_of(one) is None and help.count("Default: ") == 1, one.name
        assert f"    {one.name}: " in config.__doc__


def test_no_option_of_ours_is_left_out() -> None:
    trl = {one.name for one in fields(GRPOConfig)}
    for config in CONFIGS.values():
        described = {one.name for base in config.__mro__ if base in DESCRIBED for one in own_options(base)}
        assert {one.name for one in fields(config)} - trl <= described


def test_every_option_is_set_by_a_test() -> None:
    """As a keyword, a key or an option of the command line; that it changes something, the test itself shows."""
    tests = "".join(path.read_text() for path in (DOCS.parent / "tests").rglob("*.py"))
    ours = {one.name for config in CONFIGS.values() for one in own_options(config)}
    found = re.findall(r"\b(\w+)=|\"(?:--)?(\w+)\"|\b(\w+): ", tests)
    assert ours - {name for one in found for name in one} == set()


def test_every_option_of_ours_has_its_reason_on_a_page() -> None:
    """A sentence outside the tables of options, and not only the name of AgileRL's option that it stands for."""
    trl = {one.name for one in fields(GRPOConfig)}
    pages = (path.read_text() for path in (*DOCS.rglob("*.md"), DOCS.parent / "README.md") if path.name != "agilerl.md")
    prose = "".join(re.sub(r"<!-- begin: options of .*?<!-- end -->", "", page, flags=re.S) for page in pages)
    ours = {one.name for config in CONFIGS.values() for one in own_options(config)} - trl
    assert len(ours) > 50
    assert not {name for name in ours if not re.search(rf"\b{name}\b", prose)}


def test_tables_in_the_docs_are_up_to_date() -> None:
    """``make docs-tables`` writes them."""
    pages = {path.name: path.read_text() for path in DOCS.glob("*.md")}
    shown = re.findall(r"<!-- begin: options of (\w+) -->", "".join(pages.values()))
    assert sorted(shown) == sorted(CONFIGS)
    assert {name: with_tables(page) for name, page in pages.items()} == pages


def test_a_table_that_is_out_of_date_is_written_anew() -> None:
    page = "Before.\n<!-- begin: options of MultiTurnCISPOConfig -->\n| old |\n<!-- end -->\nAfter.\n"
    table = option_table(CONFIGS["MultiTurnCISPOConfig"])
    assert with_tables(page) == page.replace("| old |", table)
