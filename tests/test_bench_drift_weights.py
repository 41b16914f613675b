"""The figures of ``benchmarks/drift_weights.py``: saved, on the page, and what the page says of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import drift_weights as bench

RESULTS = json.loads(bench.RESULTS.read_text(encoding="utf-8"))


def test_the_page_shows_the_saved_figures() -> None:
    page = bench.PAGE.read_text(encoding="utf-8")
    assert bench.with_tables(page, RESULTS) == page
    assert list(RESULTS["lags"]) == [str(lag) for lag in bench.LAGS]
    assert all(len(trees) == bench.TREES for trees in RESULTS["lags"].values())


def test_the_saved_figures_are_those_of_the_code() -> None:
    found = bench.measured(0, 4)
    saved = RESULTS["lags"]["4"][0]
    assert found["kl"] == pytest.approx(saved["kl"], rel=1e-5)
    assert found["effective"] == pytest.approx(saved["effective"], rel=1e-5)
    for name, values in found["weightings"].items():
        assert values == pytest.approx(saved["weightings"][name], rel=1e-4, abs=1e-6), name


def test_exact_weights_have_no_bias_at_any_lag_and_no_weight_has_one_without_lag() -> None:
    """A bound leaves small drift as it is; at the largest lag every bound counts."""
    unbounded = {name for name, (_, bound) in bench.WEIGHTINGS.items() if bound is None}
    for lag, trees in RESULTS["lags"].items():
        for one in trees:
            exact = {name for name, (bias, *_) in one["weightings"].items() if bias < 1e-6}
            assert exact >= set(bench.EXACT)
            if lag == "0":
                assert exact == set(bench.WEIGHTINGS)
            elif lag == "8":
                assert exact == set(bench.EXACT)
            else:
                assert exact & unbounded == set(bench.EXACT)


def test_the_tables_by_hand() -> None:
    trees = [
        {"kl": 0.25, "effective": 0.5, "weightings": {name: [bias, 1.5, 4.0] for name in bench.WEIGHTINGS}}
        for bias in (0.0, 0.125, 2.0)
    ]
    written = bench.tables({"lags": {"3": trees}}).splitlines()
    assert written[:4] == [
        "| drift | lag 3 |",
        "|---|---|",
        "| KL(snapshot, prox), nats a token | 0.2500 |",
        "| effective share of the episodes | 0.50 |",
    ]
    assert written[5] == "| bias | lag 3 |" and written[7] == "| none | 0.125 |" and written[-1].endswith("| 4.00 |")


def test_what_the_page_says_of_the_figures() -> None:
    lags = {
        lag: {
            name: [median(one["weightings"][name][i] for one in trees) for i in range(3)] for name in bench.WEIGHTINGS
        }
        for lag, trees in RESULTS["lags"].items()
    }
    for lag, found in lags.items():
        bias, deviation, errors = ({name: figures[i] for name, figures in found.items()} for i in range(3))
        if lag == "0":
            continue
        assert bias["turn"] < bias["token"] < bias["none"]
        assert deviation["per decision, values"] < deviation["per decision"]
        assert deviation["per decision, values"] < deviation["sequence"]
        bounded = {name: bias[name] for name, (_, bound) in bench.WEIGHTINGS.items() if bound == bench.CAP}
        assert bounded["per decision, values, at most 2"] <= min(bounded.values()) + 1e-6
        if lag == "8":
            assert bias["none"] > 1.0 and min(errors.values()) > 0.95
        else:
            of_parts = [name for name in found if name.startswith(("token", "turn", "DPPO"))]
            assert max(errors[name] for name in bench.EXACT) < min(errors[name] for name in of_parts)
            assert max(deviation[name] for name in bench.EXACT) < deviation["none"]
