"""Adds to the runs of a population's members what became of them, for the page's table of members."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agile_trainers.records.plain import from_json, json_bytes
from agile_trainers.records.reader import RunRecords

LINEAGE = "lineage.json"
"""File in a population's folder; the members' folders are beside it."""


def with_members(runs: Sequence[RunRecords]) -> list[RunRecords]:
    """Name the runs of members after them, the winner first, before the other runs in their order.

    Args:
        runs: Any runs. Those in ``member-<number>/rollouts/`` beside a lineage are of members. They get ``member``: number,
            parent, hyperparameters, steps, fitness, standard error, state, and the fitness's name. A lineage that cannot be
            read is named in their ``problems``.
    """
    lineages: dict[Path, dict[int, dict[str, Any]] | str] = {}
    members, others = [], []
    for run in runs:
        found = None
        folder = run.folder.parent.parent
        if folder.name.startswith("member-") and (folder.parent / LINEAGE).is_file():
            if folder.parent not in lineages:
                lineages[folder.parent] = _members(folder.parent / LINEAGE)
            number, lineage = folder.name.removeprefix("member-"), lineages[folder.parent]
            if isinstance(lineage, str):
                run = replace(run, problems=[*run.problems, lineage])
            elif number.isascii() and number.isdecimal() and len(number) < 10:
                found = lineage.get(int(number))
        if found is None:
            others.append(run)
        else:
            members.append(replace(run, name=f"{folder.name} {run.name}", member=found))
    return sorted(members, key=_place) + others


def _place(run: RunRecords) -> tuple[str, bool, int, float]:
    """Order members: by population, then the winner of all rounds, then by how long they lived, then by fitness."""
    member = run.member
    assert member is not None
    fitness = -1e9 if member["fitness"] is None else member["fitness"]
    return str(run.folder.parents[2]), not member["winner"], -member["round"], -fitness


def _members(path: Path) -> dict[int, dict[str, Any]] | str:
    """Read what became of each member: its last hyperparameters and result, and whether it lives; or what is wrong."""
    try:
        return _read_members(from_json(json_bytes(path)))
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, OSError) as error:
        return f"{path} is no lineage of a population: {type(error).__name__}: {str(error)[:200]}."


def _read_members(lineage: dict[str, Any]) -> dict[int, dict[str, Any]]:
    winner: dict[str, Any] | None = None
    found: dict[int, dict[str, Any]] = {}
    for event in lineage["events"]:
        if event["event"] == "born":
            found[event["member"]] = {
                "member": int(event["member"]), "parent": event["parent"] and int(event["parent"]), "round": 0,
                "steps": int(event["steps"]), "fitness": None, "error": None, "state": "",
                "winner": False,
                "measured": str(lineage["settings"]["fitness"]),
            }  # fmt: skip
        member = found[event["member"]]
        member["hyperparameters"] = {str(name): f"{value:.4g}" for name, value in event["hyperparameters"].items()}
        if event["event"] == "trained":
            if winner is None or (event["fitness"], event["round"]) > (winner["fitness"], winner["round"]):
                winner = event
            member |= {
                "round": int(event["round"]), "steps": int(event["steps"]), "fitness": round(event["fitness"], 4),
                "error": event["standard_error"] and round(event["standard_error"], 4),
            }  # fmt: skip
        elif event["event"] in ("stopped", "failed"):
            member["state"] = event["event"]
    if winner is not None:
        found[winner["member"]]["winner"] = True
    if lineage["best"] is not None and winner is not None:
        at_the_end = found[lineage["best"]]["round"] == winner["round"]
        found[lineage["best"]]["state"] = "the best" if at_the_end else "the best at the end"
        if not at_the_end:
            found[winner["member"]]["state"] = f"the best, at step {winner['steps']}"
    return found
