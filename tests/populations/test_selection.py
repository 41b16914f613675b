"""Ranges, fitness and selection: pure functions, against values by hand."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from agile_trainers.evaluation.statistics import standard_error
from agile_trainers.populations import Halving, HyperparameterConfig, Range, Score, Tournament
from agile_trainers.populations.hyperparameters import SearchSpace, search_space
from agile_trainers.populations.selection import Schedule, ranked, strategy_of, with_failures
from agile_trainers.trainers import MultiTurnGRPOConfig, MultiTurnPPOConfig

RANGES = {"learning_rate": Range(1e-4, 1e-2, log=True), "num_iterations": Range(1, 8)}
SPACE = SearchSpace(RANGES, frozenset({"num_iterations"}))


def score(member: int, *values: float, rate: float = 1e-3) -> Score:
    return Score(member, values, tuple(range(len(values))), {"learning_rate": rate, "num_iterations": 2})


def around(member: int, mean: float, count: int = 20) -> Score:
    """Values of a given mean; any two members differ by the same amount in every episode."""
    return score(member, *(mean + 0.1 * (n % 2) for n in range(count)))


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# ------------------------------------------------------------------------------------------------------------- ranges


def test_first_values_cover_the_range_evenly():
    """One value in each eighth of the logarithmic range; every whole number equally often."""
    drawn = SPACE.draw(8, rng())
    eighths = [int(8 * math.log(one["learning_rate"] / 1e-4) / math.log(100)) for one in drawn]
    assert sorted(eighths) == list(range(8)) and eighths != sorted(eighths)
    assert sorted(one["num_iterations"] for one in drawn) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert all(type(one["num_iterations"]) is int for one in drawn)
    assert Range(2.0, 4.0).at(0.25) == 2.5 and Range(1e-4, 1e-2, log=True).at(0.5) == pytest.approx(1e-3)


@pytest.mark.parametrize(
    "value, factor, moved", [(2, 1.25, 3), (2, 0.8, 1), (8, 1.25, 8), (1, 0.8, 1), (4, 1.25, 5), (8, 0.5, 4)]
)
def test_whole_numbers_move_both_ways_by_at_least_one_and_stay_inside(value, factor, moved):
    assert Range(1, 8).move(value, factor, whole=True) == moved


def test_fractions_move_by_the_factor_and_stay_inside():
    one = Range(0.1, 1.0)
    assert one.move(0.4, 1.25) == 0.5 and one.move(0.4, 0.8) == pytest.approx(0.32)
    assert one.move(0.9, 1.25) == 1.0 and one.move(0.11, 0.8) == 0.1


def test_a_mutation_moves_one_option_and_both_ways():
    start = {"learning_rate": 1e-3, "num_iterations": 4}
    source, seen = rng(), Counter()
    for _ in range(400):
        made = SPACE.mutate(start, source)
        (name,) = (name for name in made if made[name] != start[name])
        seen[name, made[name] > start[name]] += 1
    assert len(seen) == 4 and min(seen.values()) > 60


@pytest.mark.parametrize("bad", [(0, 1), (2, 1), (1, 1), (-1, 1), (1, math.inf)])
def test_ranges_without_room_are_refused(bad):
    with pytest.raises(ValueError, match="low"):
        Range(*bad)
    with pytest.raises(ValueError, match="grow"):
        Range(1, 2, shrink=1.5)


def test_options_that_members_share_are_refused_by_name():
    for name in (
        "max_turns",
        "per_device_train_batch_size",
        "seed",
        "num_generations",
        "max_steps",
        "model_init_kwargs",
    ):
        with pytest.raises(ValueError, match=f"{name} is the same for all members.*learning_rate"):
            search_space(MultiTurnGRPOConfig, {name: Range(1, 2)})
    with pytest.raises(ValueError, match="gae_lambda is no option of MultiTurnGRPOConfig"):
        search_space(MultiTurnGRPOConfig, {"gae_lambda": Range(0.1, 1)})
    with pytest.raises(ValueError, match=r"num_iterations takes whole numbers, got Range\(1, 2.5\)"):
        search_space(MultiTurnGRPOConfig, {"num_iterations": Range(1, 2.5)})
    space = search_space(MultiTurnPPOConfig, {"gae_lambda": Range(0.1, 1), "num_iterations": Range(1, 2)})
    assert space.whole == {"num_iterations"}
    with pytest.raises(ValueError, match="learning_rate"):
        HyperparameterConfig()
    with pytest.raises(TypeError, match="learning_rate=0"):
        HyperparameterConfig(learning_rate=0.1)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------ fitness


def test_a_fitness_has_the_error_of_a_mean_over_units():
    values = [1.0, 2.0, 4.0, 3.0]
    assert standard_error(values) == pytest.approx(np.std(values, ddof=1) / 2)
    assert standard_error([1.0, 1.0, 4.0, 4.0], [0, 0, 1, 1]) == pytest.approx(np.std([1, 4], ddof=1) / 2**0.5)
    assert math.isnan(standard_error([1.0, 2.0], [0, 0]))


def test_differences_are_paired_and_ties_are_no_wins():
    """The members' episodes vary a lot, their differences little: by the unpaired errors it would be a tie."""
    one, other = score(0, 0.1, 5.1, 9.2, 3.1), score(1, 0.0, 5.0, 9.0, 3.0)
    paired = one.minus(other)
    assert paired.mean == pytest.approx(0.125) and paired.standard_error == pytest.approx(0.025)
    assert not paired.tied and one.standard_error > 1
    assert score(0, 1.0, 0.0, 1.0, 1.0).minus(score(1, 0.0, 1.0, 1.0, 0.0)).tied
    assert score(0, 1.0, 2.0).minus(score(1, 1.0, 2.0)).tied  # equal: no error, no difference
    assert not score(0, 1.5, 2.5).minus(score(1, 1.0, 2.0)).tied


