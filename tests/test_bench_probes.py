"""The saved runs of ``make probes``: resumed exactly, and shown on the page as they are saved."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import probes


def test_every_saved_run_is_resumed() -> None:
    wanted = [(a, p, s) for a, row in probes.ALGORITHMS.items() for p in row.probes for s in probes.SEEDS]
    saved = [probes.load(probes.settings(*key)) for key in wanted]
    assert [run is not None for run in saved] == [True] * len(wanted)
    assert len(probes.saved_runs()) == len(wanted)


def test_page_shows_the_saved_runs() -> None:
    assert f"{probes.BEGIN}\n\n{probes.table(probes.saved_runs())}\n\n" in probes.PAGE.read_text()
    assert f"{probes.BEGIN}\n\n{probes.meanings()}\n\n{probes.END}" in probes.MEANINGS.read_text()


def test_save_replaces_the_run_of_the_same_name_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = probes.saved_runs()[:2]
    monkeypatch.setattr(probes, "RESULTS", tmp_path / "probes.jsonl")
    probes.save(second)
    probes.save(first)
    probes.save(second | {"seconds": 1.5})
    assert probes.saved_runs() == [first, second | {"seconds": 1.5}]
    assert probes.load(first["settings"]) == first
    assert probes.load({**first["settings"], "options": {}}) is None
    assert [path.name for path in tmp_path.iterdir()] == ["probes.jsonl"]


def test_table_says_not_solved() -> None:
    seeds = probes.saved_runs()[:3]
    failed = {"solved": False, "episodes_to_solve": None}
    assert "| 3/3 | greedy 1.000 (1.000 to 1.000) | 256 (256) | 4096 |" in probes.table(seeds)
    assert "| 2/3 | greedy 1.000 (1.000 to 1.000) | 256 (not solved) | 4096 |" in probes.table(
        [*seeds[:2], seeds[2] | failed]
    )
    assert "| 0/3 | greedy 1.000 (1.000 to 1.000) | not solved | 4096 |" in probes.table(
        [run | failed for run in seeds]
    )
