"""Runs of a script in several processes."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

from forks import run_ranks
from recorded import recorded

SCRIPT = Path(__file__).with_name("two_processes.py")


def launch(script: Path, processes: int, model: Path, output: Path, cases: dict[str, dict]) -> Path:
    """All cases in one go: several processes with what ``torchrun`` tells them, one as it is, in this process."""
    for name in cases:
        (output / name).mkdir(parents=True)
    if processes == 1:
        for name, case in cases.items():
            importlib.import_module(script.stem).play(str(model), output / name, dict(case))
        return output
    for rank in run_ranks(processes, [script, model, output, json.dumps(cases)]):
        assert rank.returncode == 0, rank.stderr[-4000:]
    return output


def episodes(folder: Path, kind: str) -> list[dict]:
    return sorted(recorded(folder, kind), key=lambda r: (r["step"], r["generation"] or 0, r["index"]))
