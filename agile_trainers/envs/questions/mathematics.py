"""Compares mathematical answers with ``math-verify``; runs in an isolated process, see ``isolation/``."""

from __future__ import annotations

import logging
from typing import Any


def prepare() -> None:
    """Load the package before the clock of a call starts."""
    import math_verify  # noqa: F401


def equal(given: str, expected: str) -> bool:
    """Return whether an answer, or the last expression in a text that looks like one, equals the expected answer.

    Args:
        given: LaTeX in ``\\boxed{}``, or any text.
        expected: LaTeX in ``\\boxed{}``.
    """
    from math_verify import parse, verify

    logging.disable()  # it warns about its own time limits, which are replaced here
    # Results of divisions by zero equal each other.
    found = [_sound(parse(text, parsing_timeout=None)) for text in (expected, given)]
    return bool(verify(*found, timeout_seconds=None))


def _sound(parsed: list[Any]) -> list[Any]:
    from sympy import nan, zoo

    return [item for item in parsed if not (hasattr(item, "has") and item.has(zoo, nan))]
