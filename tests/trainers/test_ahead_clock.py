"""Batches ahead on a virtual clock: what is trained, with which policy, and when, beside a plain simulation.

``benchmarks/ahead_clock.py`` plays with the engine and the scheduler of a run: stepped by the trainer, or in a thread.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import ahead_clock as bench
import ahead_paths as paths

MODES = pytest.mark.parametrize("plays_on", [False, True], ids=["paused", "plays on"])


def work_of(seed: int, count: int, size: int, tail: str = "Pareto") -> list[list[list[float]]]:
    return paths.batches(paths.episodes(tail, seed), count, size)


def check(work: paths.Work, ahead: int, plays_on: bool, slots: int, update: float, **settings: Any) -> bench.Run:
    """Train; the batches are those that were drawn, in their order, each played by the policy of its version alone."""
    done = bench.run(work, ahead, slots=slots, update=update, plays_on=plays_on, **settings)
    count, size = len(work), len(work[0])
    assert done.trained == [[*range(size * number, size * (number + 1))] for number in range(count)]
    assert done.versions == [{max(0, number - ahead)} for number in range(count)]
    assert done.open == [min(ahead + 1, count - number) for number in range(count)]
    assert not done.defects(ahead, size)
    path = paths.makespan(work, ahead, slots, update, plays_on=plays_on)
    assert done.makespan == pytest.approx(path, rel=1e-9)
    if plays_on:
        assert done.computed == pytest.approx(sum(sum(map(sum, batch)) for batch in work))
    return done


# ------------------------------------------------------------------------------------------------ the plain simulation


@pytest.mark.parametrize(
    "ahead, plays_on, most_open, expected",
    [(0, True, None, 10), (0, False, None, 10), (1, True, None, 7), (1, False, None, 9), (1, True, 1, 10)],
)
def test_times_by_hand(ahead: int, plays_on: bool, most_open: int | None, expected: float) -> None:
    """Two slots and updates of 1.

    With a batch ahead, batch 1 begins at once: its episode of 4 takes the slot that is free at 1 and ends at 5. The update
    on batch 0 is from 2 to 3, the others from 5 to 6 and to 7. If updates pause it, that episode begins again at 3.
    """
    work = [[[2.0], [1.0]], [[4.0], [1.0]], [[1.0], [1.0]]]
    assert paths.makespan(work, ahead, 2, 1.0, plays_on=plays_on, most_open=most_open) == expected


def test_turns_wait_behind_what_came_first() -> None:
    """One slot: the second turn of an episode waits behind the other episode."""
    assert paths.makespan([[[1.0, 2.0], [4.0]]], 0, 1, 0.5) == 7.5
    assert paths.makespan([[[1.0, 2.0]], [[4.0]]], 1, 1, 0.5) == 8.0, "updates from 7 to 7.5 and 8"
    assert paths.makespan([[[1.0, 2.0]], [[4.0]]], 1, 1, 0.5, plays_on=False) == 8.0


@pytest.mark.parametrize("ahead", range(5))
def test_the_simulation_is_the_recurrence(ahead: int) -> None:
    for seed in range(5):
        work = [[[sum(one)] for one in batch] for batch in work_of(seed, 20, 8)]
        lengths = [[sum(one) for one in batch] for batch in work]
        expected = paths.recurrence(lengths, ahead, 5, 4.0)
        assert paths.makespan(work, ahead, 5, 4.0) == pytest.approx(expected, rel=1e-12)
        assert expected >= max(20 * 4.0 + max(lengths[0]), sum(map(sum, lengths)) / 5 + 4.0)


def test_at_most_n_open_batches_are_one_batch_fewer_ahead() -> None:
    work = work_of(0, 30, 8)
    for ahead in (1, 2, 3):
        fewer = paths.makespan(work, ahead - 1, 5, 4.0)
        assert paths.makespan(work, ahead, 5, 4.0, most_open=ahead) == fewer > paths.makespan(work, ahead, 5, 4.0)


def test_the_rule_that_discards_by_hand() -> None:
    """One slot, groups of 1 time unit, updates of 1.5 with a group each.

    Group 0 is trained on from 1 to 2.5. Groups 1 and 2 begin before 2.5 and are too old then, unless an update is allowed
    between; group 3 is trained on from 4 to 5.5.
    """
    settings: dict[str, Any] = {"slots": 1, "update": 1.5, "updates": 2, "groups": 1, "members": 1}
    ones: Iterator[list[float]] = repeat([1.0])
    done = paths.discarding(ones, 0, **settings)
    assert (done.makespan, len(done.trained), len(done.discarded), done.share) == (5.5, 2, 2, 0.5)
    done = paths.discarding(ones, 1, **settings)
    assert (done.makespan, len(done.trained), len(done.discarded), done.bias) == (4.0, 2, 0, 1.0)


def test_the_rule_that_discards_prefers_short_groups() -> None:
    done = paths.discarding(paths.episodes("lognormal", 0), 1, 16, 3.0, updates=50, groups=8, members=2)
    assert done.share > 0.2 and done.bias < 0.8
    assert paths.mean(done.discarded) > paths.mean(done.started) > paths.mean(done.trained)


# ------------------------------------------------------------------------------------------------- the scheduler itself


@MODES
@pytest.mark.parametrize("ahead", range(5))
def test_heavy_tails(ahead: int, plays_on: bool) -> None:
    for seed, tail in enumerate(paths.TAILS):
        check(work_of(seed, 12, 8, tail), ahead, plays_on, slots=8, update=3.0)


@MODES
def test_any_shape_of_run(plays_on: bool) -> None:
    """Batches of one episode, a run of one batch, more batches ahead than the run has, one slot, long and short updates."""
    chance = random.Random(1)
    for seed in range(40):
        count, size = chance.randint(1, 6), chance.choice([1, 1, 2, 5])
        settings = {"slots": chance.choice([1, 2, 9]), "update": chance.choice([0.01, 1.7, 40.0])}
        check(work_of(seed, count, size), chance.randint(0, 8), plays_on, **settings)


@MODES
def test_a_process_that_goes_on(plays_on: bool) -> None:
    """Killed after any updates: the same episodes, each played to its end by the policy that it began with."""
    chance = random.Random(2)
    for seed in range(30):
        count, size, ahead = chance.randint(2, 8), chance.choice([1, 2, 6]), chance.randint(0, 4)
        killed = chance.sample(range(count), chance.randint(1, count))
        done = bench.run(work_of(seed, count, size), ahead, slots=4, update=2.0, plays_on=plays_on, killed=killed)
        assert not done.defects(ahead, size), (seed, killed)


class Failing(bench.Numbered):
    """Some episodes fail: in ``reset``, or in the first step."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        said = super().reset(seed, options)
        assert options is not None
        self.number = options["number"]
        if self.number % 5 == 2:
            raise OSError("no reset")
        return said

    def step(self, action: str) -> Any:
        if self.number % 5 == 3:
            raise OSError("no step")
        return super().step(action)


