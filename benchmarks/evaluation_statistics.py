"""Simulates comparisons and intervals of evaluations, and counts false verdicts, power, refusals and cover.

Each cell is a pair of policies (or one policy) and a number of independent units, drawn 10,000 times. ``before`` are the
procedures that the package had first: the sign-flip test with bootstrap intervals, and Wilson's interval with effective
trials. ``after`` are those of ``agile_trainers.evaluation.statistics``, in a vectorized form that is compared with the
package on some draws of every cell. The cells are written to ``benchmarks/results/evaluation_statistics.json``, the tables
to ``results/evaluation.md``. The exit code is 1 if a bar is missed: at most 6 % false verdicts over all comparisons of a
cell, and a mean cover of at least .93 for every kind of interval.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from scipy import stats

from agile_trainers.evaluation import statistics as ours
from agile_trainers.evaluation.statistics import failure_refusal

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results" / "evaluation_statistics.json"
PAGE = ROOT / "results" / "evaluation.md"
BEGIN, END = "<!-- begin: written by benchmarks/evaluation_statistics.py -->", "<!-- end -->"
REPLICATIONS = 10_000
UNITS = (5, 10, 20, 100)
LONG = (*UNITS, 200)
"""Numbers of units for returns without a range, which need many."""
ATTEMPTS, PLAYED = 8, 25
"""Attempts at each row, and mean number of greedy episodes of each starting state."""
FALSE, COVER = 0.06, 0.93
RESAMPLES = 2_000
"""Random weights, resamples and signs of each test and interval, in place of 10,000."""
_AT_ONCE, _CHECKED = 250, 2

Rng = np.random.Generator
Draw = Callable[[Rng, tuple[int, int]], Any]
"""Draws the value of each unit, of shape (replications, units)."""
Rates = Sequence[tuple[float, float]]
"""Success rates of rows and the share of rows that have them."""


@dataclass(frozen=True)
class Pair:
    """Two policies, and the kind of their episodes."""

    name: str
    kind: str
    """``success``, ``attempts``, ``greedy``, ``range`` or ``no range``."""
    first: Draw
    second: Draw
    limits: tuple[float, float] | None = (0.0, 1.0)
    difference: float = 0.0
    """The true difference of the means."""
    tuned: bool = True
    """False if the procedures were fixed before the pair was written."""
    shared: Draw | None = None
    """Difficulty of each row, which both policies get in place of shape."""
    fails: tuple[float, float] | None = None
    """Shares of the lost episodes of each policy whose environment fails."""


@dataclass(frozen=True)
class One:
    """One policy, whose mean has an interval."""

    name: str
    kind: str
    """Name of the row of the table."""
    draw: Draw
    """Sums of units."""
    mean: float
    each: int = 1
    """Values of each unit."""
    limits: tuple[float, float] | None = (0.0, 1.0)
    units: tuple[int, ...] = UNITS
    before: str = "bootstrap"
    """``bootstrap`` or ``wilson``."""


# ------------------------------------------------------------------------------------------------------- distributions


def constant(value: float) -> Draw:
    return lambda rng, shape: np.full(shape, value)


def bernoulli(rate: float, value: float = 1.0) -> Draw:
    return lambda rng, shape: value * (rng.random(shape) < rate)


def attempts(rates: Rates, number: int = ATTEMPTS) -> Draw:
    """Successes of attempts at rows whose rate is drawn; of each row, their mean."""

    def draw(rng: Rng, shape: tuple[int, int]) -> Any:
        values, shares = zip(*rates)
        return rng.binomial(number, rng.choice(values, shape, p=shares)) / number

    return draw


def counted(rates: Rates) -> Draw:
    """The number of successes of the attempts at each row."""
    inner = attempts(rates)
    return lambda rng, shape: ATTEMPTS * inner(rng, shape)


def beta(a: float, b: float, scale: float = 1.0) -> Draw:
    return lambda rng, shape: scale * rng.beta(a, b, shape)


def normal(mean: float = 0.0, deviation: float = 1.0) -> Draw:
    return lambda rng, shape: rng.normal(mean, deviation, shape)


def lognormal(sigma: float, mean: float = 1.0) -> Draw:
    return lambda rng, shape: mean * np.exp(rng.normal(-sigma * sigma / 2, sigma, shape))


def pareto(shape_of: float, mean: float = 1.0) -> Draw:
    return lambda rng, shape: mean * (shape_of - 1) * rng.pareto(shape_of, shape)


def exponential(mean: float = 1.0) -> Draw:
    return lambda rng, shape: rng.exponential(mean, shape)


def gamma(a: float, mean: float = 1.0) -> Draw:
    return lambda rng, shape: mean / a * rng.gamma(a, size=shape)


def weibull(a: float, mean: float = 1.0) -> Draw:
    return lambda rng, shape: mean / math.gamma(1 + 1 / a) * rng.weibull(a, shape)


def student(degrees: float, mean: float = 0.0) -> Draw:
    return lambda rng, shape: mean + rng.standard_t(degrees, shape)


def poisson(mean: float) -> Draw:
    return lambda rng, shape: rng.poisson(mean, shape).astype(float)


def noisy(draw: Draw, deviation: float) -> Draw:
    return lambda rng, shape: draw(rng, shape) + rng.normal(0.0, deviation, shape)


ALWAYS: Rates = ((0.0, 0.9), (1.0, 0.1))
MIXED: Rates = ((0.1, 0.5), (0.9, 0.5))
HALF: Rates = ((0.0, 0.5), (1.0, 0.5))
SPREAD: Rates = ((0.0, 0.3), (0.2, 0.3), (0.6, 0.2), (1.0, 0.2))  # mean .38


def flat(rate: float) -> Rates:
    return ((rate, 1.0),)


EQUAL = [
    *(Pair(f"both {rate}", "success", bernoulli(rate), bernoulli(rate)) for rate in (0.05, 0.2, 0.5, 0.9)),
    Pair("rows that are mostly easy or hard", "success", bernoulli(0.5), bernoulli(0.5), shared=beta(0.3, 0.3)),
    Pair("both .5; 1 % of lost games fail for one", "success", bernoulli(0.5), bernoulli(0.5), fails=(0.01, 0.0)),
    Pair("both .5; 3 % of lost games fail for one", "success", bernoulli(0.5), bernoulli(0.5), fails=(0.03, 0.0)),
    Pair("both .4; all lost games fail for one", "success", bernoulli(0.4), bernoulli(0.4), fails=(1.0, 0.0)),
    Pair("a tenth of the rows always, every row .1", "attempts", attempts(ALWAYS), attempts(flat(0.1))),
    Pair("rows of .1 and .9, both", "attempts", attempts(MIXED), attempts(MIXED)),
    Pair("half of the rows always, every row .5", "attempts", attempts(HALF), attempts(flat(0.5))),
    Pair("every row .3, both", "attempts", attempts(flat(0.3)), attempts(flat(0.3))),
    *(Pair(f"both {rate}", "greedy", bernoulli(rate), bernoulli(rate)) for rate in (0.1, 0.5)),
    Pair("beta(2, 2), both", "range", beta(2, 2), beta(2, 2)),
    Pair("beta(.1, .9) and always .1", "range", beta(0.1, 0.9), constant(0.1)),
    Pair("1 always and 50 with .02, range 0 to 50", "range", constant(1), bernoulli(0.02, 50), (0, 50)),
    Pair("1 always and 10 with .1, range 0 to 10", "range", constant(1), bernoulli(0.1, 10), (0, 10)),
    Pair("1 always and 50 with .02", "no range", constant(1), bernoulli(0.02, 50), None),
    Pair("1 always and 10 with .1", "no range", constant(1), bernoulli(0.1, 10), None),
    Pair("normal, both", "no range", normal(), normal(), None),
    Pair("1 always and exponential", "no range", constant(1), exponential(), None),
    Pair("1 always and lognormal (1)", "no range", constant(1), lognormal(1), None),
    Pair("lognormal (1) and lognormal (2)", "no range", lognormal(1), lognormal(2), None),
    Pair("1 always and Pareto (1.5)", "no range", constant(1), pareto(1.5), None),
    Pair("Pareto (1.5), both", "no range", pareto(1.5), pareto(1.5), None),
]
"""Pairs whose means are equal, so that every verdict is false."""

HELD_OUT = [
    Pair("both .8", "success", bernoulli(0.8), bernoulli(0.8), tuned=False),
    Pair("rows of rate beta(2, 5)", "success", bernoulli(0), bernoulli(0), shared=beta(2, 5), tuned=False),
    Pair("3 attempts, rows of 0 to 1, every row .38", "attempts", attempts(SPREAD, 3), attempts(flat(0.38), 3), tuned=False),
    Pair("2 attempts, rows of 0 and .4, every row .2", "attempts", attempts(((0, 0.5), (0.4, 0.5)), 2),
         attempts(flat(0.2), 2), tuned=False),
    Pair("both .85", "greedy", bernoulli(0.85), bernoulli(0.85), tuned=False),
    Pair("beta(.5, .5) and always .5", "range", beta(0.5, 0.5), constant(0.5), tuned=False),
    Pair("5 with .2 and beta(1, 4) times 5, range 0 to 5", "range", bernoulli(0.2, 5), beta(1, 4, 5), (0, 5), tuned=False),
    Pair("Poisson (.3), both", "no range", poisson(0.3), poisson(0.3), None, tuned=False),
    Pair("Weibull (.6) and normal", "no range", weibull(0.6), normal(1), None, tuned=False),
    Pair("gamma (.2) and 1 always", "no range", gamma(0.2), constant(1), None, tuned=False),
    Pair("Student (3), both", "no range", student(3), student(3), None, tuned=False),
    Pair("100 with .03 and noise around 3", "no range", noisy(bernoulli(0.03, 100), 1), normal(3), None, tuned=False),
]  # fmt: skip
"""More such pairs, written when the procedures were fixed."""

BEYOND = [
    Pair("100 with .01 and noise around 1", "no range", noisy(bernoulli(0.01, 100), 0.1), normal(1, 0.1), None),
    Pair("the same, range 0 to 100", "range", bernoulli(0.01, 100), beta(50, 50, 2), (0, 100)),
]
"""Returns that come up in fewer than 2 % of the units, and the same with a range."""

DIFFERENT = [
    Pair(".6 and .4", "success", bernoulli(0.6), bernoulli(0.4), difference=0.2),
    Pair(".9 and .5", "success", bernoulli(0.9), bernoulli(0.5), difference=0.4),
    Pair(".95 and .1", "success", bernoulli(0.95), bernoulli(0.1), difference=0.85),
    Pair("every row .6 and .4", "attempts", attempts(flat(0.6)), attempts(flat(0.4)), difference=0.2),
    Pair("every row .8 and .4", "attempts", attempts(flat(0.8)), attempts(flat(0.4)), difference=0.4),
    Pair(".9 and .3", "greedy", bernoulli(0.9), bernoulli(0.3), difference=0.6),
    Pair("beta(6, 4) and beta(4, 6)", "range", beta(6, 4), beta(4, 6), difference=0.2),
    Pair("2 always and 50 with .02, range 0 to 50", "range", constant(2), bernoulli(0.02, 50), (0, 50), difference=1.0),
    Pair("normal, means 0.5 and 0", "no range", normal(0.5), normal(), None, 0.5),
    Pair("lognormal (1), means 1.5 and 1", "no range", lognormal(1, 1.5), lognormal(1), None, 0.5),
    Pair("exponential, means 1.5 and 1", "no range", exponential(1.5), exponential(), None, 0.5),
]
"""Pairs whose means differ."""


def passed(rates: Rates, k: int) -> tuple[Draw, float]:
    """The pass@k of each row, and its mean."""
    table = np.array([ours.pass_at_k(ATTEMPTS, successes, k) for successes in range(ATTEMPTS + 1)])
    inner, mean = attempts(rates), sum(share * (1 - (1 - rate) ** k) for rate, share in rates)
    return lambda rng, shape: table[np.rint(inner(rng, shape) * ATTEMPTS).astype(int)], mean


def _means(rates: Rates) -> float:
    return sum(rate * share for rate, share in rates)


INTERVALS = [
    *(One(str(rate), "success", bernoulli(rate), rate, before="wilson")
      for rate in (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98)),
    *(One(name, "success, 8 attempts at each row", counted(rates),
          _means(rates), ATTEMPTS, before="wilson")
      for name, rates in (("flat .1", flat(0.1)), ("flat .5", flat(0.5)), ("mixed", MIXED), ("always", ALWAYS),
                          ("half", HALF), ("spread", SPREAD), ("flat .97", flat(0.97)))),
    *(One(f"{name}, k={k}", "pass@k of 8 attempts", *passed(rates, k))
      for name, rates in (("flat .1", flat(0.1)), ("flat .5", flat(0.5)), ("mixed", MIXED), ("always", ALWAYS),
                          ("spread", SPREAD), ("flat .9", flat(0.9))) for k in (1, 2, 4, 8)),
    *(One(name, "return, range known", draw, mean, limits=limits) for name, draw, mean, limits in (
        ("beta(2, 2)", beta(2, 2), 0.5, (0, 1)), ("beta(.1, .9)", beta(0.1, 0.9), 0.1, (0, 1)),
        ("beta(5, 1)", beta(5, 1), 5 / 6, (0, 1)), ("10 with .1", bernoulli(0.1, 10), 1.0, (0, 10)),
        ("50 with .02", bernoulli(0.02, 50), 1.0, (0, 50)), ("1 always", constant(1), 1.0, (0, 2)))),
    *(One(name, "return, range unknown", draw, mean, limits=None, units=(200,)) for name, draw, mean in (
        ("normal", normal(), 0.0), ("exponential", exponential(), 1.0), ("lognormal (1)", lognormal(1), 1.0),
        ("lognormal (1.5)", lognormal(1.5), 1.0), ("50 with .02", bernoulli(0.02, 50), 1.0), ("gamma (.2)", gamma(0.2), 1.0),
        ("Pareto (1.5)", pareto(1.5), 1.0), ("Student (3)", student(3), 0.0))),
]  # fmt: skip
"""The grid over which cover is averaged."""


# ---------------------------------------------------------------------------------------------------------- procedures


def prepare() -> None:
    """Let the package draw fewer weights, and remember what it finds for counts, which come up again and again."""
    ours.DRAWS = RESAMPLES
    for name in ("wilson_interval", "mcnemar_p_value"):
        setattr(ours, name, lru_cache(maxsize=None)(getattr(ours, name)))


def weighted(number: int) -> Any:
    """The weights of the units and of one more, as the package draws them."""
    return np.random.default_rng(0).exponential(size=(ours.DRAWS, number + 1)).T


def mean_tests(sums: Any, counts: Any, limits: Any, at: float = 0.0) -> Any:
    """The p-value of ``mean_test`` of each row, for a mean of ``at``; the interval contains ``at`` if it is above .05.

    Args:
        sums: Sum of the values of each unit, (rows, units).
        counts: Their number.
        limits: Lowest and highest value, or None.
        at: The mean that is tested.
    """
    rows, number = sums.shape
    means, most = sums.sum(1) / counts.sum(1), counts.max(1)
    if limits is None:
        reach = np.abs(sums - means[:, None] * counts).max(1) / most
        ends = np.where(means > at, means - reach, means + reach)
    else:
        ends = np.where(means > at, float(limits[0]), float(limits[1]))
    weights, beyond = weighted(number), np.empty(rows)
    for first in range(0, rows, _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        apart = (sums[part] - at * counts[part]) @ weights[:-1] + ((ends - at) * most)[part, None] * weights[-1]
        beyond[part] = np.where(means[part] > at, (apart <= 0).sum(1), (apart >= 0).sum(1))
    error = np.sqrt(number / (number - 1) * ((sums - means[:, None] * counts) ** 2).sum(1)) / counts.sum(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(error > 0, 2 * stats.t.sf(np.abs(means - at) / error, number - 1), 0.0)
    return np.where(means == at, 1.0, np.maximum(t, (1 + beyond) / (1 + ours.DRAWS)))


def refused(sums: Any, counts: Any, limits: Any) -> Any:
    """Return where ``refusal`` of the package gives a reason."""
    if limits is not None:
        return np.zeros(len(sums), bool)
    if sums.shape[1] < ours.FEWEST_WITHOUT_LIMITS:
        return np.ones(len(sums), bool)
    squares = (sums - (sums.sum(1) / counts.sum(1))[:, None] * counts) ** 2
    equal = ~(squares.max(1) > 1e-18 * (sums**2).max(1))
    with np.errstate(invalid="ignore"):
        return equal | (squares.max(1) / squares.sum(1) > ours.LARGEST_SHARE)


def success_tests(first: Any, second: Any) -> tuple[Any, Any, Any]:
    """``success_test`` of each row of successes."""
    tables = np.stack([(first * second).sum(1), (first > second).sum(1), (first < second).sum(1)], axis=1).astype(int)
    kinds, place = np.unique(tables, axis=0, return_inverse=True)
    found = [ours.success_test(int(a), int(b), int(c), first.shape[1] - int(a + b + c)) for a, b, c in kinds]
    low, high, p = (np.array(values) for values in zip(*((*one.interval, one.p_value) for one in found)))
    return low[place.ravel()], high[place.ravel()], p[place.ravel()]


def wilson(successes: Any, trials: Any) -> tuple[Any, Any]:
    """Wilson's interval; the trials may be fractional, as they were before."""
    z, rate = stats.norm.ppf(1 - ours.LEVEL / 2), successes / trials
    center, spread = rate + z * z / (2 * trials), z * np.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials**2))
    low, high = (center - spread) / (1 + z * z / trials), (center + spread) / (1 + z * z / trials)
    return np.where(rate == 0, 0.0, low), np.where(rate == 1, 1.0, high)


