"""The comparison of a run's batches with its first, by hand and against independent references."""

from __future__ import annotations

import json
from dataclasses import asdict
from fractions import Fraction

import numpy as np
import pytest

from agile_trainers.evaluation.statistics import ALPHA, BLOCK, PREFIX, Course, tail

T_QUANTILES = {(1e-3, 5): 5.8934, (1e-4, 10): 5.6938, (0.05, 3): 2.3534}
"""Upper quantiles of Student's t from tables, by probability and degrees of freedom."""


def course(values: list[float], errors: list[float] | None = None, groups: int = 0) -> Course:
    first, *later = values
    found = Course(first, errors=[errors[0] ** 2] * 2 if errors else [])
    for number, value in enumerate(later, 1):
        found.add(value, errors[number] if errors else None, groups)
    return found


def test_blocks_are_means_of_5_10_and_20_batches() -> None:
    """Batches 0, 1, ..., 40: the latest block of each size, and the first of its size."""
    found = course([float(batch) for batch in range(41)])
    now = [level.shift["now"] for level in found.levels]
    assert now == [np.mean(range(36, 41)), np.mean(range(31, 41)), np.mean(range(21, 41)), np.mean(range(1, 41))]
    assert [level.first for level in found.levels[:3]] == [3.0, 5.5, 10.5]
    before = course([float(batch) for batch in range(40)])
    assert before.levels[0].shift["now"] == np.mean(range(31, 36)) and len(before.levels) == 3


def test_a_comparison_by_hand() -> None:
    """Start 0.5 with error 0.1 and eight groups, then 0.1 five times with error 0.05.

    The variance is the first batch's, 0.01, since the mean of all is smaller; the difference has error
    sqrt(0.01 * (1 + 1/5)), and 7 * 6 degrees of freedom.
    """
    shift = course([0.5] + [0.1] * 5, [0.1] + [0.05] * 5, 8).shift()
    assert shift is not None and (shift.first, shift.batch) == (0.5, 6) and shift.now == pytest.approx(0.1)
    assert shift.p == pytest.approx(tail(0.4 / (0.01 * 1.2) ** 0.5, 42.0))
    assert shift.share == pytest.approx(ALPHA / 8) and shift.clearness == pytest.approx(np.log(shift.share / shift.p))
    assert not shift.rose and shift.fell == (shift.p < shift.share)
    # Without errors: successive differences of the later batches alone, so that the fall itself is no noise.
    shift = course([0.5, 0.1, 0.2, 0.1, 0.2, 0.1]).shift()
    assert shift is not None
    assert shift.p == pytest.approx(tail((0.5 - 0.14) / (0.005 * 1.2) ** 0.5, 32 / 11))


def test_a_later_block_is_compared_with_the_first_of_its_size_too() -> None:
    """A first batch that was low by chance does not hide a fall, and what was learned is not the start."""
    late = course([0.3] + [0.5, 0.52] * 10 + [0.3, 0.32] * 10).shift()
    assert late is not None and late.fell and late.first == pytest.approx((0.3 + 20 * 0.51) / 21, abs=0.03)
    learned = course([0.3] + [0.3, 0.32] * 5 + [0.6, 0.62] * 5 + [0.3, 0.32] * 10).shift()
    assert learned is not None and not learned.fell


def test_the_probabilities_that_comparisons_spend_add_up_to_alpha() -> None:
    """Shares of one direction, in a run of any length: j-th block of each size, two comparisons each."""
    spent = sum(
        2 * Fraction(1, 2 * block * (block + 1) * (level + 1) * (level + 2))
        for level in range(12) for block in range(1, 200)
    )  # fmt: skip
    assert Fraction(9, 10) < spent < 1
    blocks = [
        level.shift["share"] for level in course([0.0] * (4 * BLOCK + 1)).levels
    ]  # the 4th of 5, the 2nd of 10, the 1st of 20
    assert blocks == [pytest.approx(ALPHA / n) for n in (2 * 20 * 2, 2 * 6 * 6, 2 * 2 * 12)]
    assert PREFIX == 4 * BLOCK


@pytest.mark.parametrize(("probability", "freedom"), [(0.05, 3), (1e-3, 5), (1e-4, 10)])
def test_tails_are_those_of_students_t(probability: float, freedom: int) -> None:
    assert tail(T_QUANTILES[probability, freedom], freedom) == pytest.approx(probability, rel=0.08)


def test_noise_is_said_to_move_as_rarely_as_stated() -> None:
    """1,500 runs of 40 batches of noise, half with their errors known from eight groups."""
    rng, moved, runs = np.random.default_rng(0), 0, 1500
    for run in range(runs):
        groups = rng.normal(size=(41, 8))
        known = (groups.std(axis=1, ddof=1) / 8**0.5).tolist() if run % 2 else None
        found = Course(float(groups[0].mean()), errors=[known[0] ** 2] * 2 if known else [])
        said = False
        for batch in range(1, 41):
            found.add(float(groups[batch].mean()), known[batch] if known else None, 8)
            shift = found.shift() if batch % BLOCK == 0 else None
            said |= shift is not None and shift.clearness > 0
        moved += said
    assert moved <= 0.004 * runs, "0.002 for each direction, as the page says"


def test_a_course_survives_json() -> None:
    values = np.random.default_rng(1).normal(size=60).tolist()
    half = course(values[:33], [0.1] * 33, 8)
    again = Course.of(json.loads(json.dumps(asdict(half))))
    for value in values[33:]:
        half.add(value, 0.1, 8)
        again.add(value, 0.1, 8)
    assert again == half == course(values, [0.1] * 60, 8)
