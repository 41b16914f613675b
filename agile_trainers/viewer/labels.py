"""Names runs by their folder and algorithm, and finds runs that differ in the seed alone."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agile_trainers.records.reader import RunRecords
from agile_trainers.records.writer import ROLLOUTS

_SEEDS = frozenset({"seed", "data_seed"})
"""Options in which runs of one set may differ."""
_WITHHELD = re.compile(r"<\w+, withheld\b.*>", re.DOTALL)
"""A value that ``run.json`` withholds; equal values have different texts in different folders."""
_LONGEST = 80
"""Characters of a policy or folder in a label."""


def labels(runs: Sequence[RunRecords]) -> list[str]:
    """Name each run: folder and algorithm, of an evaluation policy and folder; where these are equal, the run's id too.

    A folder is named by as much of the end of its path as tells it apart from the other folders.
    """
    folders = _short_names([_output_dir(run) for run in runs])
    found = []
    for run, folder in zip(runs, folders, strict=True):
        policy, algorithm = (run.info.get(name) for name in ("policy", "algorithm"))
        parts = [policy, folder] if policy else [folder, algorithm]
        found.append(" · ".join(_cut(part) for part in parts if part))
    counts = Counter(found)
    return [label if counts[label] == 1 else f"{label} · {run.name}" for label, run in zip(found, runs, strict=True)]


def seed_sets(runs: Sequence[RunRecords]) -> list[int]:
    """Number the sets of runs that differ in the seed alone; a run that is like no other is a set of its own.

    Compared are kind, algorithm, model, environment, policy and options; of options whose values are withheld, the names.
    Runs with the same seed are in different sets: the second run of a seed says nothing about other seeds. So are members of
    a population, whose hyperparameters change.
    """
    numbers: dict[Any, int] = {}
    seen: Counter[Any] = Counter()
    found = []
    for place, run in enumerate(runs):
        key: Any = place
        if run.member is None and type(run.info.get("seed")) is int:
            alike = _without_seed(run.info)
            seen[alike, run.info["seed"]] += 1
            key = alike, seen[alike, run.info["seed"]]
        found.append(numbers.setdefault(key, len(numbers)))
    return found


def _without_seed(info: dict[str, Any]) -> str:
    """Return what must be equal in runs of one set, as JSON."""
    facts = {name: info.get(name) for name in ("kind", "algorithm", "model", "environment", "policy")}
    options = info.get("options")
    if isinstance(options, dict):
        compared = {name: value for name, value in options.items() if name not in _SEEDS}
        options = {name: None if _WITHHELD.fullmatch(str(value)) else value for name, value in compared.items()}
    return json.dumps([facts, options], sort_keys=True, default=str)


def _output_dir(run: RunRecords) -> Path:
    folder = run.folder.resolve()
    if folder.parent.name == ROLLOUTS:
        return folder.parent.parent
    return folder.parent if folder.name == ROLLOUTS else folder


def _short_names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest ends of paths, of one length, that tell different paths apart."""
    different = set(folders)
    longest = max((len(folder.parts) for folder in folders), default=1)
    for size in range(1, longest + 1):
        if len({folder.parts[-size:] for folder in different}) == len(different):
            break
    return ["/".join(folder.parts[-size:]) for folder in folders]


def _cut(value: Any) -> str:
    text = (value if isinstance(value, str) else json.dumps(value, default=str)).removeprefix("Multi-turn ")
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
