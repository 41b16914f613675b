"""Episodes on disk: one JSON object per line, enough to see what the model did and what it was trained on."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agile_trainers.types import NO_TURN, Trajectory


def episode_record(trajectory: Trajectory, advantages: Sequence[float] | None = None, **context: Any) -> dict[str, Any]:
    """One episode as a JSON-ready dict.

    Args:
        trajectory: The episode.
        advantages: One per turn, as trained on; None in evaluation.
        context: Put first, as it is (step, row, member, ...).
    """
    turn_ids = [NO_TURN] * len(trajectory.completion_ids)
    turns = []
    for k, turn in enumerate(trajectory.turns):
        turn_ids[turn.start : turn.end] = [k] * (turn.end - turn.start)
        entry = {name: value for name, value in vars(turn).items() if name not in ("start", "end")}
        turns.append(entry if advantages is None else {**entry, "advantage": advantages[k]})
    return {
        **context,
        "return": trajectory.episode_return,
        "success": trajectory.success,
        "stop_reason": trajectory.stop_reason.value,
        "error": trajectory.error,
        "seed": trajectory.seed,
        "reset_info": trajectory.reset_info,
        "prompt": trajectory.prompt,
        "turns": turns,
        "prompt_ids": trajectory.prompt_ids,
        "completion_ids": trajectory.completion_ids,
        "turn_ids": turn_ids,
        "sampling_logprobs": [round(value, 6) for value in trajectory.sampling_logprobs],
    }


def write_records(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write a JSON lines file, whole or not at all. What JSON does not know (NaN too) is written as its ``str``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    # A lone surrogate, which UTF-8 cannot hold, then becomes JSON's own escape for it.
    with partial.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for record in records:
            file.write(_encode(record) + "\n")
    partial.replace(path)


def read_records(path: Path | str) -> list[dict[str, Any]]:
    """The episodes of a rollout file."""
    with Path(path).open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _encode(record: dict[str, Any]) -> str:
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False, default=str)
    except (TypeError, ValueError):
        # A key that is no text, or a number that JSON has no word for: the slow way, item by item.
        return json.dumps(_plain(record), ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    known = value is None or isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))
    return value if known else str(value)
