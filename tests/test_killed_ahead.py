"""Runs that play ahead are killed with SIGKILL and SIGTERM at random moments, and end as if they had not been."""

from __future__ import annotations

import json
from pathlib import Path

import forks
import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_kills_at_random_moments_change_no_bit(tmp_path: Path) -> None:
    """SIGKILL inside a save with a model, SIGTERM with a script, while environments take random times.

    The seed says which; ``make faults`` has 64.
    """
    only = "threads, 1 rank(s), 1 ahead"
    script = ROOT / "tests" / "faults" / "run_faults.py"
    done = forks.run([script, "--only", only, "--signals", "1", "--seed", "11", "--output", tmp_path])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    outcomes = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [one["setting"].removeprefix("grpo, LoRA, ") for one in outcomes] == [only, f"{only}, scripted"]
    assert [one["inside_saves"] for one in outcomes] == [one["kills"] for one in outcomes] == [1, 0]
    for outcome in outcomes:
        assert outcome["signals"] == 1 and outcome["equal"] and max(outcome["lost_steps"]) <= 1
        assert outcome["left_behind"] == outcome["temporary"] == outcome["unreadable"] == 0
