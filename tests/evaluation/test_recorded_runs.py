"""The diagnosis of recorded runs: planted failures are named, at the log given here, and nothing else is said.

``benchmarks/planted_failures.py`` trained them and wrote ``recorded_runs.json``.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from diagnosed import Options

from agile_trainers.evaluation.diagnosis import Diagnosis

RUNS = json.loads((Path(__file__).parent / "recorded_runs.json").read_text(encoding="utf-8"))
FINDINGS: dict[str, list[tuple[int, str]]] = {
    "length": [(5, "reward_misses_success")],
    "flipped sign": [(5, "reward_misses_success")],
    "learning rate times 100": [(6, "policy_destroyed")],
    "learning rate .3, 64 episodes": [(6, "policy_destroyed")],
    "learning rate .05": [(11, "policy_destroyed")],
    "learning rate .05, 64 episodes": [(6, "policy_destroyed")],
    "giving up pays": [(11, "giving_up_pays")],
    "one turn of four": [(20, "episodes_cut")],
    "two turns of four": [(20, "episodes_cut")],
    "prompts unread": [(100, "prompts_unread")],
    "random reward": [(5, "reward_misses_success")],
    "beta=10": [(15, "kl_pins_policy")],
    "temperature .01": [(5, "zero_advantage_groups")],
    "one secret, no rows": [(17, "solved")],
    "empty observations": [(10, "prompts_unread")],
    "environment dies": [(2, "environment_failing"), (12, "environment_failing"), (22, "environment_failing")],
    "NaN for one answer": [(1, "environment_failing"), (11, "environment_failing"), (21, "environment_failing")],
    "NaN for one answer, reward function": [(1, "rewards_missing")],
    "one task": [(10, "one_task")],
    "entropy bonus": [(16, "entropy_runaway")],
    "random reward function": [(5, "reward_misses_success")],
    "gamma=0": [(5, "reward_discounted")],
    "healthy, grpo": [],
    "healthy, kl": [],
    "healthy, 64 episodes": [],
    "healthy, reinforce": [],
    "healthy, ppo": [],
    "healthy, slow": [],
    "healthy, probe conditional": [(25, "solved")],
    "healthy, probe memory": [(59, "solved")],
    "healthy, probe two inputs": [(48, "solved")],
}
"""Log (from 1) and name of each finding."""


def logs_of(name: str) -> list[dict[str, float]]:
    """Return the metrics of each log; those that a log did not have are left out."""
    run = RUNS[name]
    columns = {metric: v if isinstance(v, list) else [v] * run["logs"] for metric, v in run["metrics"].items()}
    return [{m: values[log] for m, values in columns.items() if values[log] is not None} for log in range(run["logs"])]


def told(name: str, **options: Any) -> list[tuple[int, str]]:
    diagnosis = Diagnosis(replace(Options(), **RUNS[name]["options"], **options))
    return [
        (log, finding.name) for log, metrics in enumerate(logs_of(name), 1) for finding in diagnosis.look(log, metrics)
    ]


@pytest.mark.parametrize("name", RUNS)
def test_what_a_run_is_told(name: str) -> None:
    assert told(name) == FINDINGS[name]


def test_every_run_is_judged_and_every_failure_named_within_22_logs() -> None:
    """But unread prompts: healthy policies may begin to read theirs after 20 to 60 batches."""
    assert FINDINGS.keys() == RUNS.keys()
    for name, found in FINDINGS.items():
        assert name.startswith("healthy") or found[0][0] <= (100 if name == "prompts unread" else 22), name
