"""Episodes as records on disk, and as numbers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agile_trainers.rollout.episode_files import episode_record, read_records, write_records
from agile_trainers.rollout.metrics import episode_row, summarize
from agile_trainers.types import StopReason, Trajectory, Turn


def small() -> Trajectory:
    """prompt 11 12 | 21 22 (turn 0) | 31 (observation) | 23 (turn 1)"""
    return Trajectory(
        prompt_ids=[11, 12],
        completion_ids=[21, 22, 31, 23],
        sampling_logprobs=[-0.123456789, -1.0, 0.0, -2.5],
        turns=[
            Turn(0, 2, "left", "stop", 0.5, "wall", {"x": 1}),
            Turn(3, 4, "räts", "length", 1.0, [{"role": "user", "content": "won"}], {"success": True}),
        ],
        stop_reason=StopReason.TERMINATED,
        prompt=[{"role": "user", "content": "go"}],
        reset_info={"goal": "right"},
        seed=7,
    )


EXPECTED: dict[str, Any] = {
    "step": 3,
    "member": 1,
    "return": 1.5,
    "success": True,
    "stop_reason": "terminated",
    "error": None,
    "environment": None,
    "seed": 7,
    "reset_info": {"goal": "right"},
    "prompt": [{"role": "user", "content": "go"}],
    "turns": [
        {
            "text": "left",
            "finish_reason": "stop",
            "reward": 0.5,
            "observation": "wall",
            "info": {"x": 1},
            "advantage": -0.25,
        },
        {
            "text": "räts",
            "finish_reason": "length",
            "reward": 1.0,
            "observation": [{"role": "user", "content": "won"}],
            "info": {"success": True},
            "advantage": 0.75,
        },
    ],
    "prompt_ids": [11, 12],
    "completion_ids": [21, 22, 31, 23],
    "turn_ids": [0, 0, -1, 1],
    "sampling_logprobs": [-0.123457, -1.0, 0.0, -2.5],
}


def test_a_record_says_everything() -> None:
    record = episode_record(small(), [-0.25, 0.75], step=3, member=1)
    assert record == EXPECTED and list(record) == list(EXPECTED)
    in_evaluation = episode_record(small())
    assert "advantage" not in in_evaluation["turns"][0] and "step" not in in_evaluation


def test_records_go_to_disk_and_back(tmp_path: Path) -> None:
    path = tmp_path / "rollouts" / "step-000001.rank0.jsonl"
    record = episode_record(small(), [-0.25, 0.75], step=3, member=1)
    write_records(path, [record, record])
    line = json.dumps(EXPECTED, ensure_ascii=False)
    assert path.read_text(encoding="utf-8") == f"{line}\n{line}\n" and "räts" in line
    assert read_records(path) == read_records(str(path)) == [EXPECTED, EXPECTED]
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    write_records(path, [])
    assert read_records(path) == []


def test_what_json_does_not_know_is_written_as_text(tmp_path: Path) -> None:
    info: dict[Any, Any] = {
        "path": Path("a/b"),
        "set": {1},
        (2, 3): "tuple key",
        4: (5, Path("c")),
        "nan": float("nan"),
        "infinity": [-math.inf],
        "surrogate": "\ud800!",
        "flag": False,
    }
    write_records(tmp_path / "x.jsonl", [{"info": info}])
    (record,) = read_records(tmp_path / "x.jsonl")
    assert record["info"] == {
        "path": "a/b",
        "set": "{1}",
        "(2, 3)": "tuple key",
        "4": [5, "c"],
        "nan": "nan",
        "infinity": ["-inf"],
        "surrogate": "\ud800!",
        "flag": False,
    }


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    class Ending(list[Any]):
        def __iter__(self) -> Any:
            yield {"n": 2}
            raise RuntimeError("half way")

    path = tmp_path / "x.jsonl"
    write_records(path, [{"n": 1}])
    with pytest.raises(RuntimeError, match="half way"):
        write_records(path, Ending())
    assert read_records(path) == [{"n": 1}]


# -------------------------------------------------------------------------------------------------------------- metrics


def episode(stop: StopReason, turns: list[tuple[int, str, float]], success: bool | None = None) -> Trajectory:
    """Turns of (tokens, finish reason, reward), with one observation token after each; three prompt tokens."""
    made, position = [], 0
    for tokens, finish_reason, reward in turns:
        made.append(Turn(position, position + tokens, "", finish_reason, reward))
        position += tokens + 1
    if success is not None:
        made[-1].info["success"] = success
    return Trajectory([1, 2, 3], [4] * position, [0.0] * position, made, stop)


def test_a_row_by_hand() -> None:
    row = episode_row(episode(StopReason.MAX_TURNS, [(4, "length", 0.5), (2, "stop", 1.0)], success=False))
    assert row == {
        "return": 1.5,
        "success": False,
        "turns": 2,
        "action_tokens": 6,
        "tokens": 3 + 8,
        "answers_cut": 1,
        "observations_cut": 0,
        "clipped": True,
        "stop_reason": "max_turns",
        "environment": None,
    }


def test_a_summary_by_hand() -> None:
    """Returns 1, 3, -1 (mean 1, sample deviation 2); the failed episode counts for tokens and stop reasons alone."""
    episodes = [
        episode(StopReason.TERMINATED, [(2, "stop", 0.5), (4, "length", 0.5)], success=True),
        replace(episode(StopReason.MAX_TURNS, [(3, "stop", 3.0)], success=False), observations_cut=2),
        episode(StopReason.TERMINATED, [(1, "stop", -1.0)]),
        episode(StopReason.ENVIRONMENT_ERROR, [(5, "length", 100.0)], success=True),
    ]
    assert summarize([episode_row(trajectory) for trajectory in episodes]) == {
        "return/mean": 1.0,
        "return/std": 2.0,
        "return/min": -1.0,
        "return/max": 3.0,
        "success": 0.5,
        "turns/mean": 4 / 3,
        "turns/max": 2.0,
        "tokens_per_turn": 3.0,
        "answers_cut": 0.4,
        "observations_cut": 0.5,
        "stop/terminated": 0.5,
        "stop/truncated": 0.0,
        "stop/max_turns": 0.25,
        "stop/context_full": 0.0,
        "stop/environment_error": 0.25,
        "stop/environment_timeout": 0.0,
    }


def test_a_summary_leaves_out_what_has_no_episodes() -> None:
    failed = summarize([episode_row(episode(StopReason.ENVIRONMENT_TIMEOUT, []))])
    assert {name: value for name, value in failed.items() if value} == {"stop/environment_timeout": 1.0}
    assert set(failed) == {"observations_cut", *(f"stop/{reason.value}" for reason in StopReason)}
    single = summarize([episode_row(episode(StopReason.TERMINATED, [(1, "stop", 2.0)]))])
    assert single["return/std"] == 0.0 and "success" not in single
    assert all(type(value) is float for value in single.values())
