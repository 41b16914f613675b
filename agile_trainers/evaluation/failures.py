"""Decides whether failed episodes forbid a verdict on two policies, and bounds the difference that they leave open."""

from __future__ import annotations

from collections.abc import Sequence

from agile_trainers.evaluation.statistics import Interval, mcnemar_p_value

MOST_MISSING = 5
"""Largest share of pairs without a value, in percent, with which a verdict is given."""
MOST_APART = 2
"""Largest difference of the two failure rates, in points, with which a verdict is given."""
SAME_RATE = 0.05
"""Smallest p-value of the exact McNemar test of the failures with which a verdict is given."""


def failure_refusal(first: Sequence[float | None], second: Sequence[float | None]) -> str | None:
    """Say why failed episodes forbid a verdict on two policies.

    Failed episodes are hardly ever a random sample: an environment fails on certain answers. A comparison of the pairs that
    are left is then one of other episodes.

    Args:
        first: The first policy's value in each paired episode; None where its environment failed.
        second: The second policy's values in the same episodes.

    Returns:
        The reason, as a sentence; None if a verdict may be given.

    Raises:
        ValueError: If the numbers of episodes differ, or there are none.
    """
    _check(first, second)
    number = len(first)
    lost, won = sum(one is None for one in first), sum(one is None for one in second)
    missing = sum(a is None or b is None for a, b in zip(first, second))
    if 100 * missing > MOST_MISSING * number:
        return (
            f"{missing} of {number} pairs have no value because an environment failed, more than {MOST_MISSING}%; the "
            "policies may differ in just these."
        )
    rates = f"{lost} episodes of the first policy and {won} of the second failed, of {number} each"
    if 100 * abs(lost - won) > MOST_APART * number:
        return (
            f"{rates}: failure rates more than {MOST_APART} points apart. The pairs that are left are no fair sample."
        )
    both = sum(a is None and b is None for a, b in zip(first, second))
    p_value = mcnemar_p_value(lost - both, won - both)
    if p_value < SAME_RATE:
        return f"{rates}: different failure rates (p = {p_value:.2g}). The pairs that are left are no fair sample."
    return None


def difference_bounds(
    first: Sequence[float | None], second: Sequence[float | None], limits: tuple[float, float] | None
) -> Interval | None:
    """Bound the mean difference over all pairs, whatever the failed episodes would have given.

    The lower bound takes the first policy's failed episodes as the worst and the second's as the best; the upper bound is
    the reverse.

    Args:
        first: The first policy's value in each paired episode; None where its environment failed.
        second: The second policy's values in the same episodes.
        limits: The lowest and highest possible value: (0, 1) for success, the range that the environment declares for
            returns.

    Returns:
        Both bounds, of the first policy's mean minus the second's; None without limits.

    Raises:
        ValueError: If the numbers of episodes differ, or there are none.

    Source: Horowitz and Manski (2000), "Nonparametric analysis of randomized experiments with missing covariate and outcome
    data".
    """
    _check(first, second)
    if limits is None:
        return None
    low, high = limits

    def mean(values: Sequence[float | None], failed: float) -> float:
        return sum(failed if one is None else one for one in values) / len(values)

    return Interval(mean(first, low) - mean(second, high), mean(first, high) - mean(second, low))


def failed_value(values: Sequence[float], limits: tuple[float, float] | None) -> float:
    """Return the value with which a failed episode counts against a policy: the lowest possible.

    Args:
        values: Those of the episodes that did not fail.
        limits: The lowest and highest possible value. None: the lowest of ``values`` and 0 is taken.
    """
    return min([0.0, *values]) if limits is None else limits[0]


def _check(first: Sequence[float | None], second: Sequence[float | None]) -> None:
    if len(first) != len(second) or not first:
        raise ValueError(
            f"Paired outcomes need as many values of one policy as of the other, and at least one; got {len(first)} and "
            f"{len(second)}."
        )
