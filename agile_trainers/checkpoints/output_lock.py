"""Locks ``output_dir``, so that no two runs write into it at once."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from transformers.utils import logging

logger = logging.get_logger(__name__)

LOCK = "run.lock"


class OutputDirInUseError(RuntimeError):
    """Another process trains into the same ``output_dir``."""


@contextmanager
def locked(output_dir: Path) -> Iterator[None]:
    """Hold ``output_dir/run.lock`` while the block runs.

    The operating system releases the lock when the process ends, also when it is killed; the file is removed at the end of
    the block. A process on another host does not block: file locks are unreliable between hosts, and a requeued job must
    start.

    Args:
        output_dir: Made if it does not exist.

    Raises:
        OutputDirInUseError: If another process of this host holds the lock. The message names it.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    path = output_dir / LOCK
    with ExitStack() as stack:
        try:
            # Time to open the file again where its holder has just removed it.
            stack.enter_context(FileLock(path, timeout=0.2))
            path.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}), encoding="utf-8")
            stack.callback(path.unlink, missing_ok=True)
        except Timeout as taken:
            _check_holder(output_dir, taken)
        yield


def _check_holder(output_dir: Path, taken: Timeout) -> None:
    try:
        holder = json.loads((output_dir / LOCK).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        holder = {}
    holder = holder if isinstance(holder, dict) else {}
    host, pid = holder.get("host", "an unknown host"), holder.get("pid", "unknown")
    if host == socket.gethostname():
        raise OutputDirInUseError(
            f"output_dir={str(output_dir)!r} is in use: process {pid} trains into it. Wait for it, stop it, or choose "
            "another output_dir."
        ) from taken
    logger.warning("%s says that process %s on %s trains into this folder too.", output_dir / LOCK, pid, host)