def effective(sums: Any, counts: Any) -> Any:
    """The effective trials of successes, as before."""
    number, total = sums.shape[1], counts.sum(1)
    if (counts == 1).all():
        return total
    rate = sums.sum(1) / total
    between = number / (number - 1) * ((sums - rate[:, None] * counts) ** 2).sum(1) / total**2
    shrunk = (stats.norm.ppf(0.975) / stats.t.ppf(0.975, number - 1)) ** 2
    with np.errstate(divide="ignore", invalid="ignore"):
        trials = np.where(between > 0, np.clip(shrunk * rate * (1 - rate) / between, 1, total), total)
    return np.where(rate * (1 - rate) == 0, number, trials)


def bootstraps(sums: Any, counts: Any, at: float) -> Any:
    """Return whether the bootstrap interval with expanded percentiles, as before, contains ``at``."""
    number = sums.shape[1]
    drawn = np.random.default_rng(0).integers(number, size=(RESAMPLES, number))
    times = np.stack([np.bincount(row, minlength=number) for row in drawn]).T.astype(float)
    tail = stats.norm.cdf(-math.sqrt(number / (number - 1)) * stats.t.ppf(0.975, number - 1))
    covered = np.empty(len(sums), bool)
    for first in range(0, len(sums), _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        apart = (sums[part] - at * counts[part]) @ times
        slack = 1e-9 * np.abs(sums[part]).sum(1)[:, None]
        covered[part] = ((apart <= slack).mean(1) >= tail) & ((apart >= -slack).mean(1) >= tail)
    return covered


def sign_flips(sums: Any) -> Any:
    """The p-value of the sign-flip test, as before: McNemar's where all differences are of one size."""
    if np.isin(np.abs(sums), (0, 1)).all():
        only = (sums > 0).sum(1), (sums < 0).sum(1)
        return np.minimum(1, 2 * stats.binom.cdf(np.minimum(*only), only[0] + only[1], 0.5))
    signs = np.random.default_rng(0).integers(2, size=(sums.shape[1], RESAMPLES)) * 2.0 - 1
    p, exact = np.empty(len(sums)), sums.shape[1] <= 14
    if exact:
        signs = (((np.arange(1 << sums.shape[1])[None, :] >> np.arange(sums.shape[1])[:, None]) & 1) * 2.0) - 1
    for first in range(0, len(sums), _AT_ONCE):
        part = sums[first : first + _AT_ONCE]
        extreme = (np.abs(part @ signs) >= np.abs(part.sum(1))[:, None] * (1 - 1e-12)).sum(1)
        p[first : first + _AT_ONCE] = extreme / signs.shape[1] if exact else (1 + extreme) / (1 + signs.shape[1])
    return p


# -------------------------------------------------------------------------------------------------------------- cells


def drawn(pair: Pair, rng: Rng, units: int) -> tuple[Any, Any, Any]:
    """Draw the sums of both policies' units and the numbers of their values."""
    shape = REPLICATIONS, units
    if pair.shared is not None:
        rates = pair.shared(rng, shape)
        first, second = (rng.random(shape) < rates) * 1.0, (rng.random(shape) < rates) * 1.0
    else:
        first, second = pair.first(rng, shape), pair.second(rng, shape)
    counts = np.ones(shape)
    if pair.kind == "greedy":
        counts = np.maximum(1.0, rng.multinomial(PLAYED * units, np.full(units, 1 / units), REPLICATIONS))
    return first * counts, second * counts, counts


def judged(pair: Pair, first: Any, second: Any, counts: Any) -> tuple[Any, Any, Any]:
    """Return what the package says now: whether the interval covers the difference, p-values, and where it refuses."""
    units, limits = first.shape[1], pair.limits
    apart = None if limits is None else (limits[0] - limits[1], limits[1] - limits[0])
    none = refused(first - second, counts, limits) | (units < ours.FEWEST_UNITS)
    if none.all():
        return np.zeros(len(first), bool), np.ones(len(first)), none
    true = pair.difference
    if pair.kind == "success":
        low, high, p = success_tests(first, second)
        covered = (low <= true + 1e-12) & (true - 1e-12 <= high)
    else:
        p = mean_tests(first - second, counts, apart)
        covered = (p if true == 0 else mean_tests(first - second, counts, apart, true)) > ours.LEVEL
    for row in np.flatnonzero(~none)[:_CHECKED]:
        of = [u for u in range(units) for _ in range(int(counts[row, u]))]
        a, b = ([values[row, u] / counts[row, u] for u in of] for values in (first, second))
        test = ours.difference_test(a, b, of, limits)
        assert np.isclose(test.p_value, p[row], atol=1e-9), pair.name
        assert (test.interval.low <= true <= test.interval.high) == covered[row], pair.name
        assert ours.refusal(np.subtract(a, b).tolist(), of, limits) is None
        assert (test.interval.low > 0 or test.interval.high < 0) == (test.p_value <= ours.LEVEL)
    return covered, p, none


def with_failures(pair: Pair, rng: Rng, units: int) -> dict[str, Any]:
    """Simulate successes of which some lost games fail for a policy."""
    first, second, _ = drawn(pair, rng, units)
    assert pair.fails is not None
    gone = [(rng.random(one.shape) < share) & (one == 0) for one, share in zip((first, second), pair.fails)]
    kept = ~(gone[0] | gone[1])
    p = np.ones(REPLICATIONS)
    for place, (a, b, which) in enumerate(zip(first, second, kept)):
        p[place] = ours.mcnemar_p_value(int((a > b)[which].sum()), int((a < b)[which].sum()))
    lists = [
        [[None if f else v for v, f in zip(*row)] for row in zip(one, lost)] for one, lost in zip((first, second), gone)
    ]
    none = np.array([failure_refusal(a, b) is not None for a, b in zip(*lists)]) | (kept.sum(1) < ours.FEWEST_UNITS)
    return {"before": float(np.mean(p <= ours.LEVEL)), "after": float(np.mean((p <= ours.LEVEL) & ~none)), "wrong": None,
            "refused": float(none.mean()), "cover_before": None, "cover": None}  # fmt: skip


def compare(pair: Pair, units: int, seed: int) -> dict[str, Any]:
    """Simulate a cell of comparisons."""
    rng = np.random.default_rng([seed, units])
    cell: dict[str, Any] = {"name": pair.name, "kind": pair.kind, "units": units, "tuned": pair.tuned}
    if pair.fails is not None:
        return cell | with_failures(pair, rng, units)
    first, second, counts = drawn(pair, rng, units)
    sums = first - second
    signs, true = np.sign(sums.sum(1)), pair.difference
    p_before, before = sign_flips(sums), bootstraps(sums, counts, true)
    covered, p, none = judged(pair, first, second, counts)
    shown = (p <= ours.LEVEL) & ~none
    right = signs == np.sign(true) if true else np.ones(len(signs), bool)
    return cell | {
        "before": float(np.mean((p_before <= ours.LEVEL) & right)),
        "after": float(np.mean(shown & right)),
        "wrong": float(np.mean(shown & ~right)),
        "refused": float(np.mean(none)),
        "claimed": float(np.mean(~none)),
        "cover_before": float(np.mean(before)),
        "cover": None if none.all() else float(np.mean(covered[~none])),
    }


def cover(one: One, units: int, seed: int) -> dict[str, Any]:
    """Simulate a cell of intervals of one policy."""
    rng = np.random.default_rng([seed, units])
    sums = one.draw(rng, (REPLICATIONS, units)) * 1.0
    counts = np.full(sums.shape, float(one.each))
    if one.before == "bootstrap":
        before = bootstraps(sums, counts, one.mean)
    else:
        trials = effective(sums, counts)
        low, high = wilson(sums.sum(1) / counts.sum(1) * trials, trials)
        before = (low <= one.mean) & (one.mean <= high)
    none, inside = refused(sums, counts, one.limits), np.zeros(REPLICATIONS, bool)
    if not none.all():
        binary = (np.isin(sums, (0, 1)).all(1)) & (one.each == 1) & (one.limits == (0, 1))
        low, high = wilson(sums[binary].sum(1), counts[binary].sum(1))
        inside[binary] = (low <= one.mean) & (one.mean <= high)
        other = ~binary & ~none
        inside[other] = mean_tests(sums[other], counts[other], one.limits, one.mean) > ours.LEVEL
        for row in np.flatnonzero(~none)[:_CHECKED]:
            # A unit of several successes: which of its values are 1 does not matter.
            of = [u for u in range(units) for _ in range(one.each)]
            found = ours.mean_interval([sums[row, u] / one.each for u in of], of, one.limits)
            assert found is not None and (found.low <= one.mean <= found.high) == inside[row], one.name
    return {"name": one.name, "kind": one.kind, "units": units, "cover_before": float(before.mean()),
            "claimed": float(np.mean(~none)), "cover": None if none.all() else float(inside[~none].mean())}  # fmt: skip


def winners(members: int = 8, rounds: int = 4, rate: float = 0.6, episodes: int = 16) -> dict[str, float]:
    """Simulate the best measured success of members that are all equally good, and its replay on other seeds."""
    rng = np.random.default_rng(7)
    found = rng.binomial(episodes, rate, (REPLICATIONS, members * rounds)) / episodes
    again = rng.binomial(episodes, rate, REPLICATIONS) / episodes
    return {"members": members, "rounds": rounds, "episodes": episodes, "true": rate,
            "selected": float(found.max(1).mean()), "replayed": float(again.mean())}  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- tables


def _percent(value: float) -> str:
    return "0" if value < 5e-5 else f"{100 * value:.1f}"


def _cell(cells: Sequence[dict[str, Any]], name: str, kind: str, units: int) -> str:
    found = next((one for one in cells if (one["name"], one["kind"], one["units"]) == (name, kind, units)), None)
    if found is None:
        return ""
    text = f"{_percent(found['before'])} → {_percent(found['after'])}"
    return text + (f" ({_percent(found['refused'])})" if found["refused"] else "")


def tables(results: dict[str, Any]) -> str:
    """Make the tables of the page."""
    parts = []
    titles = {
        "equal": "Equal means: verdicts in % of all comparisons, before → after (refused)",
        "held_out": "Equal means, pairs that were written after the procedures: verdicts in %, before → after (refused)",
        "different": "Different means: right verdicts in % of all comparisons, before → after (refused)",
        "beyond": "Returns that fewer than 2 % of the units have: false verdicts in %, before → after (refused)",
    }
    for key, title in titles.items():
        cells = results[key]
        lines = [f"| {title} | " + " | ".join(f"{units} units" for units in LONG) + " |", "|---|" + "---|" * len(LONG)]
        for name, kind in dict.fromkeys((one["name"], one["kind"]) for one in cells):
            lines.append(f"| {kind}: {name} | " + " | ".join(_cell(cells, name, kind, units) for units in LONG) + " |")
        parts.append("\n".join(lines))
    columns = ("Cover of intervals where 95 % is claimed", "cells", "mean, before", "after", "lowest, before", "after")
    lines = [f"| {' | '.join(columns)} |", "|---|" + "---|" * (len(columns) - 1)]
    for kind, cells in by_kind(results).items():
        claimed = [one for one in cells if one["cover"] is not None]
        old, new = (min(claimed, key=lambda one: one[key]) for key in ("cover_before", "cover"))
        lines.append(
            f"| {kind} | {len(claimed)} | {mean_cover(claimed, 'cover_before'):.3f} | "
            f"{mean_cover(claimed, 'cover'):.3f} | {_where(old, 'cover_before')} | {_where(new, 'cover')} |"
        )
    parts.append("\n".join(lines))
    found = results["winners"]
    first = found[0]
    lines = [f"| Best of {first['members']} members in {first['rounds']} rounds, true success {first['true']:.3f} | "
             + " | ".join(f"{one['episodes']} episodes" for one in found) + " |", "|---|" + "---|" * len(found)]  # fmt: skip
    for key, title in (("selected", "measured when it was chosen"), ("replayed", "played again on other episodes")):
        lines.append(f"| {title} | " + " | ".join(f"{one[key]:.3f}" for one in found) + " |")
    return "\n\n".join([*parts, "\n".join(lines)])


def by_kind(results: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Group the cells of intervals by their kind; differences are those of all comparisons without failures."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for one in results["intervals"]:
        groups.setdefault(one["kind"], []).append(one)
    for key in ("equal", "held_out", "different"):
        for one in results[key]:
            if one["cover_before"] is not None:
                groups.setdefault(f"difference, {one['kind']}", []).append(one)
    return groups


def mean_cover(cells: Sequence[dict[str, Any]], key: str) -> float:
    """Average over the intervals that are claimed."""
    return sum(one[key] * one["claimed"] for one in cells) / sum(one["claimed"] for one in cells)


def _where(cell: dict[str, Any], key: str) -> str:
    share = "" if cell["claimed"] == 1 else f", {_percent(cell['claimed'])} % claimed"
    return f"{cell[key]:.3f} ({cell['name']}, {cell['units']} units{share})"


def missed(results: dict[str, Any]) -> list[str]:
    """Return the cells that miss a bar."""
    found = [
        f"{one['kind']}: {one['name']}, {one['units']} units: {one['after']:.3f} false verdicts"
        for key in ("equal", "held_out") for one in results[key] if one["after"] > FALSE
    ]  # fmt: skip
    found += [
        f"{one['name']}, {one['units']} units: {one['wrong']:.3f} wrong verdicts"
        for one in results["different"]
        if one["wrong"] > FALSE
    ]
    for kind, cells in by_kind(results).items():
        mean = mean_cover([one for one in cells if one["cover"] is not None], "cover")
        found += [f"{kind}: mean cover {mean:.3f}"] if mean < COVER else []
    return found


def simulate(only: Sequence[str]) -> dict[str, Any]:
    """Simulate all cells, or those of some parts."""
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if only else {}
    parts = {"equal": EQUAL, "held_out": HELD_OUT, "different": DIFFERENT, "beyond": BEYOND}
    for number, (key, pairs) in enumerate(parts.items()):
        if only and key not in only:
            continue
        results[key] = []
        for place, pair in enumerate(pairs):
            for units in LONG if pair.limits is None else UNITS:
                results[key].append(compare(pair, units, 1000 * number + place))
                print(key, results[key][-1], flush=True)
    if not only or "intervals" in only:
        results["intervals"] = []
        for place, one in enumerate(INTERVALS):
            for units in one.units:
                results["intervals"].append(cover(one, units, 9000 + place))
                print("intervals", results["intervals"][-1], flush=True)
    results["winners"] = [winners(episodes=episodes) for episodes in (16, 32, 64, 128, 256)]
    return results | {"replications": REPLICATIONS}


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate, write results and page, and name the bars that are missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", nargs="+", default=[], choices=("equal", "held_out", "different", "beyond", "intervals"),
                        help="simulate these parts only; the others keep their saved cells")  # fmt: skip
    options = parser.parse_args(argv)
    os.nice(19)
    started = time.monotonic()
    prepare()
    results = simulate(options.parts)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables(results)}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    print(f"{time.monotonic() - started:.0f} s")
    for line in (found := missed(results)):
        print("missed:", line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
