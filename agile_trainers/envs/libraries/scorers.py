"""Scores answers by data sets of reasoning-gym that may evaluate them; runs in an isolated process, see ``isolation/``.

Nine scorers hand an answer to ``eval`` or to sympy's ``parse_expr``, which evaluates too. An answer that is not written in
the grammar that its data set needs scores 0 before that: such an answer is no solution, even where the scorer would
be talked into paying for it (``len('')`` among the numbers, an unevaluated ``Integral``).
"""

from __future__ import annotations

import ast
import functools
import json
import random
import re
import sys
from types import ModuleType
from typing import Any

LITERALS = ("n_queens", "spiral_matrix", "binary_matrix", "string_insertion")
"""Their scorers call ``eval`` on what is not the answer itself, to read a list."""
FORMULAS = ("simple_integration", "intermediate_integration", "polynomial_multiplication")
"""Their scorers call ``parse_expr``."""
PUZZLES = ("countdown", "puzzle24")
"""Likewise, and then look for the numbers in the text."""
_WRONG = {"countdown": 0.05, "puzzle24": 0.01}
"""What their scorers pay for the right numbers with another value."""
EVALUATING = (*LITERALS, *FORMULAS, *PUZZLES)

_FUNCTIONS = {"Abs", "C", "E", "I", "acos", "acosh", "acot", "asin", "asinh", "atan", "atanh", "cos", "cosh", "cot", "csc",
              "erf", "exp", "ln", "log", "pi", "sec", "sin", "sinh", "sqrt", "tan", "tanh"}  # fmt: skip
_FORMULA = re.compile(r"(?:\d+(?:\.\d*)?|\.\d+|[A-Za-z_]\w*|[-+*/(),\s])*", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_PUZZLE = re.compile(r"(?:\d+|[-+*/()\s])*", re.ASCII)
_LITERAL_NODES = (ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Load, ast.UnaryOp, ast.USub, ast.UAdd)
_LONGEST = 10_000
"""Characters of an answer that are looked at."""


def prepare() -> None:
    """Load the packages before the clock of a call starts."""
    # One data set draws automata; matplotlib, which comes with that, wants a folder to write to.
    sys.modules.setdefault("cellpylib", ModuleType("cellpylib"))
    import reasoning_gym  # noqa: F401


def score(name: str, settings: str, answer: str | None, entry: dict[str, Any]) -> float:
    """A data set's own score of an answer; 0 for one that it cannot digest or that is not in its grammar.

    Args:
        name: The data set.
        settings: Its settings as JSON.
        answer: The answer.
        entry: The question, with all that the data set made.
    """
    data_set = _data_set(name, settings)
    if answer is not None and name in EVALUATING and not is_in_grammar(name, answer, entry):
        return float(answer.strip() == str(entry["answer"]).strip())
    found = evaluate(data_set, answer, entry)
    return _WRONG[name] if found == 1.0 and name in PUZZLES and not _is_exact(str(answer), entry) else found


def evaluate(data_set: Any, answer: str | None, entry: dict[str, Any]) -> float:
    """The score, whatever the answer does; a few scorers draw at random."""
    import numpy

    random.seed(0)
    numpy.random.seed(0)
    try:
        return float(data_set.score_answer(answer=answer, entry=entry))
    except MemoryError:
        raise
    except Exception:  # some scorers assume the answer's format; a model's answer may have any
        return 0.0


def is_in_grammar(name: str, answer: str, entry: dict[str, Any]) -> bool:
    """Whether an answer is written in what the scorer of its data set is meant to read."""
    if len(answer) > _LONGEST:
        return False
    if name in LITERALS:
        return _is_literal(answer)
    if name in FORMULAS:
        known = _FUNCTIONS | set(_NAME.findall(str(entry["answer"]))) | set(_NAME.findall(str(_variables(entry))))
        return bool(_FORMULA.fullmatch(answer)) and known.issuperset(_NAME.findall(answer))
    if not _PUZZLE.fullmatch(answer) or "**" in answer or "//" in answer:
        return False
    return sorted(map(int, re.findall(r"\d+", answer))) == sorted(entry["metadata"]["numbers"])


def _is_exact(answer: str, entry: dict[str, Any]) -> bool:
    """Whether a puzzle's answer has the value to the last digit: one scorer rounds down, one up to a hundred-thousandth."""
    from sympy.parsing.sympy_parser import parse_expr

    return bool(parse_expr(answer) == entry["metadata"].get("target", 24))


def _is_literal(answer: str) -> bool:
    """Whether ``eval`` reads it as a literal, or not at all."""
    try:
        tree = ast.parse(answer.lstrip(" \t"), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    return all(isinstance(node, _LITERAL_NODES) for node in ast.walk(tree))


def _variables(entry: dict[str, Any]) -> list[str]:
    metadata = entry["metadata"]
    return [str(metadata.get("variable", "")), *map(str, metadata.get("variables") or ())]


@functools.lru_cache(maxsize=64)
def _data_set(name: str, settings: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, **json.loads(settings))
