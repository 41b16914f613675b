"""Simulated runs without a fault are told nothing in 99 of 100 cases, and simulated faults are found.

``benchmarks/simulated_runs.py`` simulates them; ``benchmarks/results/simulated_runs.json`` has the result of 2,000.
``benchmarks/healthy_runs.py`` has trained real ones.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import healthy_runs
import simulated_runs

from agile_trainers.evaluation.diagnosis import BY_NAME, MetricHistory

RUNS = 100


def test_a_run_without_a_fault_is_told_nothing() -> None:
    """At most two of 100 short runs. The recorded 2,000 have the rate; chance has more room here."""
    names = [*simulated_runs.CURVES]
    told = [
        simulated_runs.told(seed, simulated_runs.CURVES[names[seed % len(names)]], lengths=(40,))
        for seed in range(RUNS)
    ]
    found = Counter(name for run in told for name in {name for _, name in run} - {"solved"})
    assert sum(found.values()) <= RUNS / 50, found


def test_the_recorded_simulation_holds_the_rate_that_the_page_states() -> None:
    result = json.loads(simulated_runs.RESULT.read_text(encoding="utf-8"))
    assert result["runs"] == simulated_runs.RUNS and result["told"] <= result["runs"] / 100
    page = (Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert f"{result['told']} of {result['runs']:,}" in page


def test_recorded_runs_without_a_fault_are_told_nothing_but_that_they_have_solved_their_task() -> None:
    """Real trainings: five algorithms, eight tasks."""
    told = {tuple(map(str, [*line.values()][:3])): healthy_runs.told(line) for line in healthy_runs.saved()}
    assert told and {run: found for run, found in told.items() if {name for _, name in found} - {"solved"}} == {}


def test_judges_that_only_vary_are_told_nothing_and_a_fall_is_found() -> None:
    """At most one of 60 runs of 80 batches; the fall from step 20 on in all of 20."""

    def told(seed: int, held_out: Callable[[int], float]) -> bool:
        rng, history = random.Random(seed), MetricHistory()
        for step in range(80):
            score, other = (value + rng.gauss(0, 0.03) for value in (0.3 + 0.005 * step, held_out(step)))
            history.add({"judges/score": score, "judges/held_out": other})
            if BY_NAME["judge_overoptimized"].shown_by(history, None):
                return True
        return False

    assert sum(told(seed, lambda step: 0.5) for seed in range(60)) <= 1
    assert all(told(seed, lambda step: 0.5 - 0.006 * max(step - 20, 0)) for seed in range(20))


@pytest.mark.parametrize(("after", "length", "share"), [(0.06, 12, 0.9), (0.25, 40, 0.9)])
def test_a_fall_is_found(after: float, length: int, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that loses most of its success of .6 with the first update, in batches of 12 groups of 8 equal tasks."""
    monkeypatch.setattr(simulated_runs, "GROUPS", ((12, 8),))
    monkeypatch.setattr(simulated_runs, "EVENNESS", (1e6,))

    def falls(batch: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return np.where(batch < 1, 0.6, after)

    assert sum("worse_than_start" in dict(told_by_name(seed, falls, length)) for seed in range(40)) >= share * 40


def test_a_slow_fall_is_found_because_more_batches_were_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Success from .37 to .18 within 150 batches, of which no two neighbours differ clearly."""
    monkeypatch.setattr(simulated_runs, "GROUPS", ((8, 8),))
    monkeypatch.setattr(simulated_runs, "EVENNESS", (8.0,))

    def falls(batch: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return 0.37 - 0.19 * np.minimum(batch / 150, 1)

    found = [dict(told_by_name(seed, falls, 200)).get("worse_than_start") for seed in range(10)]
    assert sum(step is not None for step in found) >= 5, found


def told_by_name(seed: int, curve: simulated_runs.Curve, length: int) -> list[tuple[str, int]]:
    return [(name, step) for step, name in reversed(simulated_runs.told(seed, curve, (length,)))]
