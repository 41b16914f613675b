"""Converts episode records to ATIF, the Agent Trajectory Interchange Format of Harbor, which other tools read.

The form is that of ATIF-v1.7 (https://github.com/laude-institute/harbor, ``harbor.models.trajectories``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from agile_trainers.records.plain import to_json
from agile_trainers.records.reader import RunRecords

SOURCES = {"system": "system", "assistant": "agent"}
"""Role of a message of the prompt to ATIF's source; every other one is the user's, with the role beside it."""
_WHOLE = (
    "step",
    "generation",
    "phase",
    "index",
    "group",
    "member",
    "environment",
    "seed",
    "row",
    "reset_info",
    "error",
)
_TURN = ("reward", "return", "advantage", "value", "finish_reason", "info", "parent", "fork", "messages", "question")


def trajectory(run: RunRecords, episode: dict[str, Any], key: str) -> dict[str, Any]:
    """Convert one episode.

    A step is a message of the first prompt, or an answer with what the environment said to it, the sampled ids and their
    log-probabilities under the sampler. Rewards, advantages and what else ATIF has no place for are in ``extra``.

    Args:
        run: Its run.
        episode: Of ``RunRecords.episodes``.
        key: Of ``RunRecords.index``.
    """
    steps = [_message(message) for message in episode["prompt"] or ()]
    answers = [_answer(episode, turn) for turn in episode["turns"]]
    steps = steps + answers or [{"source": "system", "message": episode["error"] or "The episode has no turns."}]
    totals = {name: sum(step["metrics"][name] for step in answers) for name in ("prompt_tokens", "completion_tokens")}
    outcome = _present(episode, ("return", "success", "stop_reason", "truncated"))
    agent = {"name": "agile-trainers", "version": version("agile-trainers")}
    if isinstance(model := run.info.get("model"), str):
        agent["model_name"] = model
    return {
        "schema_version": "ATIF-v1.7",
        "session_id": run.name,
        "trajectory_id": f"{run.name}/{key}",
        "agent": agent,
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, start=1)],
        "final_metrics": {
            **{f"total_{name}": count for name, count in totals.items()}, "total_steps": len(steps), "extra": outcome
        },
        "extra": _present(episode, _WHOLE),
    }  # fmt: skip


def write_trajectories(runs: Iterable[RunRecords], path: Path) -> int:
    """Write every episode as a line of JSON.

    Args:
        runs: The runs.
        path: The file, which appears when it is complete.

    Returns:
        The number of episodes.

    Raises:
        RecordsError: If a file of a run cannot be read.
        OSError: If the file cannot be written.
    """
    begun, count = path.with_name(f".{path.name}.part"), 0
    try:
        with begun.open("w", encoding="utf-8") as file:
            for run, key, episode in _episodes(runs):
                file.write(to_json(trajectory(run, episode, key)) + "\n")
                count += 1
        begun.replace(path)
    finally:
        begun.unlink(missing_ok=True)
    return count


def _episodes(runs: Iterable[RunRecords]) -> Iterator[tuple[RunRecords, str, dict[str, Any]]]:
    for run in runs:
        for row, episode in zip(run.index(), run.episodes(), strict=True):
            yield run, row["key"], episode


def _message(message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    step: dict[str, Any] = {"source": SOURCES.get(str(role), "user"), "message": _text(message.get("content"))}
    if step["source"] == "agent":
        step["llm_call_count"] = 0  # of the prompt: nobody sampled it here
    elif role not in SOURCES and role != "user":
        step["extra"] = {"role": role}
    return step


def _answer(episode: dict[str, Any], turn: dict[str, Any]) -> dict[str, Any]:
    ids, logprobs = (episode[name][turn["start"] : turn["end"]] for name in ("completion_ids", "sampling_logprobs"))
    prompt = len(episode["prompt_ids"]) + turn["start"] if turn["place"] is None else turn["place"]
    metrics = {"prompt_tokens": prompt, "completion_tokens": len(ids), "completion_token_ids": ids}
    if None not in logprobs:
        metrics["logprobs"] = logprobs
    step: dict[str, Any] = {"source": "agent", "message": turn["text"] or "", "metrics": metrics, "llm_call_count": 1}
    if turn["observation"]:
        told = turn["observation"]
        results = [one.get("content") for one in told] if isinstance(told, list) else [told]
        step["observation"] = {"results": [{"content": _text(one)} for one in results]}
    if extra := _present(turn, _TURN):
        step["extra"] = extra
    return step


def _present(values: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: values[name] for name in names if values[name] is not None}


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "" if content is None else json.dumps(content)
