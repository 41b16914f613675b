"""``benchmarks/agent_server.py`` with a quick sampler, and its saved results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import agent_server


def test_the_sides_sample_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_server, "SAMPLING", 0.001)
    monkeypatch.setattr(agent_server, "SPREAD", 0.0)
    monkeypatch.setattr(agent_server, "CASES", {"3": (3, 0.0005)})
    result = agent_server.measure("3", repetitions=1)
    _, _, tokens = agent_server.play("agents", 3)
    assert len(tokens) == 3 and len(tokens[0]) > agent_server.TURNS * 40
    assert min(result["stepped"]["seconds"] + result["agents"]["seconds"]) > agent_server.TURNS * 0.001
    assert all(ratio > 0 for ratio in agent_server.ratios(result))


def test_the_table_by_hand() -> None:
    result = {
        "stepped": {"seconds": [2.0, 2.0, 4.0], "cpu": [0.128, 0.128, 0.0]},
        "agents": {"seconds": [2.1, 2.0, 5.0], "cpu": [0.256, 0.256, 0.256]},
    }
    expected = "| 16 | 2.00 | 2.10 | 1.050 (1.000 to 1.250) | 1.0 | 2.0 |"
    assert agent_server.table({"16": result}).splitlines()[2] == expected


def test_the_saved_results_reach_the_bar_and_are_on_the_page() -> None:
    results = json.loads(agent_server.RESULTS.read_text())
    assert all(
        median(agent_server.ratios(results[case])) <= agent_server.BAR for case in results if "in step" not in case
    )
    assert agent_server.table(results) in agent_server.PAGE.read_text()
