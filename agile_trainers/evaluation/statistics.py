"""The statistics of evaluations, as pure functions: intervals, paired tests, pass@k and Holm's correction.

Episodes that depend on each other (attempts at one seed, episodes of one row) form a *unit*. Units are independent, and
every interval and test here is over units; without ``units`` each episode is one.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

RESAMPLES = 10_000
"""Default number of bootstrap resamples, and of sign flips where these are not enumerated."""
_ENUMERATED = 14
"""Largest number of units whose ``2**units`` sign flips are enumerated."""
_AT_ONCE = 2_000_000
"""Numbers that are drawn at once, to bound the memory."""


class Interval(NamedTuple):
    """A confidence interval."""

    low: float
    high: float


def wilson_interval(successes: float, trials: float, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a success rate.

    Args:
        successes: Number of successes.
        trials: Number of trials; it may be fractional, see :func:`effective_trials`.
        confidence: Share of intervals that contain the true rate.

    Returns:
        Both bounds, in [0, 1]. Without trials, the whole of it.

    Raises:
        ValueError: If there are more successes than trials, or a number is negative.

    Source: Wilson (1927), "Probable inference, the law of succession, and statistical inference".
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"successes={successes} must be between 0 and trials={trials}.")
    if trials == 0:
        return Interval(0.0, 1.0)
    z, rate = _normal_quantile(confidence), successes / trials
    center = rate + z * z / (2 * trials)
    spread = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials))
    low, high = ((center + sign * spread) / (1 + z * z / trials) for sign in (-1, 1))
    # Exactly 0 and 1 where rounding leaves a residue.
    return Interval(0.0 if successes == 0 else low, 1.0 if successes == trials else high)


def effective_trials(
    values: Sequence[float], units: Sequence[Hashable] | None = None, confidence: float = 0.95
) -> float:
    """The number of independent trials that determine a mean as well as these values.

    It is the variance of one value over the variance of the mean between units, with Student's quantile for few units. It
    is never above the number of values, and equals it if each is a unit of its own. If all values are equal, it is the
    number of units.

    Source: Korn and Graubard (1998), "Confidence intervals for proportions with small expected number of positive counts
    estimated from survey data".
    """
    sums, counts = _unit_sums(values, units)
    total, number = float(counts.sum()), len(sums)
    if number == total or number < 2:
        return float(number)
    variance = float(np.mean((np.asarray(values, float) - float(sums.sum()) / total) ** 2))
    between = _variance_between(sums, counts)
    if variance == 0.0:
        return float(number)
    shrunk = (_normal_quantile(confidence) / student_quantile(confidence, number - 1)) ** 2
    return total if between == 0.0 else max(1.0, min(total, shrunk * variance / between))


def standard_error(values: Sequence[float], units: Sequence[Hashable] | None = None) -> float:
    """The standard error of a mean over units; of a mean of differences of paired episodes, the paired one.

    Args:
        values: One per episode.
        units: The unit of each. Default: each episode is its own.

    Returns:
        The error; NaN with fewer than two units.
    """
    sums, counts = _unit_sums(values, units)
    return math.sqrt(_variance_between(sums, counts)) if len(sums) > 1 else math.nan


def bootstrap_interval(
    values: Sequence[float],
    units: Sequence[Hashable] | None = None,
    *,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Bootstrap interval of a mean; of differences of paired episodes, this is the paired bootstrap.

    Whole units are drawn with replacement. The percentiles are expanded for the number of units, since plain ones are too
    narrow with few.

    Args:
        values: One per episode.
        units: The unit of each. Default: each episode is its own.
        confidence: Share of intervals that contain the true mean.
        resamples: Number of resamples.
        seed: Seed of the resamples.

    Returns:
        Both bounds; NaN with fewer than two units.

    Source: Hesterberg (2015), "What teachers should know about the bootstrap", section 4.3 (expanded percentiles).
    """
    sums, counts = _unit_sums(values, units)
    number = len(sums)
    if number < 2:
        return Interval(math.nan, math.nan)
    rng = np.random.default_rng(seed)
    means = np.empty(resamples)
    rows = max(1, _AT_ONCE // number)
    for first in range(0, resamples, rows):
        drawn = rng.integers(number, size=(min(rows, resamples - first), number))
        means[first : first + rows] = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    tail = NormalDist().cdf(-math.sqrt(number / (number - 1)) * student_quantile(confidence, number - 1))
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(float(low), float(high))


def mcnemar_p_value(only_first: int, only_second: int) -> float:
    """The two-sided p-value of the exact McNemar test.

    Args:
        only_first: Pairs in which the first policy alone succeeded.
        only_second: Pairs in which the second policy alone succeeded.

    Source: McNemar (1947); exact by the binomial distribution of the discordant pairs.
    """
    total, fewer = only_first + only_second, min(only_first, only_second)
    term, below = 1, 0
    for count in range(fewer + 1):
        below += term
        term = term * (total - count) // (count + 1)
    return 1.0 if 2 * below >= 1 << total else 2 * below / (1 << total)


def sign_flip_p_value(
    differences: Sequence[float],
    units: Sequence[Hashable] | None = None,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> float:
    """The two-sided p-value of the paired randomization test, which flips the sign of each unit's sum.

    If two policies are equally good, either could have played each unit, so that every pattern of signs is equally likely.
    The test is exact for whole numbers of any size, for which the distribution of the sum is computed, and for few units,
    whose patterns are enumerated. Otherwise patterns are drawn. For differences in success with one pair a unit it is the
    exact McNemar test.

    Args:
        differences: The first policy's value minus the second's, of each pair of episodes.
        units: The unit of each pair. Default: each pair is its own.
        resamples: Number of patterns that are drawn where they are not enumerated; p is then at least ``1 / (1 +
            resamples)``.
        seed: Seed of the drawn patterns.

    Source: Fisher (1935), "The Design of Experiments", section 21.
    """
    sums, _ = _unit_sums(differences, units)
    sums = sums[sums != 0]
    observed = abs(float(sums.sum()))
    sizes = np.abs(sums)
    if not len(sums):
        return 1.0
    if np.all(sizes == 1):
        fewer = round((len(sums) - observed) / 2)
        return mcnemar_p_value(fewer, len(sums) - fewer)
    if np.all(sizes == np.round(sizes)) and sizes.sum() * len(sums) <= 1e9:
        return _exact_whole(sizes.astype(int), round(observed))
    bound = observed * (1 - 1e-12)  # a tie stays one after rounding
    if len(sums) <= _ENUMERATED:
        bits = (np.arange(1 << len(sums))[:, None] >> np.arange(len(sums))) & 1
        return float(np.mean(np.abs((2 * bits - 1) @ sizes) >= bound))
    rng, extreme, rows = np.random.default_rng(seed), 0, max(1, _AT_ONCE // len(sums))
    for first in range(0, resamples, rows):
        signs = rng.integers(2, size=(min(rows, resamples - first), len(sums))) * 2 - 1
        extreme += int(np.sum(np.abs(signs @ sizes) >= bound))
    return (1 + extreme) / (1 + resamples)


def smallest_p_value(units: int) -> float:
    """The smallest p-value that the paired test can give with so many units; 1 without any."""
    return min(1.0, 2.0 ** (1 - units))


def pass_at_k(attempts: int, successes: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of ``k`` attempts succeeds.

    Args:
        attempts: Attempts that were played.
        successes: Those that succeeded.
        k: Attempts that count.

    Raises:
        ValueError: If ``k`` is not between 1 and ``attempts``, or ``successes`` is not between 0 and ``attempts``.

    Source: Chen et al. (2021), "Evaluating large language models trained on code", equation 1.
    """
    if not 1 <= k <= attempts or not 0 <= successes <= attempts:
        raise ValueError(
            f"pass@k needs 1 <= k <= attempts and 0 <= successes <= attempts, got k={k}, attempts={attempts} and "
            f"successes={successes}."
        )
    return 1.0 - math.comb(attempts - successes, k) / math.comb(attempts, k)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for the number of tests by Holm's step-down method, in the given order.

    Source: Holm (1979), "A simple sequentially rejective multiple test procedure".
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda one: p_values[one])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def student_quantile(confidence: float, degrees: int) -> float:
    """The value below which the magnitude of Student's t lies with probability ``confidence``.

    Args:
        confidence: In (0, 1).
        degrees: Degrees of freedom, at least 1.

    Source: Abramowitz and Stegun (1964), 26.7.3, 26.7.4 and, above 200 degrees, 26.7.5.
    """
    if degrees > 200:
        z = _normal_quantile(confidence)
        return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    low, high = 0.0, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        if _student_within(middle, degrees) < confidence:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan(low)


def _student_within(angle: float, degrees: int) -> float:
    """The probability of ``|t| < sqrt(degrees) * tan(angle)``."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for power in range(1 if odd else 0, degrees - 1, 2):
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def _exact_whole(sizes: Any, observed: int) -> float:
    total = int(sizes.sum())
    shares = np.zeros(total + 1)  # of the patterns, by the sum of the sizes with a positive sign
    shares[0], reached = 1.0, 0
    for size in sizes:
        moved = shares[: reached + 1] / 2
        shares[: reached + 1] = moved
        shares[size : reached + size + 1] += moved
        reached += int(size)
    sums = 2 * np.arange(total + 1) - total
    return min(1.0, float(shares[np.abs(sums) >= observed].sum()))


def _unit_sums(values: Sequence[float], units: Sequence[Hashable] | None) -> tuple[Any, Any]:
    """Return the sum and the number of the values of each unit, in order of first appearance.

    Raises:
        ValueError: If there is not one unit for each value.
    """
    numbers = np.asarray(values, dtype=float)
    if units is None:
        return numbers, np.ones(len(numbers))
    if len(units) != len(numbers):
        raise ValueError(f"There are {len(numbers)} values but {len(units)} units; pass one for each value.")
    places: dict[Hashable, int] = {}
    index = np.array([places.setdefault(unit, len(places)) for unit in units], dtype=int)
    return np.bincount(index, numbers, len(places)), np.bincount(index, minlength=len(places)).astype(float)


def _variance_between(sums: Any, counts: Any) -> float:
    """Return the variance of the mean of all values, estimated from the differences between at least two units."""
    number, total = len(sums), float(counts.sum())
    return number / (number - 1) * float(np.sum((sums - float(sums.sum()) / total * counts) ** 2)) / total**2


def _normal_quantile(confidence: float) -> float:
    return NormalDist().inv_cdf((1 + confidence) / 2)
