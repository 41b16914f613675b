"""Scores answers with reasoning-gym data sets that may evaluate them; runs in an isolated process, see ``isolation/``.

Nine scorers pass an answer to ``eval`` or to sympy's ``parse_expr``, which evaluates too. An answer that is not in the
grammar of its data set scores 0 before that. Such an answer is not a solution, even if the scorer would accept it
(``len('')`` among the numbers, an unevaluated ``Integral``).
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
"""Data sets whose scorers call ``eval`` to read a list."""
FORMULAS = ("simple_integration", "intermediate_integration", "polynomial_multiplication")
"""Data sets whose scorers call ``parse_expr``."""
PUZZLES = ("countdown", "puzzle24")
"""Data sets whose scorers call ``parse_expr`` and then search the text for the numbers."""
_WRONG = {"countdown": 0.05, "puzzle24": 0.01}
"""Score of each data set for the right numbers with a wrong value."""
EVALUATING = (*LITERALS, *FORMULAS, *PUZZLES)

_FUNCTIONS = {"Abs", "C", "E", "I", "acos", "acosh", "acot", "asin", "asinh", "atan", "atanh", "cos", "cosh", "cot", "csc",
              "erf", "exp", "ln", "log", "pi", "sec", "sin", "sinh", "sqrt", "tan", "tanh"}  # fmt: skip
_FORMULA = re.compile(r"(?:\d+(?:\.\d*)?|\.\d+|[A-Za-z_]\w*|[-+*/(),\s])*", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_PUZZLE = re.compile(r"(?:\d+|[-+*/()\s])*", re.ASCII)
_LITERAL_NODES = (ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Load, ast.UnaryOp, ast.USub, ast.UAdd)
_LONGEST = 10_000
"""Maximum number of characters of an answer."""


def prepare() -> None:
    """Load the packages before the clock of a call starts."""
    # One data set draws automata with matplotlib, which needs a writable folder.
    sys.modules.setdefault("cellpylib", ModuleType("cellpylib"))
    import reasoning_gym  # noqa: F401


def score(name: str, settings: str, answer: str | None, entry: dict[str, Any]) -> float:
    """Score an answer with its data set; 0 if the scorer raises or the answer is not in the grammar.

    Args:
        name: The data set.
        settings: The data set's settings as JSON.
        answer: The answer.
        entry: The data set's item, with question and metadata.
    """
    data_set = _data_set(name, settings)
    if answer is not None and name in EVALUATING and not is_in_grammar(name, answer, entry):
        return float(answer.strip() == str(entry["answer"]).strip())
    found = evaluate(data_set, answer, entry)
    return _WRONG[name] if found == 1.0 and name in PUZZLES and not _is_exact(str(answer), entry) else found


def evaluate(data_set: Any, answer: str | None, entry: dict[str, Any]) -> float:
    """Return the score, 0 if the scorer raises; a few scorers use random numbers."""
    import numpy

    random.seed(0)
    numpy.random.seed(0)
    try:
        return float(data_set.score_answer(answer=answer, entry=entry))
    except MemoryError:
        raise
    except Exception:  # some scorers assume a format of the answer
        return 0.0


def is_in_grammar(name: str, answer: str, entry: dict[str, Any]) -> bool:
    """Return whether an answer is in the grammar that its data set's scorer expects."""
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
    """Return whether a puzzle's answer has the exact value; one scorer rounds down, one has a tolerance of 1e-5."""
    from sympy.parsing.sympy_parser import parse_expr

    return bool(parse_expr(answer) == entry["metadata"].get("target", 24))


def _is_literal(answer: str) -> bool:
    """Return whether ``eval`` would read the answer as a literal or raise a syntax error."""
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
