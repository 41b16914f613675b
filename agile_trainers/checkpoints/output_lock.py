"""Locks ``output_dir``, so that no two runs write into it at once."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

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
    while True:
        with path.open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as taken:
                _check_holder(output_dir, file, taken)
            if not _is_there(file, path):
                continue  # its holder removed it after it was opened here
            file.seek(0)
            file.truncate()
            json.dump({"pid": os.getpid(), "host": socket.gethostname()}, file)
            file.flush()
            try:
                yield
            finally:
                if _is_there(file, path):
                    with suppress(OSError):
                        path.unlink()
            return


def _is_there(file: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _check_holder(output_dir: Path, file: TextIO, taken: OSError) -> None:
    file.seek(0)
    try:
        holder = json.load(file)
    except (ValueError, RecursionError):
        holder = {}
    holder = holder if isinstance(holder, dict) else {}
    host, pid = holder.get("host", "an unknown host"), holder.get("pid", "unknown")
    if host == socket.gethostname():
        raise OutputDirInUseError(
            f"output_dir={str(output_dir)!r} is in use: process {pid} trains into it. Wait for it, stop it, or choose "
            "another output_dir."
        ) from taken
    logger.warning("%s says that process %s on %s trains into this folder too.", output_dir / LOCK, pid, host)
