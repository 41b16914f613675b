"""What ``agile-trainers view --atif`` writes is read by Harbor's own model of ATIF."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("harbor", reason="Harbor is not installed; make test-agents installs it")

from harbor.models import trajectories as atif
from made_records import forest_run, guessing_run, run_of

from agile_trainers.cli.view import main
from agile_trainers.types import StopReason, Trajectory


def test_harbor_reads_every_episode(tmp_path: Path) -> None:
    guessing_run(tmp_path / "plain")
    forest_run(tmp_path / "forest")
    run_of(tmp_path / "failed", [Trajectory([], [], [], [], StopReason.ENVIRONMENT_ERROR, error="no state")])
    main([str(tmp_path), "--atif"])
    lines = (tmp_path / "trajectories.jsonl").read_text(encoding="utf-8").splitlines()
    read = [atif.Trajectory.model_validate_json(line) for line in lines]
    assert len(read) > 50 and len({one.trajectory_id for one in read}) == len(read)
    assert all(one.to_json_dict()["schema_version"] == "ATIF-v1.7" for one in read)
    sampled = [step.metrics for one in read for step in one.steps if step.source == "agent" and step.llm_call_count]
    assert all(len(one.logprobs) == len(one.completion_token_ids) == one.completion_tokens > 0 for one in sampled)
