"""Episodes in the form ATIF, by hand; tests/on_agents/test_agents_atif.py reads them with Harbor's own model."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest
from made_records import END, forest_run, play, run_of

from agile_trainers.cli.view import main
from agile_trainers.records.reader import open_records
from agile_trainers.types import StopReason, Trajectory


def test_an_episode_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = [{"role": "user", "content": "low"}, {"role": "user", "content": [{"type": "text", "text": "er"}]}]
    game = play(["7", "9"], [told, ""], [0.25, 1.0], success=True, seed=3)
    failed = Trajectory([], [], [], [], StopReason.ENVIRONMENT_ERROR, error="no state")
    folder = run_of(tmp_path, [game, failed], model="tiny")
    assert main([str(folder), "--atif", "--output", str(tmp_path / "out.jsonl")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out.jsonl'}: 2 episodes\n"
    first, second = map(json.loads, (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines())
    (run,) = open_records(folder)
    (record, _), (row, _) = run.episodes(), run.index()
    two = record["turns"][1]
    logprobs = record["sampling_logprobs"]
    assert first == {
        "schema_version": "ATIF-v1.7",
        "session_id": run.name,
        "trajectory_id": f"{run.name}/{row['key']}",
        "agent": {"name": "agile-trainers", "version": version("agile-trainers"), "model_name": "tiny"},
        "steps": [
            {"step_id": 1, "source": "system", "message": "You play."},
            {"step_id": 2, "source": "user", "message": "Guess a number."},
            {
                "step_id": 3, "source": "agent", "message": "7", "llm_call_count": 1,
                "metrics": {"prompt_tokens": 15, "completion_tokens": 2, "completion_token_ids": [ord("7"), END],
                            "logprobs": logprobs[:2]},
                "observation": {"results": [{"content": "low"}, {"content": '[{"type": "text", "text": "er"}]'}]},
                "extra": {"reward": 0.25, "return": 1.25, "finish_reason": "stop", "info": {"said": "7"}},
            },
            {
                "step_id": 4, "source": "agent", "message": "9", "llm_call_count": 1,
                "metrics": {"prompt_tokens": 15 + two["start"], "completion_tokens": 2,
                            "completion_token_ids": [ord("9"), END],
                            "logprobs": logprobs[two["start"] : two["end"]]},
                "extra": {"reward": 1.0, "return": 1.0, "finish_reason": "stop", "info": {"said": "9", "success": True}},
            },
        ],
        "final_metrics": {
            "total_prompt_tokens": 30 + two["start"], "total_completion_tokens": 4, "total_steps": 4,
            "extra": {"return": 1.25, "success": True, "stop_reason": "terminated", "truncated": False},
        },
        "extra": {"step": 0, "phase": "eval", "index": 0, "seed": 3, "reset_info": {}},
    }  # fmt: skip
    assert second["steps"] == [{"step_id": 1, "source": "system", "message": "no state"}]
    assert second["final_metrics"]["extra"]["stop_reason"] == "environment_error"


def test_calls_of_several_paths_say_where_they_go_on(tmp_path: Path) -> None:
    forest_run(tmp_path)
    main([str(tmp_path), "--atif"])
    trajectories = map(json.loads, (tmp_path / "trajectories.jsonl").read_text(encoding="utf-8").splitlines())
    records = [record for run in open_records(tmp_path) for record in run.episodes()]
    for trajectory, record in zip(trajectories, records, strict=True):
        answers = trajectory["steps"][-len(record["turns"]) :]
        for step, turn in zip(answers, record["turns"], strict=True):
            ordinary = len(record["prompt_ids"]) + turn["start"]
            assert step["metrics"]["prompt_tokens"] == (ordinary if record["paths"] is None else turn["place"])
            assert step["extra"].get("parent") == turn["parent"] and step["extra"].get("fork") == turn["fork"]
            assert step["metrics"]["completion_token_ids"] == record["completion_ids"][turn["start"] : turn["end"]]


def test_a_page_is_not_written_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--atif", "--open"])
    assert "--atif writes no page" in capsys.readouterr().err
