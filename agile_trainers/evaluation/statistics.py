"""The statistics of evaluations, as pure functions: intervals, paired tests, pass@k and Holm's correction.

Episodes that depend on each other (attempts at one seed, episodes of one row) form a *unit*. Units are independent, and
every interval and test here is over units; without ``units`` each episode is one.

A :class:`Course` tests, batch by batch, whether a metric of a run has left its first value. Later batches form blocks of
5, 10, 20, ... of them. Each block is compared once, when it is complete: with the first batch, and with all batches up to
the end of the first block of its size or of ``PREFIX`` batches. So a large change is found within five batches, and a small
one because more batches are averaged.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from math import erfc, log, sqrt
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

LEVEL = 0.05
"""Largest p-value at which a difference counts as shown; 95 % of the intervals contain the true value."""
FEWEST_UNITS = 6
"""Smallest number of units of which a difference can be shown: five that agree still have p = 1/16."""
FEWEST_WITHOUT_LIMITS = 150
"""Smallest number of units for values whose range is unknown: a value that a fiftieth of the units take is then among them
with probability .95."""
LARGEST_SHARE = 0.15
"""Largest share of the squared deviations that one unit may have, for values whose range is unknown."""
DRAWS = 10_000
"""Number of weightings of the units that are drawn."""
_AT_ONCE = 2_000_000
"""Numbers that are drawn at once, to bound the memory."""


class Interval(NamedTuple):
    """A confidence interval, or the range of a value."""

    low: float
    high: float


class MeanTest(NamedTuple):
    """A 95 % confidence interval of a mean, and the test that it agrees with."""

    interval: Interval
    p_value: float
    """Two-sided, for a mean of 0: at most .05 exactly if the interval leaves 0 out."""


def wilson_interval(successes: int, trials: int) -> Interval:
    """Return Wilson's 95 % score interval of a success rate.

    Args:
        successes: Number of successes.
        trials: Number of independent trials.

    Returns:
        Both bounds, in [0, 1]. Without trials, the whole of it.

    Source: Wilson (1927), "Probable inference, the law of succession, and statistical inference".
    """
    if trials == 0:
        return Interval(0.0, 1.0)
    return Interval(*map(float, stats.binomtest(successes, trials).proportion_ci(1 - LEVEL, "wilson")))


def newcombe_interval(both: int, only_first: int, only_second: int, neither: int) -> Interval:
    """Return Newcombe's 95 % score interval of the difference of two success rates in paired episodes.

    Args:
        both: Pairs in which both policies succeeded.
        only_first: Pairs in which the first policy alone succeeded.
        only_second: Pairs in which the second policy alone succeeded.
        neither: Pairs in which both failed.

    Returns:
        Both bounds of the first policy's rate minus the second's, in [-1, 1].

    Source: Newcombe (1998), "Improved confidence intervals for the difference between binomial proportions based on paired
    data", method 10. Neither scipy nor statsmodels has it: statsmodels's ``"newcomb"`` is for independent samples. Without
    correlation both are the same, which was checked.
    """
    total = both + only_first + only_second + neither
    first, second = both + only_first, both + only_second
    rates = first / total, second / total
    (low_1, high_1), (low_2, high_2) = wilson_interval(first, total), wilson_interval(second, total)
    margins = first * (total - first) * second * (total - second)
    shared = float(both * neither - only_first * only_second)
    if shared > 0:
        shared = max(shared - total / 2, 0.0)
    correlation = shared / math.sqrt(margins) if margins else 0.0

    def spread(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a - 2 * correlation * a * b + b * b))

    difference = rates[0] - rates[1]
    return Interval(
        difference - spread(rates[0] - low_1, high_2 - rates[1]),
        difference + spread(high_1 - rates[0], rates[1] - low_2),
    )


def standard_error(values: Sequence[float], units: Sequence[Hashable] | None = None) -> float:
    """Return the standard error of a mean over units; of a mean of differences of paired episodes, the paired one.

    Args:
        values: One per episode.
        units: The unit of each. Default: each episode is its own.

    Returns:
        The error; NaN with fewer than two units.
    """
    sums, counts = _unit_sums(values, units)
    return math.sqrt(_variance_between(sums, counts)) if len(sums) > 1 else math.nan


def mean_test(
    values: Sequence[float], units: Sequence[Hashable] | None = None, limits: tuple[float, float] | None = None
) -> MeanTest:
    """Estimate a mean over units, and test whether it is 0.

    The interval contains two: Student's, and one that allows for values that have not come up. For the latter, one unit is
    added at the end of the range, and all units get random weights, which are uniform over those that add up to 1; the
    bounds are the 5 % quantile of the mean with a unit at the low end and the 95 % quantile with one at the high end. For
    successes these are Clopper and Pearson's. Both intervals have to leave 0 out, so that skewed values cannot, and the mean
    of values that are all equal has an interval too.

    Args:
        values: One per episode.
        units: The unit of each. Default: each episode is its own.
        limits: The lowest and highest value that is possible. None if unknown: then the largest deviation that came up is
            taken for the largest that is possible, which :func:`refusal` allows for many units only.

    Returns:
        The interval, within the limits, and the two-sided p-value, which is at least ``1 / (1 + DRAWS)``. With one unit, the
        interval is the whole range.

    Raises:
        ValueError: If a value is outside the limits.

    Source: Gaffke (2005), "Three test statistics for a nonparametric one-sided hypothesis on the mean of a nonnegative
    variable"; Learned-Miller and Thomas (2019), "A new confidence interval for the mean of a bounded random variable".
    """
    sums, counts = _unit_sums(values, units)
    number = len(sums)
    mean, most = float(sums.sum() / counts.sum()), float(counts.max())
    if limits is None:
        reach = float(np.abs(sums - mean * counts).max()) / most
        limits = mean - reach, mean + reach
    elif not within(values, limits):
        raise ValueError(
            f"Values from {min(values)} to {max(values)} are outside of the range {limits} of possible ones."
        )
    if number == 1:
        return MeanTest(Interval(*limits), 1.0)
    lows, highs = _weighted_means(sums, counts, (limits[0] * most, limits[1] * most), most)
    error, tail = math.sqrt(_variance_between(sums, counts)), LEVEL / 2
    reach = float(stats.t.ppf(1 - tail, number - 1)) * error
    place = int(2 * tail * (DRAWS + 1)) - 1
    low, high = min(mean - reach, float(lows[place])), max(mean + reach, float(highs[-1 - place]))
    beyond = np.sum(lows <= 0) if mean > 0 else np.sum(highs >= 0)
    student = 2 * float(stats.t.sf(abs(mean) / error, number - 1)) if error else 0.0
    p_value = max(student, (1 + int(beyond)) / (1 + DRAWS)) if mean else 1.0
    return MeanTest(Interval(max(low, limits[0]), min(high, limits[1])), p_value)


def mean_interval(
    values: Sequence[float], units: Sequence[Hashable] | None = None, limits: tuple[float, float] | None = None
) -> Interval | None:
    """Return the 95 % interval of a mean: Wilson's for independent successes, else that of :func:`mean_test`.

    Args:
        values: One per episode.
        units: The unit of each. Default: each episode is its own.
        limits: The lowest and highest possible value; None if unknown.

    Returns:
        Both bounds; None where :func:`refusal` gives a reason.
    """
    if refusal(values, units, limits) is not None:
        return None
    if are_independent_successes(values, units, limits):
        return wilson_interval(round(sum(values)), len(values))
    return mean_test(values, units, limits).interval


def difference_test(
    first: Sequence[float],
    second: Sequence[float],
    units: Sequence[Hashable] | None = None,
    limits: tuple[float, float] | None = None,
) -> MeanTest:
    """Compare the means of two policies in paired episodes: :func:`success_test` for independent successes, else
    :func:`mean_test` of the differences.

    Args:
        first: The first policy's value in each episode.
        second: The second policy's value in the same episodes.
        units: The unit of each pair. Default: each pair is its own.
        limits: The lowest and highest possible value; None if unknown.
    """
    if are_independent_successes([*first, *second], units, limits):
        pairs = Counter(zip(map(bool, first), map(bool, second), strict=True))
        return success_test(pairs[True, True], pairs[True, False], pairs[False, True], pairs[False, False])
    apart = None if limits is None else (limits[0] - limits[1], limits[1] - limits[0])
    return mean_test([a - b for a, b in zip(first, second, strict=True)], units, apart)


def success_test(both: int, only_first: int, only_second: int, neither: int) -> MeanTest:
    """Compare the successes of two policies in paired episodes that are independent, by the exact McNemar test.

    Args:
        both: Pairs in which both policies succeeded.
        only_first: Pairs in which the first policy alone succeeded.
        only_second: Pairs in which the second policy alone succeeded.
        neither: Pairs in which both failed.

    Returns:
        Newcombe's interval of the difference, extended to 0 where the exact test shows none, and McNemar's p-value.
    """
    low, high = newcombe_interval(both, only_first, only_second, neither)
    p_value = mcnemar_p_value(only_first, only_second)
    if p_value > LEVEL:
        low, high = min(low, 0.0), max(high, 0.0)
    return MeanTest(Interval(low, high), p_value)


@lru_cache(maxsize=4096)  # a simulation of power meets the same few tables again and again
def mcnemar_p_value(only_first: int, only_second: int) -> float:
    """Return the two-sided p-value of the exact McNemar test.

    Args:
        only_first: Pairs in which the first policy alone succeeded.
        only_second: Pairs in which the second policy alone succeeded.

    Source: McNemar (1947); exact by the binomial distribution of the discordant pairs.
    """
    total = only_first + only_second
    return float(stats.binomtest(only_first, total).pvalue) if total else 1.0


def refusal(
    values: Sequence[float], units: Sequence[Hashable] | None = None, limits: tuple[float, float] | None = None
) -> str | None:
    """Say why nothing can be claimed of a mean at 95 %.

    Args:
        values: One per episode.
        units: The unit of each. Default: each episode is its own.
        limits: The lowest and highest value that is possible. None if unknown: then a rare value far away, which has not
            come up, can change the mean at will.

    Returns:
        The reason, as a sentence; None if :func:`mean_test` holds.
    """
    sums, counts = _unit_sums(values, units)
    number = len(sums)
    if limits is not None:
        return None
    declare = "Play more, or let the environment declare its return_range, such as (0.0, 1.0)."
    if number < FEWEST_WITHOUT_LIMITS:
        return (
            f"{number} independent episodes are too few for values without a known range, at least {FEWEST_WITHOUT_LIMITS} "
            f"are needed: a rare value may not have come up. {declare}"
        )
    squares = (sums - float(sums.sum() / counts.sum()) * counts) ** 2
    if not squares.max() > 1e-18 * float((sums**2).max()):
        return f"All values are equal, which does not show how far others may lie. {declare}"
    if (share := float(squares.max() / squares.sum())) > LARGEST_SHARE:
        return f"One episode decides the mean: {share:.0%} of the squared deviations are its own. {declare}"
    return None


def smallest_p_value(units: int) -> float:
    """Return the smallest p-value of the exact McNemar test with so many pairs; 1 without any."""
    return min(1.0, 2.0 ** (1 - units))


def pass_at_k(attempts: int, successes: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of ``k`` attempts succeeds.

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

    Source: Holm (1979), "A simple sequentially rejective multiple test procedure". scipy has no such method; statsmodels's
    ``multipletests`` gives the same and is no dependency for three lines.
    """
    order, adjusted = np.argsort(p_values), np.empty(len(p_values))
    tests_left = np.arange(len(p_values), 0, -1)
    adjusted[order] = np.maximum.accumulate(np.minimum(tests_left * np.take(p_values, order), 1.0))
    return adjusted.tolist()


