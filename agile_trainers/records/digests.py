"""Keeps a SHA-256 digest of each file of episodes beside it, so that no changed bit is read as if it had been written.

Parquet's own checksums cover pages, not the footer that says where they are. ``digests-<rank>.jsonl`` has one line for each
written file: ``{"file": name, "sha256": hexadecimal digits}``. A file that is written again has several lines, of which one
must fit: a run that is killed between the digest and the file leaves the old file, which is whole.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path

DIGESTS = "digests-*.jsonl"


def digest_of(path: Path) -> str:
    """Return the SHA-256 digest of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_entry(path: Path, content: Path) -> dict[str, str]:
    """Return the entry of a file in the list of digests, before the file is there.

    Args:
        path: Where the file is going to be.
        content: Where its content is now; it is renamed to ``path`` afterwards.
    """
    return {"file": path.name, "sha256": digest_of(content)}


def has_digest(path: Path) -> bool:
    """Return whether a file's folder keeps digests. A single copied file has none."""
    return any(path.parent.glob(DIGESTS))


def digest_problem(path: Path) -> str | None:
    """Return why a file is not what was written; None if it is, or if its folder keeps no digests.

    Args:
        path: A regular file.

    Raises:
        OSError: If the file or its digests cannot be read.
    """
    files = sorted(path.parent.glob(DIGESTS))
    if not files:
        return None
    listed = {digest for file in files for name, digest in _lines(file, _stamp(file)) if name == path.name}
    if not listed:
        return f"no file {DIGESTS} beside it has its digest, so that nothing says that it is whole"
    return None if _digest(path, _stamp(path)) in listed else "its bytes are not those that were written"


def _stamp(path: Path) -> tuple[int, int, int]:
    state = path.stat()
    return state.st_mtime_ns, state.st_size, state.st_ino


@lru_cache(maxsize=64)
def _lines(path: Path, _: tuple[int, int, int]) -> frozenset[tuple[str, str]]:
    found = set()
    for line in path.read_bytes().split(b"\n") if path.is_file() else ():
        try:
            entry = json.loads(line)
            found.add((str(entry["file"]), str(entry["sha256"])))
        except (ValueError, TypeError, LookupError, RecursionError):  # half a line, or a damaged one: its file has none
            continue
    return frozenset(found)


@lru_cache(maxsize=4096)
def _digest(path: Path, _: tuple[int, int, int]) -> str:
    return digest_of(path)
