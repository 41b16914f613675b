"""Intervals and tests, against published values, exact enumeration, and their own promises on known distributions."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import numpy as np
import pytest

from agile_environments.guess_number import GuessNumber
from agile_trainers.evaluation.statistics import (
    bootstrap_interval,
    effective_trials,
    holm,
    mcnemar_p_value,
    pass_at_k,
    sign_flip_p_value,
    smallest_p_value,
    student_quantile,
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


def wilson_coverage(trials: int, rate: float) -> float:
    """Exactly: the probability of the counts whose interval contains the rate."""
    total = 0.0
    for count in range(trials + 1):
        low, high = wilson_interval(count, trials)
        total += math.comb(trials, count) * rate**count * (1 - rate) ** (trials - count) * (low <= rate <= high)
    return total


@pytest.mark.parametrize("trials", [20, 100, 500])
def test_coverage_of_wilson_exactly_by_binomial_sum(trials: int) -> None:
    covered = [wilson_coverage(trials, rate) for rate in np.linspace(0.02, 0.98, 49)]
    assert 0.945 < np.mean(covered) < 0.96
    assert min(covered) > {20: 0.89, 100: 0.915, 500: 0.93}[trials]


def test_wilson_without_trials_and_beyond_them() -> None:
    assert (
        wilson_interval(0, 0) == (0.0, 1.0) and wilson_interval(7, 7).high == 1.0 and wilson_interval(0, 7).low == 0.0
    )
    with pytest.raises(ValueError, match=r"successes=3.*trials=2"):
        wilson_interval(3, 2)
    assert wilson_interval(5, 10, 0.99).low < wilson_interval(5, 10).low


@pytest.mark.parametrize(
    ("confidence", "degrees", "expected"),
    [(0.95, 1, 12.7062), (0.95, 2, 4.3027), (0.95, 5, 2.5706), (0.95, 11, 2.2010), (0.99, 30, 2.7500),
     (0.9, 4, 2.1318), (0.95, 120, 1.9799), (0.95, 1000, 1.9623)],
)  # fmt: skip
def test_quantiles_of_student(confidence: float, degrees: int, expected: float) -> None:
    assert student_quantile(confidence, degrees) == pytest.approx(expected, abs=6e-5)


def test_intervals_cover_what_is_known_of_a_scripted_player() -> None:
    """1,000 evaluations of 60 games of guess-the-number: a random number, or, in a quarter of the turns, an invalid one."""
    rng, game = random.Random(0), GuessNumber()
    right = 0.75 / 12
    wins = 1 - (1 - right) ** 4
    mean = wins - 0.2 * 0.25 * sum((1 - right) ** turn for turn in range(4))
    covered = {"return": 0, "success": 0}
    for seed in range(1000):
        games = [scripted_game(game, rng) for _ in range(60)]
        low, high = bootstrap_interval([total for total, _ in games], resamples=1000, seed=seed)
        covered["return"] += low <= mean <= high
        low, high = wilson_interval(sum(won for _, won in games), 60)
        covered["success"] += low <= wins <= high
    assert min(covered.values()) >= 925, covered


def scripted_game(game: GuessNumber, rng: random.Random) -> tuple[float, bool]:
    """Return and success of one game."""
    game.reset(seed=rng.randrange(1 << 30))
    total, over = 0.0, False
    while not over:
        guess = 99 if rng.random() < 0.25 else rng.randint(1, 12)
        _, reward, terminated, truncated, info = game.step(str(guess))
        total, over = total + reward, terminated or truncated
    return total, info["success"]


def clustered(rng: np.random.Generator, units: int, each: int) -> tuple[np.ndarray, np.ndarray]:
    """Outcomes whose rate is drawn once for each unit, .1 or .9: the mean is .5."""
    rates = np.where(rng.random(units) < 0.5, 0.1, 0.9)
    return (rng.random((units, each)) < rates[:, None]).ravel().astype(float), np.repeat(np.arange(units), each)


@pytest.mark.parametrize("units", [12, 40])
def test_intervals_cover_when_whole_units_vary(units: int) -> None:
    """Without the units, the same intervals are far too narrow."""
    rng = np.random.default_rng(2)
    covered = np.zeros(4)
    for seed in range(400):
        values, names = clustered(rng, units, 10)
        trials = effective_trials(values, names.tolist())
        for place, (low, high) in enumerate(
            [
                bootstrap_interval(values, names.tolist(), resamples=600, seed=seed),
                wilson_interval(values.mean() * trials, trials),
                bootstrap_interval(values, resamples=600, seed=seed),
                wilson_interval(values.sum(), len(values)),
            ]
        ):
            covered[place] += low <= 0.5 <= high
    assert all(covered[:2] >= 0.925 * 400) and all(covered[2:] < 0.75 * 400)


def test_effective_trials_by_hand() -> None:
    assert effective_trials([0, 1, 1, 0]) == 4.0 == effective_trials([0, 1, 1, 0], "abcd")
    assert effective_trials([1, 1, 1, 1], "aabb") == 2.0
    # Two copies of each of 201 outcomes are worth about 201, up to Student's quantile.
    values = [float(index % 3 == 0) for index in range(201)]
    shrunk = (1.959964 / student_quantile(0.95, 200)) ** 2
    assert effective_trials([*values, *values], [*range(201), *range(201)]) == pytest.approx(shrunk * 200, rel=1e-6)


def test_bootstrap_by_hand() -> None:
    """Two values: a mean is the lower, the middle or the higher one, and the expanded percentiles reach the ends."""
    assert bootstrap_interval([0.0, 1.0]) == (0.0, 1.0)
    assert bootstrap_interval([3.0] * 9) == (3.0, 3.0)
    assert all(map(math.isnan, bootstrap_interval([1.0])))
    assert all(map(math.isnan, bootstrap_interval([1.0, 2.0], "aa")))
    assert bootstrap_interval([1.0, 2.0, 5.0], seed=3) == bootstrap_interval([1.0, 2.0, 5.0], "abc", seed=3)
    with pytest.raises(ValueError, match="2 values but 3 units"):
        bootstrap_interval([1.0, 2.0], "abc")


def test_bootstrap_is_the_normal_interval_for_many_values() -> None:
    values = np.random.default_rng(0).normal(size=4000)
    half = 1.959964 * values.std(ddof=1) / 4000**0.5
    assert bootstrap_interval(values) == pytest.approx((values.mean() - half, values.mean() + half), abs=2e-3)


def test_mcnemar_by_exact_binomial_sums() -> None:
    assert mcnemar_p_value(0, 0) == 1.0 == mcnemar_p_value(4, 4)
    assert mcnemar_p_value(0, 5) == 2 / 32 and mcnemar_p_value(5, 0) == 2 / 32
    assert mcnemar_p_value(2, 8) == pytest.approx(0.109375, abs=1e-15)
    assert mcnemar_p_value(0, 2000) == 2.0**-1999 or mcnemar_p_value(0, 2000) == 0.0
    for first, second in [(3, 9), (17, 30), (1, 2)]:
        total = first + second
        tail = sum(Fraction(math.comb(total, count), 2**total) for count in range(min(first, second) + 1))
        assert mcnemar_p_value(first, second) == float(min(1, 2 * tail))


def enumerated(sums: list[float]) -> float:
    patterns = list(itertools.product((-1, 1), repeat=len(sums)))
    observed = abs(sum(sums)) - 1e-9
    return sum(abs(sum(s * x for s, x in zip(signs, sums))) >= observed for signs in patterns) / len(patterns)


def test_sign_flips_are_the_enumeration_of_all_patterns() -> None:
    for sums in ([3, 1, -2, 4], [5, -1], [1, 1, 1, 1, 1, -1], [2, 2, 7, 3, -1, 4, 4], [0.5, -0.25, 1.75, 0.3]):
        assert sign_flip_p_value(sums) == pytest.approx(enumerated(sums), abs=1e-12)
    assert sign_flip_p_value([1, 1, 0, -1, 2], ["a", "a", "b", "c", "c"]) == enumerated([2, 1])
    assert sign_flip_p_value([0, 0]) == 1.0 == sign_flip_p_value([])


def test_sign_flips_of_single_pairs_are_mcnemars_test() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        first, second = rng.integers(2, size=40), rng.integers(2, size=40)
        expected = mcnemar_p_value(int((first > second).sum()), int((second > first).sum()))
        assert sign_flip_p_value(first - second) == expected
        drawn = sign_flip_p_value((first - second) * 1.5, resamples=20_000)
        assert drawn == pytest.approx(expected, abs=0.015)


def test_clusters_are_what_the_null_is_about() -> None:
    """Copies of each of six differences add nothing; taken for independent pairs, they call everything different."""
    values, units = [1, 1, 1, 1, 1, -1] * 50, list(range(6)) * 50
    assert sign_flip_p_value(values, units) == pytest.approx(14 / 64, abs=1e-12)
    assert sign_flip_p_value(values) < 1e-30
    assert smallest_p_value(6) == sign_flip_p_value([1] * 6) and smallest_p_value(0) == 1.0


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
