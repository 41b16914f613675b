"""Episodes on disk: one JSON object per line, enough to see what the model did and what it was trained on."""

from __future__ import annotations

import json
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
    """Write a JSON lines file, whole or not at all. Values JSON does not know are written as their ``str``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
    partial.replace(path)


def read_records(path: Path | str) -> list[dict[str, Any]]:
    """The episodes of a rollout file."""
    with Path(path).open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]