@MODES
def test_environments_that_fail(plays_on: bool) -> None:
    """They end their episode, which keeps its place in its batch."""
    whole = enumerate(one for batch in work_of(3, 8, 6) for one in batch)
    played = [{2: [], 3: one[:1]}.get(number % 5, one) for number, one in whole]
    work = [played[start : start + 6] for start in range(0, 48, 6)]
    for ahead in (0, 1, 3):
        check(work, ahead, plays_on, slots=4, update=2.0, environment=Failing)


# ---------------------------------------------------------------------------------------------------- the saved results


def test_the_saved_results_hold_and_are_on_the_page() -> None:
    rows = json.loads(bench.RESULTS.read_text())
    assert {(row["tail"], row["seed"], row["ahead"]) for row in rows} == {
        (tail, seed, ahead) for tail in paths.TAILS for seed in bench.SEEDS for ahead in bench.AHEAD
    }
    assert not bench.missed(rows)
    assert bench.table(rows) in bench.PAGE.read_text()


def test_a_run_that_waits_too_long_or_trains_in_another_order_is_named() -> None:
    rows = json.loads(bench.RESULTS.read_text())
    rows[0]["paused"]["time"] *= 1.03
    rows[1]["defects"] = ["the sequence is not the admitted one"]
    first, second = bench.missed(rows)
    assert "paused, 1.030 of the longest path" in first and "1 ahead: the sequence" in second
    done = bench.run(work_of(0, 3, 2), 1)
    done.trained[1].reverse()
    done.versions[2] = {1, 2}
    done.open[0], done.policies[2] = 3, 2
    assert len(done.defects(1, 2)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("tail", paths.TAILS)
def test_a_thousand_groups(tail: str) -> None:
    assert not bench.missed(bench.measure(tail, seed=7))
