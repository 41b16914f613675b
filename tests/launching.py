"""Commands that start processes of their own, run so that none of them outlives a test."""

from __future__ import annotations

import subprocess
from typing import Any

import psutil
from processes import all_end


def run(command: list[str], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` with captured text; when the time is up, every process below the command is killed too.

    A launcher's workers have sessions of their own, and would wait on for ever.

    Raises:
        subprocess.TimeoutExpired: As ``subprocess.run``, with what was printed until then.
    """
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException as stop:
            below = psutil.Process(process.pid).children(recursive=True)
            for one in (process, *below):
                one.kill()
            all_end(one.pid for one in below)
            output, errors = process.communicate()
            if isinstance(stop, subprocess.TimeoutExpired):
                raise subprocess.TimeoutExpired(command, timeout, output, errors) from stop
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)
