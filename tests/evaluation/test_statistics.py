"""Intervals and tests, against published values, exact enumeration, and their own promises on known distributions."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from agile_environments.guess_number import GuessNumber
from agile_trainers.evaluation.statistics import (
    DRAWS,
    FEWEST_UNITS,
    FEWEST_WITHOUT_LIMITS,
    LARGEST_SHARE,
    difference_test,
    holm,
    mcnemar_p_value,
    mean_interval,
    mean_test,
    newcombe_interval,
    pass_at_k,
    refusal,
    smallest_p_value,
    standard_error,
    success_test,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_interval_is_the_published_one(successes: int, trials: int, low: float, high: float) -> None:
    """Newcombe (1998), Statistics in Medicine 17, table I, method 3."""
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=5e-5)
    mirrored = wilson_interval(trials - successes, trials)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=5e-5)


@pytest.mark.parametrize(("trials", "lowest"), [(20, 0.89), (100, 0.915)])
def test_coverage_of_wilson_exactly_by_binomial_sum(trials: int, lowest: float) -> None:
    """The probability of the counts whose interval contains the rate."""
    rates, counts = np.linspace(0.02, 0.98, 49), np.arange(trials + 1)
    low, high = np.array([wilson_interval(count, trials) for count in counts.tolist()]).T
    inside = (low <= rates[:, None]) & (rates[:, None] <= high)
    covered = (stats.binom.pmf(counts, trials, rates[:, None]) * inside).sum(axis=1)
    assert 0.945 < np.mean(covered) < 0.96 and min(covered) > lowest


def test_wilson_at_the_ends_and_without_trials() -> None:
    assert (
        wilson_interval(0, 0) == (0.0, 1.0) and wilson_interval(7, 7).high == 1.0 and wilson_interval(0, 7).low == 0.0
    )


def test_wilson_by_hand() -> None:
    """For 1 of 4 with z = 1.96: (.25 + .4802 +- 1.96 sqrt(.046875 + .060025)) / 1.9604."""
    assert wilson_interval(1, 4) == pytest.approx((0.045587, 0.699358), abs=2e-5)


def test_newcombe_by_hand() -> None:
    """Newcombe (1998), Statistics in Medicine 17, page 2635: 36, 12, 2 and 0 of 50 pairs give .0569 to .3404."""
    assert newcombe_interval(36, 12, 2, 0) == pytest.approx((0.0569, 0.3404), abs=5e-5)
    # Of 20 and 20 successes each rate is in [.8389, 1], and the correlation is 0.
    assert newcombe_interval(20, 0, 0, 0) == pytest.approx((-0.1611, 0.1611), abs=5e-5)
    # Of 10 pairs that always agree: correlation (5 * 5 - 10 / 2) / 25 = .8, and both distances are .5 - .2366.
    assert newcombe_interval(5, 0, 0, 5) == pytest.approx((-0.2634 * 0.4**0.5, 0.2634 * 0.4**0.5), abs=1e-4)
    # Without a correlation the distances add up in squares.
    assert newcombe_interval(3, 2, 2, 3) == pytest.approx((-0.2634 * 2**0.5, 0.2634 * 2**0.5), abs=1e-4)
    low, high = newcombe_interval(7, 5, 2, 6)
    assert newcombe_interval(7, 2, 5, 6) == pytest.approx((-high, -low)), "the policies are exchanged"
    assert newcombe_interval(6, 2, 5, 7) == pytest.approx((-high, -low)), "failures are counted instead"


def tables(number: int) -> list[tuple[int, int, int, int]]:
    """All counts of pairs with both, one, the other or no success."""
    return [
        (both, first, second, number - both - first - second)
        for both in range(number + 1)
        for first in range(number + 1 - both)
        for second in range(number + 1 - both - first)
    ]


def test_successes_test_and_interval_agree_and_cover_by_enumeration() -> None:
    """All tables of 10 pairs, with their exact probabilities."""
    found = {table: success_test(*table) for table in tables(10)}
    for table, ((low, high), p_value) in found.items():
        assert (low > 0 or high < 0) == (p_value <= 0.05) and low <= (table[1] - table[2]) / 10 <= high
        assert p_value == mcnemar_p_value(table[1], table[2])
        raw = newcombe_interval(*table)
        assert (low, high) == (raw if p_value <= 0.05 else (min(raw.low, 0), max(raw.high, 0)))
    low, high, p_value = np.array([(*one.interval, one.p_value) for one in found.values()]).T
    covered = []
    for first, second in itertools.product((0.05, 0.3, 0.5, 0.8, 0.95), repeat=2):
        shares = (first * second, first * (1 - second), (1 - first) * second, (1 - first) * (1 - second))
        weights = stats.multinomial.pmf(list(found), 10, shares)
        covered.append(weights @ ((low <= first - second + 1e-12) & (first - second - 1e-12 <= high)))
        if first == second:
            assert weights @ (p_value <= 0.05) <= 0.05
    assert np.mean(covered) >= 0.95 and min(covered) >= 0.9


def test_the_mean_of_successes_has_clopper_and_pearsons_bounds_and_students() -> None:
    """The bounds from random weights are beta quantiles; the wider of both intervals counts."""
    for successes, trials in [(10, 10), (0, 7), (1, 30), (6, 8), (9, 12)]:
        values = [1.0] * successes + [0.0] * (trials - successes)
        exact = (stats.beta.ppf(0.05, successes, trials - successes + 1) if successes else 0.0,
                 stats.beta.ppf(0.95, successes + 1, trials - successes) if successes < trials else 1.0)  # fmt: skip
        student = stats.t.interval(0.95, trials - 1, np.mean(values), max(stats.sem(values), 1e-12))
        expected = max(0, min(exact[0], student[0])), min(1, max(exact[1], student[1]))
        assert mean_test(values, limits=(0, 1)).interval == pytest.approx(expected, abs=0.008)


def test_the_test_of_a_mean_is_students_for_many_values_and_allows_for_unseen_ones() -> None:
    values = np.random.default_rng(0).uniform(-1, 1, 300)
    values += 0.07 - values.mean()
    expected = stats.ttest_1samp(values, 0)
    found = mean_test(values, limits=(-2, 2))
    assert found.p_value == pytest.approx(expected.pvalue, rel=1e-9) and 0.001 < found.p_value < 0.2
    assert (
        found.interval.low
        <= expected.confidence_interval().low
        < expected.confidence_interval().high
        <= found.interval.high
    )
    # Eight equal differences: with one more at the other end, the mean is below 0 with probability 2 ** -8.
    assert mean_test([1.0] * 8, limits=(-1, 1)).p_value == pytest.approx(2**-8, abs=0.002)
    # Of smaller ones, a single unseen one is worth several.
    assert mean_test([0.125] * 8, limits=(-1, 1)).p_value == pytest.approx((8 / 9) ** 8, abs=0.015)
    assert mean_test([1, -1], limits=(-1, 1)).p_value == 1.0 == mean_test([0.0] * 4, limits=(-1, 1)).p_value
    assert mean_test([3.0], limits=(0, 4)) == ((0, 4), 1.0) and mean_test([1.0] * 60, limits=(-1, 1)).p_value == 1 / (
        1 + DRAWS
    )
    with pytest.raises(ValueError, match=r"from 0.5 to 3.0 are outside of the range \(0, 2\)"):
        mean_test([0.5, 3.0], limits=(0, 2))


def test_interval_and_test_of_a_mean_agree_whatever_the_values() -> None:
    rng = np.random.default_rng(1)
    for place in range(60):
        size = int(rng.integers(6, 30))
        values = rng.choice([-1, -0.5, 0, 0.25, 1], size, p=rng.dirichlet(np.ones(5)))
        units = rng.integers(size, size=size).tolist() if place % 2 else None
        (low, high), p_value = mean_test(values, units, (-1, 1))
        assert (low > 0 or high < 0) == (p_value <= 0.05)
        mirrored = mean_test(-values, units, (-1, 1))
        assert mirrored == ((pytest.approx(-high), pytest.approx(-low)), pytest.approx(p_value))
        scaled = mean_test(values * 8 + 16, units, (8, 24)).interval
        assert scaled == pytest.approx((8 * low + 16, 8 * high + 16))


@pytest.mark.parametrize("units", [6, 10, 20])
def test_false_verdicts_on_two_values_by_enumeration(units: int) -> None:
    """A rare 1 - q against a frequent -q: the sign-flip test saw a difference in up to 73 % of such samples."""
    for q in (0.02, 0.05, 0.1, 0.2, 0.35, 0.5):
        false = 0.0
        for count in range(units + 1):
            values = [1 - q] * count + [-q] * (units - count)
            shown = mean_test(values, limits=(-1, 1)).p_value <= 0.05
            false += stats.binom.pmf(count, units, q) * shown
        assert false <= 0.05, (q, false)


def test_rows_that_one_policy_wins_always_are_no_verdict_for_the_other() -> None:
    """Ten rows, eight attempts: a tenth of the rows always, against every row a tenth of the time."""
    rng = np.random.default_rng(0)
    rows, shown = np.repeat(np.arange(10), 8).tolist(), 0
    for _ in range(100):
        ours = np.repeat(rng.random(10) < 0.1, 8).astype(float)
        theirs = (rng.random(80) < 0.1).astype(float)
        shown += difference_test(ours, theirs, rows, (0, 1)).p_value <= 0.05
    assert shown == 0, "the sign-flip test: 20"
    better = difference_test((rng.random(80) < 0.9) * 1.0, (rng.random(80) < 0.2) * 1.0, rows, (0, 1))
    assert better.p_value < 0.02 and better.interval.low > 0


def test_values_without_a_range_need_many_units_of_which_none_decides() -> None:
    """1 always against 50 with probability .02: most small samples see no 50."""
    rng = np.random.default_rng(0)
    for number in (1, 20, FEWEST_WITHOUT_LIMITS - 1):
        assert "too few for values without a known range" in str(refusal(rng.normal(size=number)))
        assert refusal([1.0] * number, limits=(0, 50)) is None
    assert "All values are equal" in str(refusal([1.0] * 500)) and "All values are equal" in str(refusal([0.1] * 500))
    values = rng.normal(size=FEWEST_WITHOUT_LIMITS)
    assert refusal(values) is None
    values[0] = values.mean() + 1000
    assert "One episode decides the mean" in str(refusal(values)) and mean_interval(values) is None
    # Of m equal deviations among n zeros each has a share of about 1 / m.
    for wins, decided in ((6, True), (8, False)):
        assert (refusal([-49.0] * wins + [1.0] * 400) is not None) == decided, LARGEST_SHARE
    assert "too few" in str(refusal(values, ["row"] * 75 + list(range(75))))
    low, high = mean_interval(rng.normal(size=4000)) or (0, 0)
    assert (low, high) == pytest.approx((-1.96 / 4000**0.5, 1.96 / 4000**0.5), abs=0.04) and high - low < 0.08


def test_which_interval_a_mean_has() -> None:
    assert mean_interval([1, 0, 1, 1], limits=(0, 1)) == wilson_interval(3, 4)
    assert mean_interval([1, 0, 1, 1], "aabb", limits=(0, 1)) == mean_test([1, 0, 1, 1], "aabb", (0, 1)).interval
    assert mean_interval([1, 0, 1, 1], limits=(0, 2)) == mean_test([1, 0, 1, 1], None, (0, 2)).interval
    assert mean_interval([1, 0, 1, 1]) is None
    assert difference_test([1, 0, 1, 1], [0, 0, 1, 0], limits=(0, 1)) == success_test(1, 2, 0, 1)
    clustered = difference_test([1, 0, 1, 1], [0, 0, 1, 0], "aabb", (0, 1))
    assert clustered == mean_test([1, 0, 0, 1], "aabb", (-1, 1))
    assert difference_test([1, 2.5], [0, 3], limits=(0, 3)) == mean_test([1, -0.5], None, (-3, 3))
    assert (FEWEST_UNITS, smallest_p_value(5) > 0.05, smallest_p_value(6) < 0.05) == (6, True, True)


def test_intervals_cover_what_is_known_of_a_scripted_policy() -> None:
    """150 evaluations of 60 games of guess-the-number: a random number, or, in a quarter of the turns, an invalid one."""
    rng, game = random.Random(0), GuessNumber()
    right = 0.75 / 12
    wins = 1 - (1 - right) ** 4
    mean = wins - 0.2 * 0.25 * sum((1 - right) ** turn for turn in range(4))
    covered = {"return": 0, "success": 0}
    for _ in range(150):
        games = [scripted_game(game, rng) for _ in range(60)]
        low, high = mean_test([total for total, _ in games], limits=(-0.8, 1)).interval
        covered["return"] += low <= mean <= high
        low, high = wilson_interval(sum(won for _, won in games), 60)
        covered["success"] += low <= wins <= high
    assert min(covered.values()) >= 135, covered


def scripted_game(game: GuessNumber, rng: random.Random) -> tuple[float, bool]:
    """Return and success of one game."""
    game.reset(seed=rng.randrange(1 << 30))
    total, over = 0.0, False
    while not over:
        guess = 99 if rng.random() < 0.25 else rng.randint(1, 12)
        _, reward, terminated, truncated, info = game.step(str(guess))
        total, over = total + reward, terminated or truncated
    return total, info["success"]


@pytest.mark.parametrize("units", [12, 40])
def test_intervals_cover_when_whole_units_vary(units: int) -> None:
    """The rate of each unit is .1 or .9. Without the units, the same intervals are far too narrow."""
    rng = np.random.default_rng(2)
    covered, names = np.zeros(2), np.repeat(np.arange(units), 10).tolist()
    for _ in range(100):
        rates = np.where(rng.random(units) < 0.5, 0.1, 0.9)
        values = (rng.random((units, 10)) < rates[:, None]).ravel().astype(float)
        for place, of in enumerate((names, None)):
            low, high = mean_interval(values, of, (0, 1)) or (1, 0)
            covered[place] += low <= 0.5 <= high
    assert covered[0] >= 92 and covered[1] < 75


def test_the_standard_error_over_units_by_hand() -> None:
    assert standard_error([1, 3]) == 1.0 and math.isnan(standard_error([1, 2], "aa"))
    assert standard_error([1, 1, 3, 3], "aabb") == 1.0


def test_mcnemar_by_exact_binomial_sums() -> None:
    assert mcnemar_p_value(0, 0) == 1.0 == mcnemar_p_value(4, 4)
    assert mcnemar_p_value(0, 5) == 2 / 32 and mcnemar_p_value(5, 0) == 2 / 32
    assert mcnemar_p_value(2, 8) == pytest.approx(0.109375, abs=1e-15)
    assert mcnemar_p_value(0, 2000) == 2.0**-1999 or mcnemar_p_value(0, 2000) == 0.0
    for first, second in [(3, 9), (17, 30), (1, 2)]:
        total = first + second
        tail = sum(Fraction(math.comb(total, count), 2**total) for count in range(min(first, second) + 1))
        assert mcnemar_p_value(first, second) == pytest.approx(float(min(1, 2 * tail)), rel=1e-12)


def test_pass_at_k_is_the_mean_over_all_choices_of_attempts() -> None:
    for attempts, successes in [(5, 2), (4, 0), (4, 4), (6, 1)]:
        outcomes = [True] * successes + [False] * (attempts - successes)
        for k in range(1, attempts + 1):
            chosen = [any(choice) for choice in itertools.combinations(outcomes, k)]
            assert pass_at_k(attempts, successes, k) == pytest.approx(sum(chosen) / len(chosen), abs=1e-12)
    for arguments in ((4, 2, 5), (4, 5, 1), (4, 2, 0)):
        with pytest.raises(ValueError, match="pass@k"):
            pass_at_k(*arguments)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0] and holm([]) == []
    assert holm([0.04]) == [0.04]