def test_a_member_that_fails_where_it_would_lose_does_not_win():
    """Of 256 episodes one fails 235 and wins the others; another wins half of all."""
    brittle, honest = with_failures([[None] * 235 + [1.0] * 21, [0.0, 1.0] * 128], None)
    assert sum(brittle) / 256 == 21 / 256 and set(honest) == {0.0, 1.0}
    assert [one.member for one in ranked([score(0, *brittle), score(1, *honest)])] == [1, 0]
    assert with_failures([[None, 2.0], [5.0, -3.0]], None) == [(-3.0, 2.0), (5.0, -3.0)], "the lowest of all members"
    assert with_failures([[None, 2.0]], -9.0) == [(-9.0, 2.0)], "or the lowest that there is"
    units = score(0, 1.0, 2.0, 3.0), replace(score(1, 0.0, 0.0, 0.0), units=(0, 0, 0))
    assert units[1].minus(units[0]).standard_error == units[0].minus(units[1]).standard_error > 0


# ---------------------------------------------------------------------------------------------------------- selection


def test_halving_keeps_the_better_half_unchanged():
    scores = [around(n, mean) for n, mean in enumerate((0.1, 0.9, 0.5, 0.7, 0.3))]
    selection = Halving().select(scores, 6, SPACE, rng())  # a sixth one failed
    assert [one.parent for one in selection.successors] == [1, 3, 2]
    assert all(one.hyperparameters == scores[0].hyperparameters for one in selection.successors)
    assert set(selection.reasons) == {0, 4} and "-0.2" in selection.reasons[4] and "tied" not in selection.reasons[4]
    tied = Halving().select([score(0, 1.0, 0.0, 1.0), score(1, 0.0, 1.0, 1.0)], 2, SPACE, rng())
    assert [one.parent for one in tied.successors] == [0] and "tied" in tied.reasons[1]


def test_tournaments_keep_the_best_and_mutate_the_winners():
    scores = [around(n, n / 10) for n in range(4)]
    won, mutated = Counter(), 0
    for seed in range(300):
        selection = Tournament(size=2, mutation_probability=0.5).select(scores, 4, SPACE, rng(seed))
        elite, *others = selection.successors
        assert elite.parent == 3 and elite.hyperparameters == scores[3].hyperparameters
        assert len({(one.parent, str(one.hyperparameters)) for one in selection.successors}) == 4  # no run twice
        won.update(one.parent for one in others)
        mutated += sum(one.hyperparameters != scores[0].hyperparameters for one in others)
        assert set(selection.reasons) == {0, 1, 2, 3} - {one.parent for one in selection.successors}
    shares = [won[n] / 900 for n in range(4)]  # of two draws with replacement, the larger: 1, 3, 5 and 7 sixteenths
    assert shares == pytest.approx([1 / 16, 3 / 16, 5 / 16, 7 / 16], abs=0.04)
    assert mutated / 900 > 0.5
    without = Tournament(elitism=False, mutation_probability=1.0).select(scores, 4, SPACE, rng())
    assert all(one.hyperparameters != scores[0].hyperparameters for one in without.successors)


def test_members_that_tie_share_the_chances_of_a_tournament():
    scores = [score(0, 1.0, 0.0, 1.0, 1.0), score(1, 0.0, 1.0, 1.0, 0.0)]
    won = Counter(
        Tournament(size=8, elitism=False).select(scores, 1, SPACE, rng(seed)).successors[0].parent
        for seed in range(200)
    )
    assert 70 < won[0] < 130


def test_strategies_by_name():
    assert strategy_of(None, 16) == Halving() and strategy_of(None, 17) == Tournament()
    assert strategy_of("tournament", 4) == Tournament() and strategy_of(Tournament(size=3), 4) == Tournament(size=3)
    with pytest.raises(ValueError, match="'evolution'"):
        strategy_of("evolution", 4)
    for bad in (lambda: Tournament(size=0), lambda: Tournament(mutation_probability=2)):
        with pytest.raises(ValueError, match=r"size=0|mutation_probability=2"):
            bad()


# ----------------------------------------------------------------------------------------------------------- schedule


class Shape:
    """The options that a schedule reads: two micro-steps a step, four a generation batch, two passes."""

    steps_per_generation, gradient_accumulation_steps, num_iterations, generation_batch_size, max_steps = (
        4,
        2,
        2,
        32,
        40,
    )


def test_rounds_end_with_generation_batches_where_iterations_differ():
    plan = Schedule.of(Shape, 4, iterations_differ=True)
    assert plan.ends == (8, 20, 32, 40) and plan.quantum == 4
    assert plan.steps(8, 2) == 8 and plan.steps(8, 1) == 4 and plan.steps(8, 3) == 12
    assert plan.episodes(0, 8) == 64 and plan.episodes(8, 20) == 96
    assert Schedule.of(Shape, 4, iterations_differ=False).ends == (10, 20, 30, 40)
    assert Schedule.of(Shape, [4, 12], iterations_differ=True).ends == (4, 12, 40)
    for bad in (0, 41, [10], [8, 4], [44]):
        with pytest.raises(ValueError, match="rounds"):
            Schedule.of(Shape, bad, iterations_differ=True)


def test_a_budget_of_episodes_cuts_the_last_round():
    plan = Schedule.of(Shape, 4, iterations_differ=True)
    assert plan.end(0, 8, None) == 8 and plan.end(8, 4, 10_000) == 20 and plan.end(40, 1, None) is None
    assert plan.end(0, 8, 8 * 64) == 8 and plan.end(0, 8, 8 * 64 - 1) == 4 and plan.end(0, 8, 8 * 32 - 1) is None
