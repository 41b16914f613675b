"""Two environments with limits of their own on two processes: each is learned, and a killed run goes on bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest
from launched_runs import launch
from recorded import recorded

from agile_environments.probes import PROBE_WORDS
from agile_trainers.embedded import make_embedded_model

pytestmark = pytest.mark.launch


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mixed")
    model = make_embedded_model(folder / "model", words=PROBE_WORDS)
    done = launch("cpu/ddp", Path(__file__).with_name("mixed.py"), model, folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.parametrize("algorithm", ["grpo", "reinforce", "ppo"])
def test_each_environment_is_learned(output, algorithm):
    log = json.loads((output / algorithm / "log.json").read_text())[:-1]
    for name, turns, best in (("low", 1, 1.0), ("high", 3, 3.0)):
        course = [row[f"environments/{name}/return/mean"] for row in log]
        assert course[0] < 0.1 * best and fmean(course[-3:]) > 0.7 * best, (name, course)
        assert {row[f"environments/{name}/turns/max"] for row in log} == {turns}
        assert {row[f"environments/{name}/share"] for row in log} == {0.5}


def test_a_killed_run_goes_on_with_the_same_environments(output):
    assert [(output / "resumed" / f"equal-{rank}").read_text() for rank in (0, 1)] == ["True", "True"]
    played = [
        {
            (record["environment"], record["seed"], tuple(record["completion_ids"]))
            for record in recorded(output / "resumed" / run)
        }
        for run in ("whole", "killed")
    ]
    assert played[0] == played[1] and {name for name, *_ in played[0]} == {"low", "high"}