def are_independent_successes(
    values: Sequence[float], units: Sequence[Hashable] | None, limits: tuple[float, float] | None
) -> bool:
    """Return whether values are 1 or 0, nothing else is possible, and no two episodes (or pairs) share a unit."""
    single = units is None or len(set(units)) == len(units)
    return limits is not None and tuple(limits) == (0, 1) and single and all(value in (0, 1) for value in values)


def within(values: Sequence[float], limits: tuple[float, float]) -> bool:
    """Return whether values are in a range, up to the rounding of their sums."""
    slack = 1e-6 * (limits[1] - limits[0])
    return limits[0] - slack <= min(values) and max(values) <= limits[1] + slack


def _weighted_means(sums: Any, counts: Any, ends: tuple[float, float], most: float) -> tuple[Any, Any]:
    """Return sorted means over units and one more, at the low and at the high end, under random weights.

    Args:
        sums: Sum of the values of each unit.
        counts: Number of its values.
        ends: The sum of the added unit, at either end.
        most: The number of its values.
    """
    rng, number = np.random.default_rng(0), len(sums)
    low, high, rows = np.empty(DRAWS), np.empty(DRAWS), max(1, _AT_ONCE // (number + 1))
    for first in range(0, DRAWS, rows):
        weights = rng.exponential(size=(min(rows, DRAWS - first), number + 1))  # over their sum, uniform on the simplex
        drawn, added = weights[:, :-1], weights[:, -1]
        total, weight = drawn @ sums, drawn @ counts + added * most
        low[first : first + rows] = (total + added * ends[0]) / weight
        high[first : first + rows] = (total + added * ends[1]) / weight
    return np.sort(low), np.sort(high)


def _unit_sums(values: Sequence[float], units: Sequence[Hashable] | None) -> tuple[Any, Any]:
    """Return the sum and the number of the values of each unit, in order of first appearance."""
    numbers = np.asarray(values, dtype=float)
    if units is None:
        return numbers, np.ones(len(numbers))
    index = np.array(numbered(units), dtype=int)
    return np.bincount(index, numbers), np.bincount(index).astype(float)


def numbered(units: Sequence[Hashable]) -> list[int]:
    """Return units as numbers, in the order of their first appearance."""
    places: dict[Hashable, int] = {}
    return [places.setdefault(unit, len(places)) for unit in units]


def _variance_between(sums: Any, counts: Any) -> float:
    """Return the variance of the mean of all values, estimated from the differences between at least two units."""
    number, total = len(sums), float(counts.sum())
    return number / (number - 1) * float(np.sum((sums - float(sums.sum()) / total * counts) ** 2)) / total**2


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
    """
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

    Source: Horowitz and Manski (2000), "Nonparametric analysis of randomized experiments with missing covariate and outcome
    data".
    """
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
        limits: The lowest and highest possible value; None if unknown, which takes 0 for the lowest. A value that is lower
            counts instead.
    """
    return min([0.0 if limits is None else limits[0], *values])


# --------------------------------------------------------------------------------- comparisons over the course of a run


BLOCK = 5
"""Batches of the smallest block."""
PREFIX = 20
"""Batches after the first, at most, with which later ones are compared. Their mean is near the start, and less noisy."""
ALPHA = 2e-3
"""Probability that a metric which never changes is ever said to fall, however long the run, and the same for a rise. The
comparisons spend it by Bonferroni's inequality: the j-th block of ``BLOCK * 2**i`` batches gets
``ALPHA / (j * (j + 1) * (i + 1) * (i + 2))``, half of it for each of its two comparisons; these shares add up to ``ALPHA``.
(Alpha spending: Lan and DeMets, Biometrika 70, 1983.) Student's t is an approximation: where up to three groups are all won
or all lost, it is said more often (``docs/troubleshooting.md`` has the rates)."""
MANY = 20
"""Batches after which the spread between batches counts too where the error of each is known."""


@dataclass(frozen=True)
class Shift:
    """The difference of a block of batches from the start of a run."""

    first: float
    """Value at the start."""
    now: float
    """Mean of the block."""
    p: float
    """Probability of such a difference, in its direction, of a metric that does not change."""
    share: float
    """Share of ``ALPHA`` that the comparison may spend."""
    batch: int
    """Number of the block's last batch, the first of the run being 1."""

    @property
    def clearness(self) -> float:
        """Logarithm of ``share`` over ``p``; above 0, noise does not explain the difference."""
        return log(self.share / max(self.p, 1e-300))

    @property
    def rose(self) -> bool:
        """True if the difference is a rise that noise does not explain."""
        return self.now > self.first and self.clearness > 0

    @property
    def fell(self) -> bool:
        """True if the difference is a fall that noise does not explain."""
        return self.now < self.first and self.clearness > 0


@dataclass
class Level:
    """The blocks of one size: the mean of the first, that of one that waits for its neighbour, and the latest comparison."""

    first: float
    waiting: float = 0.0
    shift: dict[str, Any] = field(default_factory=dict)


@dataclass
class Course:
    """The comparisons of one metric with its start, whose size grows with the logarithm of the run's length."""

    start: float
    """Value of the first batch."""
    count: int = 0
    """Batches after the first."""
    last: float = 0.0
    total: float = 0.0
    """Sum of the batches of the block that is not complete."""
    squares: float = 0.0
    """Sum of the squared differences of successive batches, without the first."""
    errors: list[float] = field(default_factory=list)
    """Squared standard errors of the batches, where they are known: that of the first, and the sum of all."""
    levels: list[Level] = field(default_factory=list)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Course:
        """Return the course whose ``asdict`` is given."""
        return cls(**{**state, "levels": [Level(**level) for level in state["levels"]]})

    def add(self, value: float, error: float | None, groups: int) -> None:
        """Take the value of a batch after the first.

        Args:
            value: Mean of the batch.
            error: Its standard error; None if it is not known.
            groups: Independent groups of a batch, from which the error was computed.
        """
        self.squares += (value - self.last) ** 2 if self.count else 0.0
        self.count, self.last, self.total = self.count + 1, value, self.total + value
        self.errors = [self.errors[0], self.errors[1] + error**2] if self.errors and error is not None else []
        if self.count % BLOCK:
            return
        mean, level, self.total = self.total / BLOCK, 0, 0.0
        while True:
            if level == len(self.levels):
                self.levels.append(Level(mean))
            own = self.levels[level]
            own.shift = asdict(self._compare(level, mean, groups))
            if (self.count // (BLOCK << level)) % 2:
                own.waiting = mean
                return
            mean, level = (own.waiting + mean) / 2, level + 1

    def shift(self) -> Shift | None:
        """Return the clearest of the latest comparisons, those of long blocks first; None before the first block."""
        found = [Shift(**level.shift) for level in reversed(self.levels)]
        return max(found, key=lambda shift: shift.clearness, default=None)

    def _compare(self, level: int, now: float, groups: int) -> Shift:
        size = BLOCK << level
        block = self.count // size
        share = ALPHA / (2 * block * (block + 1) * (level + 1) * (level + 2))
        references = [(self.start, 1)]
        if block > 1:
            sizes = [BLOCK << below for below in range(level + 1) if BLOCK << below <= PREFIX]
            means = [((self.start + n * own.first) / (n + 1), n + 1) for n, own in zip(sizes, self.levels)]
            # What was learned meanwhile is not the start: a fall is one from the lowest of these means.
            references.append(min(means) if now < means[-1][0] else max(means))
        found = []
        for first, batches in references:
            p = max(
                tail(abs(now - first) / sqrt(max(variance, 1e-12) * (1 / batches + 1 / size)), freedom)
                for variance, freedom in self._variances(groups)
            )
            found.append(Shift(first, now, p, share, self.count + 1))
        return min(found, key=lambda shift: shift.p)

    def _variances(self, groups: int) -> list[tuple[float, float]]:
        """Return estimates of the variance of a batch with their degrees of freedom, of which each must show a difference.

        One is half the mean square of successive differences, to which a trend adds little (von Neumann, 1941). The other,
        where batches come with their errors, is their mean, or that of the first batch if it is larger.
        """
        n = self.count
        between = self.squares / (2 * (n - 1)), 2 * (n - 1) ** 2 / (3 * n - 4)
        if not self.errors or groups < 2:
            return [between]
        within = max(self.errors[0], self.errors[1] / (n + 1)), (groups - 1) * (n + 1.0)
        return [within] if n < MANY else [within, between]


def tail(errors: float, freedom: float) -> float:
    """Return the probability that Student's t exceeds a number of standard errors, by Wallace's approximation (1959)."""
    z = (8 * freedom + 1) / (8 * freedom + 3) * sqrt(freedom * log(1 + errors**2 / freedom))
    return erfc(z / sqrt(2)) / 2
