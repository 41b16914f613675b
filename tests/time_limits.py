"""Time limits that are as short as the machine allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_LIMITS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Seconds."""


def at_the_first_limit(begun: Callable[[float], T | None]) -> T:
    """Return what programs give at the first limit at which each had begun to wait for its end.

    Args:
        begun: Runs the programs with this limit. None: one of them was not as far.
    """
    for limit in _LIMITS:
        given = begun(limit)
        if given is not None:
            return given
    raise AssertionError(f"A program has not begun within {_LIMITS[-1]:g} s.")
