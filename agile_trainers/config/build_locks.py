"""Removes build locks of PyTorch's extensions that a killed run left, which would block every later run.

DeepSpeed builds extensions at first use. PyTorch locks the folder with a file, which only the process that made it removes.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil
from torch.utils.cpp_extension import get_default_build_root
from transformers.utils import logging

logger = logging.get_logger(__name__)

_SHARED_FILE_SYSTEMS = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "fuse", "afs", "9p")


def remove_abandoned_locks(root: Path | None = None) -> list[Path]:
    """Remove the build locks that no process holds, and log them.

    A process that builds keeps its lock file open, which ``/proc`` shows. Without ``/proc``, or on a file system that
    other hosts share, the holder is unknown and a warning names the file instead.

    Args:
        root: The folder of all builds. Default: PyTorch's, ``TORCH_EXTENSIONS_DIR`` or below ``~/.cache``.

    Returns:
        The files that were removed.
    """
    root = root or Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    locks = [path for path in (*root.glob("*/lock"), *root.glob("*/*/lock")) if path.is_file()]
    if not locks:
        return []
    held = _open_files()
    if held is None or _is_shared(root):
        for lock in locks:
            logger.warning(
                "%s marks an extension as being built. If no process builds it (a run was killed), DeepSpeed would wait "
                "without end: remove the file.",
                lock,
            )
        return []
    removed = []
    for lock in locks:
        if lock.resolve() not in held:
            lock.unlink(missing_ok=True)
            logger.warning("Removed %s, which a killed run left: DeepSpeed would have waited for it without end.", lock)
            removed.append(lock)
    return removed


def _open_files() -> set[Path] | None:
    """Return all files that processes visible to this user have open; None without ``/proc``."""
    if not Path("/proc/self/fd").is_dir():
        return None
    found = set()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            found.add(Path(os.readlink(descriptor)))
        except OSError:  # the process ended, or is another user's
            continue
    return found


def _is_shared(folder: Path) -> bool:
    """Return True if the folder is on a network file system."""
    mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    path = folder.resolve()
    where = next((str(parent) for parent in (path, *path.parents) if str(parent) in mounts), "")
    return mounts.get(where, "").startswith(_SHARED_FILE_SYSTEMS)
