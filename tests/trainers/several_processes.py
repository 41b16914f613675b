"""Runs of a script in several processes."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from launching import run
from recorded import recorded

SCRIPT = Path(__file__).with_name("two_processes.py")


def launch(script: Path, processes: int, model: Path, output: Path, cases: dict[str, dict]) -> Path:
    """All cases in one go: several processes as ``torchrun`` starts them, one as it is, in this process."""
    for name in cases:
        (output / name).mkdir(parents=True)
    if processes == 1:
        for name, case in cases.items():
            importlib.import_module(script.stem).play(str(model), output / name, dict(case))
        return output
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    done = run(
        [*command, str(script), str(model), str(output), json.dumps(cases)],
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return output


def episodes(folder: Path, kind: str) -> list[dict]:
    return sorted(recorded(folder, kind), key=lambda r: (r["step"], r["generation"] or 0, r["index"]))
