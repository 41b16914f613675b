"""Tries what a stranger wrote in a process of its own, whose time and memory are limited."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

CPU_SECONDS, BYTES, _SECONDS = 10, 1 << 30, 300
"""Limits of the process: processor time, memory (on Linux), and time in all on a machine that does other things."""
_BEGIN = """
import json, resource, sys
given = json.load(sys.stdin)
sys.path += given["path"]
resource.setrlimit(resource.RLIMIT_CPU, (given["seconds"], given["seconds"]))
if sys.platform == "linux":
    resource.setrlimit(resource.RLIMIT_AS, (given["bytes"], given["bytes"]))
"""


def why_it_fails(program: str, path: list[str] | None = None, **given: Any) -> str | None:
    """Run a program that tries something.

    Args:
        program: Python code. It finds ``json``, ``sys`` and the dictionary ``given``, and ends with ``sys.exit("reason")``
            if what it tried is wrong.
        path: Folders of packages that it imports. It finds the standard library only, which starts in 20 ms.
        given: JSON values.

    Returns:
        None if the program came to its end; else the reason, printable and short.
    """
    content = json.dumps({**given, "path": path or [], "seconds": CPU_SECONDS, "bytes": BYTES})
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _BEGIN + program],
            input=content, capture_output=True, text=True, timeout=_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"it takes more than {CPU_SECONDS} s"
    if done.returncode == 0:
        return None
    said = done.stderr.strip() if done.returncode > 0 else ""
    return ascii(said[:300])[1:-1] if said else f"it takes more than {CPU_SECONDS} s"
