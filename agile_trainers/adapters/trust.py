"""Signs checkpoints that contain pickles, and rejects those that this user's runs did not sign.

DeepSpeed reads its states with the full pickle protocol, and PyTorch reads the ``.metadata`` of sharded FSDP states with it.
Unpickling can run any code in the file. A folder with such files is signed when it is saved, with a key that only this user
can read, and is only loaded if the signature matches.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import secrets
from pathlib import Path
from typing import Any

OPTION = "AGILE_TRAINERS_TRUST_CHECKPOINT"
KEY_FILE = "AGILE_TRAINERS_KEY_FILE"
_KEY_BYTES = 32

logger = logging.getLogger(__name__)


def pickles(folder: Path) -> list[str]:
    """Return the names of a checkpoint's files that are read with the full pickle protocol."""
    found = [*folder.rglob(".metadata")]
    if (folder / "latest").is_file():
        found += [path for path in folder.rglob("*.pt") if path.parent != folder]
    return sorted(path.relative_to(folder).as_posix() for path in found)


def sign(files: dict[str, Any]) -> str | None:
    """Sign a checkpoint's files and their fingerprints; None, with a warning, if no key can be stored."""
    try:
        return _digest(_key(create=True), files)
    except OSError as error:
        logger.warning(
            "This checkpoint could not be signed (%s), so resuming from it will need %s=1. Set %s to a file in a writable "
            "folder.",
            error, OPTION, KEY_FILE,
        )  # fmt: skip
        return None


def is_trusted(folder: Path, files: dict[str, Any], signature: Any) -> bool:
    """Return whether a checkpoint holds no pickles, was signed by this user, or is trusted by the environment variable.

    Args:
        folder: The checkpoint.
        files: Files that the marker lists, already compared with those on disk.
        signature: The signature in the marker.
    """
    found = pickles(folder)
    if not found or os.environ.get(OPTION) == "1":
        return True
    try:
        expected = _digest(_key(create=False), files)
    except OSError:
        return False
    return isinstance(signature, str) and hmac.compare_digest(signature, expected) and files.keys() >= set(found)


def _digest(key: bytes, files: dict[str, Any]) -> str:
    return hmac.new(key, json.dumps(files, sort_keys=True).encode(), hashlib.sha256).hexdigest()


def _key(create: bool) -> bytes:
    path = Path(os.environ.get(KEY_FILE) or Path.home() / ".config" / "agile_trainers" / "checkpoint.key")
    if create and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
        try:
            os.link(partial, path)  # the first of several processes wins
        except FileExistsError:
            pass
        finally:
            partial.unlink()
    key = path.read_bytes()
    if len(key) < _KEY_BYTES:
        raise OSError(f"{path} is not a key: it has {len(key)} bytes, expected {_KEY_BYTES}")
    return key
