"""Failed episodes: when they forbid a verdict, and what they leave open, by hand and by enumeration."""

from __future__ import annotations

import itertools
import re

import pytest

from agile_trainers.evaluation.statistics import difference_bounds, failure_refusal


def with_failures(first: int, second: int, of: int, both: int = 0) -> tuple[list[float | None], list[float | None]]:
    """Outcomes in which so many episodes failed for the first policy alone, the second alone, and for both."""
    ours: list[float | None] = [1.0] * of
    theirs: list[float | None] = [0.0] * of
    ours[: first + both] = [None] * (first + both)
    theirs[first : first + both + second] = [None] * (both + second)
    return ours, theirs


@pytest.mark.parametrize(
    ("first", "second", "both", "of", "reason"),
    [
        (0, 0, 0, 7, None),
        (2, 2, 1, 100, None),  # exactly 5 % of the pairs
        (2, 2, 2, 100, "6 of 100 pairs"),
        (2, 0, 0, 100, None),  # exactly 2 points
        (3, 0, 0, 100, "more than 2 points"),
        (0, 3, 0, 100, "more than 2 points"),
        (1, 0, 0, 20, "more than 2 points"),
        (5, 0, 0, 1000, None),  # p = 2 / 32
        (6, 0, 0, 1000, r"different failure rates \(p = 0.031\)"),  # p = 2 / 64
        (0, 6, 9, 1000, r"9 episodes of the first policy and 15 of the second.*different failure rates"),
        (235, 0, 0, 256, "235 of 256 pairs"),
    ],
)
def test_when_failures_forbid_a_verdict(first: int, second: int, both: int, of: int, reason: str | None) -> None:
    found = failure_refusal(*with_failures(first, second, of, both))
    assert found is None if reason is None else found is not None and re.search(reason, found), found


def test_bounds_are_those_of_every_completion() -> None:
    ours, theirs = [1.0, None, 0.0, 1.0], [None, None, 0.0, 1.0]
    completed = [
        (1.0 + a + 0.0 + 1.0) / 4 - (b + c + 0.0 + 1.0) / 4 for a, b, c in itertools.product((0.0, 1.0), repeat=3)
    ]
    assert difference_bounds(ours, theirs, (0.0, 1.0)) == (min(completed), max(completed)) == (-0.25, 0.5)
    assert difference_bounds([2.0, None], [1.0, 1.0], (-1.0, 3.0)) == pytest.approx((-0.5, 1.5))
    assert difference_bounds(ours, theirs, None) is None, "returns without a declared range have no bounds"
    assert difference_bounds([1.0, 0.0], [0.0, 0.0], (0.0, 1.0)) == (0.5, 0.5)
