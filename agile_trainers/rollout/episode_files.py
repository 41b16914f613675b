"""Reads and writes episodes as JSON lines, with the model's actions and the values it was trained on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agile_trainers.records.plain import Plain
from agile_trainers.types import NO_TURN, Trajectory


def episode_record(trajectory: Trajectory, advantages: Sequence[float] | None = None, **context: Any) -> dict[str, Any]:
    """Convert an episode to a JSON-ready dict, with any values in the environment's infos.

    Args:
        trajectory: The episode.
        advantages: The advantage of each turn in training; None in evaluation.
        context: Further entries that come first (step, row, member, ...).
    """
    turn_ids = [NO_TURN] * len(trajectory.completion_ids)
    turns = []
    for k, turn in enumerate(trajectory.turns):
        turn_ids[turn.start : turn.end] = [k] * (turn.end - turn.start)
        entry = {name: value for name, value in vars(turn).items() if name not in ("start", "end")}
        entry |= {"observation": Plain()(turn.observation), "info": Plain()(turn.info)}
        turns.append(entry if advantages is None else {**entry, "advantage": advantages[k]})
    return {
        **context,
        "return": trajectory.episode_return,
        "success": trajectory.success,
        "stop_reason": trajectory.stop_reason.value,
        "error": trajectory.error,
        "environment": trajectory.environment_name,
        "seed": trajectory.seed,
        "reset_info": Plain()(trajectory.reset_info),
        "prompt": Plain()(trajectory.prompt),
        "turns": turns,
        "prompt_ids": trajectory.prompt_ids,
        "completion_ids": trajectory.completion_ids,
        "turn_ids": turn_ids,
        "sampling_logprobs": [round(value, 6) for value in trajectory.sampling_logprobs],
    }


def write_records(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write a JSON lines file atomically. Values that JSON cannot represent (NaN too) are written as their ``str``.

    Raises:
        OSError: If the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    # A lone surrogate, which UTF-8 cannot encode, then becomes JSON's escape.
    with partial.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for record in records:
            file.write(_encode(record) + "\n")
    partial.replace(path)


def read_records(path: Path | str) -> list[dict[str, Any]]:
    """Read the episodes of a rollout file."""
    with Path(path).open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _encode(record: dict[str, Any]) -> str:
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False, default=str)
    except Exception:
        # A key that is not text, or a number that JSON cannot represent.
        return json.dumps(Plain(items=1_000_000)(record), ensure_ascii=False)
