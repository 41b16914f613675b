"""The statistics of ``benchmarks/ahead_learning.py`` by hand, and what the diagnosis says of its saved runs."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "evaluation"))

import ahead_learning as bench
from diagnosed import Options

from agile_trainers.evaluation.diagnosis import Diagnosis


def test_the_right_answers_of_the_game() -> None:
    """Digit d of turn t asks for d + t and 2 d + t + 1, modulo 3; the second is shown next."""
    game = bench.Chain()
    assert game.reset(seed=5)[0] == "first 2"
    assert game.step("2 2")[:3] == ("second 2", 1 / 3, False)
    assert game.step("0 1")[:3] == ("third 1", 1 / 6, False)  # 0 and 0 were right
    assert game.step("0")[1:] == (0.0, True, False, {"success": False})
    game.reset(seed=0)
    assert [game.step(said)[1] for said in ("0 1", "2 1", "0 2")] == pytest.approx([1 / 3] * 3)


def test_holm_by_hand() -> None:
    assert bench.holm([0.03, 0.01, 0.04, 0.5]) == pytest.approx([0.09, 0.04, 0.09, 0.5])


def test_a_comparison_by_hand() -> None:
    """Differences 1 and 3: mean 2, standard error 1, t = 2 with one degree of freedom; resamples have means 1, 2, 2, 3."""
    mean, low, high, p = bench.compared([2.0, 5.0], [1.0, 2.0])
    assert (mean, low, high) == pytest.approx((2.0, 1.075, 2.925))
    assert p == pytest.approx(0.29516724)


def test_the_page_has_the_saved_runs() -> None:
    runs = bench.saved_runs()
    assert all(any(chosen.items() <= run.items() for run in runs) for chosen in bench.wanted())
    assert bench.tables(runs) in bench.PAGE.read_text()


def test_the_diagnosis_names_an_old_sampler_in_broken_runs_alone() -> None:
    """In all that lag 4 broke without a correction, and in none that learned without falling below its start.

    The bounds are from the runs that were there before those of ``decision_truncate``, one of which they name.
    """
    names = {"reward": "reward", "kl": "drift/kl", "effective": "drift/effective_sample_size"}

    def named(run: dict[str, Any]) -> bool:
        diagnosis, told = Diagnosis(Options()), set()
        for step in range(len(run["reward"])):
            values = {name: run[column][step] for column, name in names.items() if run[column][step] is not None}
            told |= {finding.name for finding in diagnosis.look(step, values)}
        return "sampler_too_old" in told

    def healthy(run: dict[str, Any]) -> bool:
        rewards = [fmean(run["reward"][start : start + 10]) for start in range(len(run["reward"]) - 9)]
        return run["after"] >= 0.6 and min(rewards) >= 0.8 * rewards[0]

    runs = [run for run in bench.saved_runs() if run["rate"] == bench.RATE]
    broken = [run for run in runs if run["lag"] == 4 and run["correction"] == "none"]
    assert len(broken) == 5 and all(map(named, broken))
    later = [run for run in runs if run["correction"].startswith("decision_truncate")]
    well = [run for run in runs if healthy(run) and run not in later]
    assert len(well) >= 15 and not any(map(named, well))
    wrong = [run for run in later if healthy(run) and named(run)]
    assert [(run["lag"], run["correction"], run["seed"]) for run in wrong] == [(4, "decision_truncate 2", 0)]
    assert len(list(filter(healthy, later))) == 19
