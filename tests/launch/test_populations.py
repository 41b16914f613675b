"""A population is the same for any number of processes, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from launched_runs import distance, launch, weights

from agile_trainers.populations import Lineage

pytestmark = pytest.mark.launch
SCRIPT = Path(__file__).with_name("populations.py")


def test_two_processes_are_one(embedded_model, tmp_path):
    for config in ("cpu/single", "cpu/ddp"):
        done = launch(config, SCRIPT, embedded_model, tmp_path / config)
        assert done.returncode == 0, done.stderr[-4000:]
    assert "rank 0 of 2" in done.stdout and "rank 1 of 2" in done.stdout
    one, two = (Lineage.read(tmp_path / config) for config in ("cpu/single", "cpu/ddp"))
    assert [replace(event, seconds=0.0) for event in one.events] == [
        replace(event, seconds=0.0) for event in two.events
    ]
    assert one.best == two.best and len(one.members) > 3
    for member in one.members:
        left, right = (weights(tmp_path / config / f"member-{member:02d}") for config in ("cpu/single", "cpu/ddp"))
        assert distance(left, right) == 0.0
