"""Scores answers with reasoning-gym's data sets, without executing an answer.

Nine scorers pass an answer to ``eval`` or to sympy's ``parse_expr``, which evaluates too; they run in an isolated process,
see ``isolation/``. In place of ``eval`` they get ``ast.literal_eval``. An answer that is not in the grammar of its data set
scores 0 before that. Such an answer is not a solution, even if the scorer would accept it (``len('')`` among the numbers, an
unevaluated ``Integral``).
"""

from __future__ import annotations

import ast
import functools
import json
import math
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
SLOW = ("propositional_logic",)
"""Data sets whose scorers take exponential time for some answers; they run in the isolated process too."""
NUMBERS = ("complex_arithmetic",)
"""Data sets whose scorers give 1 for the answer ``nan``, since a comparison with it is false."""
UNGRADED = ("game_of_life_halting",)
"""Data sets whose scorers pay any text; the answer must be the data set's own."""

_FUNCTIONS = {"Abs", "C", "E", "I", "acos", "acosh", "acot", "asin", "asinh", "atan", "atanh", "cos", "cosh", "cot", "csc",
              "erf", "exp", "ln", "log", "pi", "sec", "sin", "sinh", "sqrt", "tan", "tanh"}  # fmt: skip
# Possessive: a number or name can be read in one way only, so that no text makes the search go back.
_FORMULA = re.compile(r"(?:\d++(?:\.\d*+)?|\.\d++|[A-Za-z_]\w*+|[-+*/(),\s])*+", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_PUZZLE = re.compile(r"[-+*/()\s\d]*", re.ASCII)
_LITERAL_NODES = (ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Load, ast.UnaryOp, ast.USub, ast.UAdd)
_NAN = re.compile("nan", re.IGNORECASE)
_LONGEST = 10_000
"""Maximum number of characters of an answer, if the data set's own is not longer than half of it."""


def prepare() -> None:
    """Load the packages before the clock of a call starts."""
    # One data set draws automata with matplotlib, which needs a writable folder.
    sys.modules.setdefault("cellpylib", ModuleType("cellpylib"))
    import reasoning_gym  # noqa: F401


def score(name: str, settings: str, answer: str | None, entry: dict[str, Any]) -> float:
    """Make a data set from its name and its settings as JSON, and score an answer as :func:`evaluate` does."""
    return evaluate(name, _data_set(name, settings), answer, entry)


def item(name: str, settings: str, number: int) -> dict[str, Any]:
    """Make a data set as :func:`score` does, and return one of its items."""
    import numpy

    random.seed(number)
    numpy.random.seed(number)
    return dict(_data_set(name, settings)[number])


def evaluate(name: str, data_set: Any, answer: str | None, entry: dict[str, Any]) -> float:
    """Return a data set's score of an answer, between 0 and 1; 0 if the scorer raises or the grammar has no such answer.

    Args:
        name: The data set's name.
        data_set: The data set.
        answer: The answer; None if the completion has none.
        entry: The data set's item, with question and metadata.
    """
    import numpy

    if answer is not None and not is_in_grammar(name, answer, entry):
        return float(answer.strip() == str(entry["answer"]).strip())
    random.seed(0)  # a few scorers use random numbers
    numpy.random.seed(0)
    try:
        found = float(data_set.score_answer(answer=answer, entry=entry))
        if found == 1.0 and name in PUZZLES and not _is_exact(str(answer), entry):
            return _WRONG[name]
    except MemoryError:
        raise
    except Exception:  # some scorers assume a format of the answer
        return 0.0
    return min(max(found, 0.0), 1.0) if math.isfinite(found) else 0.0


def is_in_grammar(name: str, answer: str, entry: dict[str, Any]) -> bool:
    """Return whether an answer is in the grammar that its data set's scorer expects."""
    if len(answer) > max(_LONGEST, 2 * len(str(entry["answer"]))):
        return False
    if name in UNGRADED:
        return False
    if name in LITERALS:
        return _is_literal(answer)
    if name in NUMBERS:
        return not _NAN.search(answer)
    if name in FORMULAS:
        known = _FUNCTIONS | set(_NAME.findall(str(entry["answer"]))) | set(_NAME.findall(str(_variables(entry))))
        return bool(_FORMULA.fullmatch(answer)) and known.issuperset(_NAME.findall(answer))
    if name not in PUZZLES:
        return True
    if not _PUZZLE.fullmatch(answer) or "**" in answer or "//" in answer:
        return False
    return sorted(map(int, re.findall(r"\d+", answer))) == sorted(entry["metadata"]["numbers"])


def _is_exact(answer: str, entry: dict[str, Any]) -> bool:
    """Return whether a puzzle's answer has the exact value; one scorer rounds down, one has a tolerance of 1e-5."""
    from sympy.parsing.sympy_parser import parse_expr

    return bool(parse_expr(answer) == entry["metadata"].get("target", 24))


def _is_literal(answer: str) -> bool:
    """Return whether Python reads the answer as a literal, or as no expression at all, such as a drawn board."""
    try:
        tree = ast.parse(answer.strip(), mode="eval")
    except (RecursionError, MemoryError):  # nested too deeply here, but perhaps not for the scorer
        return False
    except (SyntaxError, ValueError):
        return True
    return all(isinstance(node, _LITERAL_NODES) for node in ast.walk(tree))


def _variables(entry: dict[str, Any]) -> list[str]:
    metadata = entry["metadata"]
    return [str(metadata.get("variable", "")), *map(str, metadata.get("variables") or ())]


@functools.lru_cache(maxsize=64)
def _data_set(name: str, settings: str) -> Any:
    """Make a data set whose scorer reads literals and executes nothing."""
    import reasoning_gym

    data_set = reasoning_gym.create_dataset(name, **json.loads(settings))
    if name in LITERALS:
        vars(sys.modules[type(data_set).__module__])["eval"] = ast.literal_eval
    return data_set
