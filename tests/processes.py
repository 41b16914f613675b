"""Whether other processes run."""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil


def all_end(ids: Iterable[int], seconds: float = 60.0) -> bool:
    """Wait until none of these processes runs any more, and return whether that was in time."""
    ids, deadline = list(ids), time.monotonic() + seconds
    while any(map(runs, ids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def runs(process: int) -> bool:
    """Return whether a process runs. One that has ended may be listed for seconds: until its new parent collects it."""
    try:
        return psutil.Process(process).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
