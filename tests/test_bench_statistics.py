"""The figures of ``make bench-statistics``: the page shows them as they were saved, and they meet the bars."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import evaluation_statistics as bench


def test_the_page_shows_the_saved_figures_which_meet_the_bars() -> None:
    results = json.loads(bench.RESULTS.read_text(encoding="utf-8"))
    page = bench.PAGE.read_text(encoding="utf-8")
    assert f"{bench.BEGIN}\n\n{bench.tables(results)}\n\n{bench.END}" in page
    assert bench.missed(results) == [] and results["replications"] == bench.REPLICATIONS == 10_000
    parts = {"equal": bench.EQUAL, "held_out": bench.HELD_OUT, "different": bench.DIFFERENT, "beyond": bench.BEYOND}
    for key, pairs in parts.items():
        assert {(one["name"], one["kind"]) for one in results[key]} == {(pair.name, pair.kind) for pair in pairs}
    assert len(results["intervals"]) == sum(len(one.units) for one in bench.INTERVALS)
