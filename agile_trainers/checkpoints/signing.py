"""Signs checkpoints that may contain pickles, and rejects those that this user's runs did not sign.

DeepSpeed reads its states (``*.pt``) with the full pickle protocol, and PyTorch reads ``.metadata`` and
``__<rank>.metadata`` of sharded FSDP states with it. Unpickling can run any code in the file. Which files a loader opens
depends on its version and on other files, so every file needs a signature unless its name says that it is data, or that it
is read with ``weights_only``. A folder with such files is signed when it is saved, with a key that only this user can read,
and is only loaded if the signature matches.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import secrets
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

OPTION = "AGILE_TRAINERS_TRUST_CHECKPOINT"
KEY_FILE = "AGILE_TRAINERS_KEY_FILE"
_KEY_BYTES = 32
_DATA = {
    ".safetensors", ".json", ".jsonl", ".parquet", ".md", ".txt", ".jinja", ".png", ".model", ".tiktoken", ".py", ".bin",
}  # fmt: skip
"""Suffixes that a resume reads as data (``.bin`` with ``weights_only``), or not at all (code of the model)."""
_WEIGHTS_ONLY = re.compile(r"(optimizer|scheduler|scaler)\.pt|rng_state(_\d+)?\.pth")
"""States in the main folder that ``Trainer`` reads with ``weights_only``."""

logger = logging.getLogger(__name__)


def pickles(names: Iterable[str]) -> list[str]:
    """Return those of a checkpoint's files that a loader may read with the full pickle protocol, sorted.

    Args:
        names: Paths relative to the checkpoint, with ``/``.
    """
    return sorted(
        name for name in names if PurePosixPath(name).suffix not in _DATA and not _WEIGHTS_ONLY.fullmatch(name)
    )


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


def is_trusted(present: Iterable[str], files: dict[str, Any], signature: Any) -> bool:
    """Return whether a checkpoint holds no pickles, was signed by this user, or is trusted by the environment variable.

    Args:
        present: Paths of all files of the checkpoint.
        files: Files that the marker lists, already compared with those on disk.
        signature: The signature in the marker.
    """
    found = pickles(present)
    if not found or os.environ.get(OPTION) == "1":
        return True
    try:
        expected = _digest(_key(create=False), files)
    except FileNotFoundError:
        return False
    except OSError as error:
        logger.warning("No signature can be checked: %s.", error)
        return False
    return isinstance(signature, str) and hmac.compare_digest(signature, expected) and files.keys() >= set(found)


def _digest(key: bytes, files: dict[str, Any]) -> str:
    return hmac.new(key, json.dumps(files, sort_keys=True).encode(), hashlib.sha256).hexdigest()


def keyed_digest(purpose: str, text: str) -> tuple[str, str] | None:
    """Compute an HMAC with this user's key, of which nobody else can guess the text.

    Args:
        purpose: What the digest is for; a digest for one purpose is none for another, nor a signature.
        text: The text.

    Returns:
        Hexadecimal names of the key (8 digits) and the text (32 digits); None if no key can be stored.
    """
    try:
        key = _key(create=True)
    except OSError:
        return None
    named, digest = (
        hmac.new(key, f"{kind}\0{purpose}\0{content}".encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()
        for kind, content in (("key", ""), ("digest", text))
    )
    return named[:8], digest[:32]


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
    if os.name == "posix" and (mode := path.stat().st_mode) & 0o077:
        raise OSError(
            f"{path} is the key of your signatures, and others may use it (mode {mode & 0o777:03o}). Run chmod 600 {path}; "
            "if they did read it, delete it"
        )
    key = path.read_bytes()
    if len(key) < _KEY_BYTES:
        raise OSError(f"{path} is not a key: it has {len(key)} bytes, expected {_KEY_BYTES}")
    return key
