"""The figures of ``make bench-tasks``: computed by hand, and shown on the page as the runs were saved."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import task_sampling as bench


def test_the_page_shows_the_saved_runs() -> None:
    runs = bench.load()
    assert len(runs) == len(bench.RESULTS.read_text(encoding="utf-8").splitlines())
    tables = bench.tables(bench.summarize(runs))
    page = bench.PAGE.read_text(encoding="utf-8")
    assert f"{bench.BEGIN}\n\n{tables}\n\n{bench.END}" in page and f"docs/images/{bench.PICTURE.name})" in page


def test_a_run_of_other_settings_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = bench.RESULTS.read_text(encoding="utf-8").splitlines()
    (tmp_path / "runs.jsonl").write_text(
        lines[0] + "\n" + lines[1].replace('"updates":', '"updates":1'), encoding="utf-8"
    )
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "runs.jsonl")
    assert len(bench.load()) == 1


def test_the_best_policy_by_hand() -> None:
    """In 4 guesses, halving finds 1 + 2 + 4 + 8 = 15 numbers."""
    assert pytest.approx((1 + 1 + 15 / 16 + 15 / 32 + 15 / 64) / 5) == bench.HALVING


def test_episodes_to_a_success_by_hand() -> None:
    curve = [[0, 0.1], [10, 0.4], [20, 0.4], [30, 1.0], [40, 1.0]]  # smoothed: .2, .3, .6, .8, 1
    assert bench.episodes_to(curve, 0.45) == pytest.approx(15)
    assert bench.episodes_to(curve, 0.1) == 0
    assert bench.episodes_to([[0, 0.1], [10, 0.1]], 0.5) == 10


def test_the_success_is_the_mean_of_the_ranges() -> None:
    episodes, success = bench.smooth([[0, 0.0, 1.0], [10, 0.5, 1.0], [20, 1.0, 1.0]])  # .5, .75, 1
    assert episodes.tolist() == [0, 10, 20] and success == pytest.approx([7 / 12, 3 / 4, 11 / 12])


def test_ratios_are_paired_by_seed_and_geometric() -> None:
    plain = {"part": "demo", "arm": "none", "episodes": 100, "episodes_per_update": 96.0, "success": 0.9}
    two, four = {**plain, "arm": "replace 2", "episodes": 150}, {**plain, "arm": "replace 4", "episodes": 400}
    runs = [
        {**plain, "seed": 0, "informative": 0.1},
        {**plain, "seed": 1, "informative": 0.4},
        {**plain, "seed": 2, "informative": 0.4},
    ]
    runs += [
        {**two, "seed": 1, "informative": 0.4},
        {**two, "seed": 0, "informative": 0.4},
        {**four, "seed": 2, "informative": 0.8},
    ]
    (arms,) = bench.summarize(runs).values()
    found = arms["replace 2"]
    ratio = found["compared"]["informative"]
    assert (
        found["seeds"] == [0, 1] and ratio["ratio"] == pytest.approx(2) and ratio["interval"] == pytest.approx((1, 4))
    )
    assert found["informative"] == pytest.approx([0.25, 0.4]) and found["episodes"] == [100, 150]
    assert found["compared"]["episodes"]["ratio"] == pytest.approx(1.5)
    assert arms["replace 4"]["seeds"] == [2] and arms["replace 4"]["compared"]["episodes"]["ratio"] == pytest.approx(4)
    first, _, *rows = bench.demo_table(arms).splitlines()
    assert [len(row.split("|")) for row in rows] == [len(first.split("|"))] * 3
    assert " 2.00 (one seed) " in rows[2] and " 4.00 (one seed) " in rows[2]
    assert rows[1].startswith("| `resample_zero_advantage_groups=2` | 2 | 0.400 | 2.00 (1.00 to 4.00) | 150 |")


def curves() -> list[dict[str, object]]:
    """Two seeds of both arms; the adaptive one needs half of the episodes."""
    success = [0.55, 0.55, 0.55, 0.7, 0.55]
    return [
        {
            "part": "mixed", "arm": arm, "seed": seed, "informative_shares": [0.5, 0.4, 0.3, share],
            "curve": [[n * every, *[value] * len(bench.RANGES)] for n, value in enumerate(success)],
        }
        for seed, share in ((0, 0.1), (1, 0.3))
        for arm, every in (("uniform", 10), ("adaptive", 5))
    ]  # fmt: skip


def test_a_run_that_begins_at_the_target_has_no_ratio() -> None:
    """The best is .6: .9 of it is .54, below the start; .9 of the gain is .595, after 19 and 9.5 episodes."""
    found = bench.summarize(curves())["mixed"]["adaptive"]
    assert found["compared"]["needed"] is None and found["compared"]["gained"]["ratio"] == pytest.approx(0.5)
    assert found["gained"] == pytest.approx([19, 9.5]) and found["range of 64"] == pytest.approx([0.6, 0.6])
    assert "none: a run begins there" in bench.mixed_table("adaptive", found)


def test_the_picture_shows_mean_and_range_over_seeds() -> None:
    success, informative = bench.picture(curves()).axes
    assert success.lines[0].get_xdata() == pytest.approx([0, 10, 20, 30, 40])
    assert success.lines[1].get_ydata() == pytest.approx([0.55, 0.55, 0.6, 0.6, 0.6])
    assert informative.lines[1].get_xdata() == pytest.approx([5, 10, 15, 20])
    assert informative.lines[1].get_ydata() == pytest.approx([0.5, 0.4, 0.3, 0.2])
    low, high = informative.collections[1].get_datalim(informative.transData).intervaly
    assert (low, high) == pytest.approx((0.1, 0.5))
