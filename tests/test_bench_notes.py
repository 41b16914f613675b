"""What ``benchmarks/notes.py`` found: a courier learns to write notes if they get credit, and not otherwise."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import notes as bench


def test_the_saved_runs_show_that_the_notes_are_what_is_learned() -> None:
    runs = bench.load()
    assert {(run["seed"], run["credited"]) for run in runs} == {
        (seed, credited) for seed in bench.SEEDS for credited in (True, False)
    }
    assert not [run for run in runs if bench.misses(run)]


@pytest.mark.slow
@pytest.mark.parametrize("credited", [True, False])
def test_notes_are_learned_with_credit_alone(credited: bool) -> None:
    run = bench.train(0, credited)
    assert run["before"] < bench.CHANCE and not bench.misses(run)
