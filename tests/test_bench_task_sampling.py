"""The figures of ``make bench-tasks``: computed by hand, and shown on the page as the runs were saved."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import task_sampling as bench


def test_the_page_shows_the_saved_runs() -> None:
    table = bench.table(bench.summarize(bench.load()))
    assert f"{bench.BEGIN}\n\n{table}\n\n{bench.END}" in bench.PAGE.read_text(encoding="utf-8")


def test_episodes_to_a_success_by_hand() -> None:
    curve = [[0, 0.1], [10, 0.4], [20, 0.4], [30, 1.0], [40, 1.0]]  # smoothed: .2, .3, .6, .8, 1
    assert bench.episodes_to(curve, 0.45) == pytest.approx(15)
    assert bench.episodes_to(curve, 0.1) == 0
    assert bench.episodes_to([[0, 0.1], [10, 0.1]], 0.5) == 10


def test_ratios_are_paired_by_seed_and_geometric() -> None:
    plain = {"part": "demo", "arm": "plain", "episodes": 100, "success": 0.9}
    other = {**plain, "arm": "resampled", "episodes": 150}
    runs = [
        {**plain, "seed": 0, "signal": 0.1},
        {**plain, "seed": 1, "signal": 0.4},
        {**plain, "seed": 2, "signal": 0.4},
    ]
    runs += [{**other, "seed": 1, "signal": 0.4}, {**other, "seed": 0, "signal": 0.4}]
    (found,) = bench.summarize(runs).values()
    ratio = found["compared"]["signal"]
    assert (
        found["seeds"] == [0, 1] and ratio["ratio"] == pytest.approx(2) and ratio["interval"] == pytest.approx((1, 4))
    )
    assert found["signal"] == pytest.approx([0.25, 0.4]) and found["episodes"] == [100, 150]


def test_a_run_that_begins_at_the_target_has_no_ratio() -> None:
    """The best is .6: .9 of it is .54, below the start; .9 of the gain is .595, after 19 and 9.5 episodes."""
    curves = {"uniform": [[0, 0.55], [10, 0.55], [20, 0.55], [30, 0.7], [40, 0.55]]}
    curves["adaptive"] = [[n / 2, success] for n, success in curves["uniform"]]
    runs = [{"part": "mixed", "arm": arm, "seed": 0, "curve": curve, "signal": 0.5} for arm, curve in curves.items()]
    found = bench.summarize(runs)["mixed"]
    assert found["compared"]["needed"] is None and found["compared"]["gained"]["ratio"] == pytest.approx(0.5)
    assert "none: a run begins there" in bench.table({"mixed": found})
