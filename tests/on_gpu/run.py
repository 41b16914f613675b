"""Runs the tests that need a GPU, each by its name (`make test-gpu`).

A result is written after each case, so that a run that is cut off goes on where it ended: what passed or was skipped is not
run again. All cases share a process; one that dies, hangs or leaves the device unusable ends it, and the others go on in a
new one. ``--rehearse`` runs the same code on CPU and tiny sizes: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from case_log import CaseLog  # noqa: E402

FILES = (
    "tests/on_gpu/test_gpu_flex_attention.py",
    "tests/on_gpu/test_gpu_decoding.py",
    "tests/on_gpu/test_training.py",
    "tests/on_gpu/test_memory.py",
    "tests/on_gpu/test_activation_offload.py",
)
"""Stated one by one: elsewhere the whole tree need not even import."""
START = 120.0
"""Seconds that imports and collection may take."""


def run(folder: Path, *, seconds: float, case_seconds: float, rehearse: bool, only: Sequence[str]) -> CaseLog:
    """Run what has no lasting result yet until the time is over.

    Args:
        folder: Where ``cases.jsonl`` and the output of each process are.
        seconds: After these nothing more is started, and what still runs is ended.
        case_seconds: A case that takes longer is ended.
        rehearse: On CPU, with tiny sizes.
        only: Parts of the names of the cases that are run. Empty: all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log, started = CaseLog(folder / "cases.jsonl"), time.time()
    under_way = folder / "under_way"
    options = [f"--gpu-log={log.file}", f"--gpu-since={started}", f"--gpu-until={started + seconds}"]
    options += ["--rehearse"] if rehearse else []
    options += [f"--only={part}" for part in only]
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *options, *FILES]
    while time.time() < started + seconds:
        under_way.unlink(missing_ok=True)
        with (folder / "output.txt").open("a") as output:
            child = subprocess.Popen(pytest, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
            reason = _watched(child, under_way, started + seconds, case_seconds)
        if under_way.exists():
            name, at = under_way.read_text().rsplit(" ", 1)
            log.write(name, "died", time.time() - float(at), reason=reason or f"exit code {child.returncode}")
        elif child.returncode in (0, 1, 5):
            return log
        elif not log.finished(started):
            why = reason or f"exit code {child.returncode}"
            raise SystemExit(f"The cases could not be started ({why}): see {output.name}.")
    return log


def _watched(child: subprocess.Popen[bytes], under_way: Path, until: float, case_seconds: float) -> str | None:
    """Wait for a process; end it and return why if it, or its case, takes too long."""
    idle = time.time()  # since when no case runs
    while child.poll() is None:
        time.sleep(0.2)
        now = time.time()
        try:
            case_took, started_in = now - float(under_way.read_text().rsplit(" ", 1)[1]), 0.0
            idle = now
        except (FileNotFoundError, IndexError):
            case_took, started_in = 0.0, now - idle
        reasons = {
            "the time of the run was over": now > until,
            f"took longer than {case_seconds:.0f} s": case_took > case_seconds,
            f"did not start within {START:.0f} s": started_in > START,
        }
        if reason := next((text for text, true in reasons.items() if true), None):
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            return reason
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases and print their table; return 1 if one failed, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=500, help="time of this run (default: %(default)s)")
    parser.add_argument("--case-seconds", type=float, default=180, help="time of a case (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="folder of the results (default: runs/gpu or runs/gpu-rehearsal)")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="cases whose names contain one of these")
    parser.add_argument("--rehearse", action="store_true", help="on CPU with tiny sizes; the figures mean nothing")
    options = parser.parse_args(argv)
    if not options.rehearse:
        import torch

        if not torch.cuda.is_available():
            print(
                "torch sees no GPU here. See `agile-trainers env`; --rehearse runs the cases on CPU.", file=sys.stderr
            )
            return 2
    folder = options.folder or ROOT / "runs" / ("gpu-rehearsal" if options.rehearse else "gpu")
    log = run(
        folder.resolve(), seconds=options.seconds, case_seconds=options.case_seconds, rehearse=options.rehearse,
        only=options.only,
    )  # fmt: skip
    (folder / "cases.md").write_text(log.table(), encoding="utf-8")
    print(log.table())
    bad = [name for name, one in log.results().items() if one["outcome"] not in ("passed", "skipped")]
    print(f"{len(bad)} of {len(log.results())} failed{': ' if bad else ''}{', '.join(bad)}; results in {folder}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
