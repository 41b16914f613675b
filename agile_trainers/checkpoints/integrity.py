"""Verifies that checkpoints are complete.

A checkpoint has a marker, ``complete.json``, written after everything else. It lists the size and hash of every other file,
so that a truncated, lost or changed file is detected.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import secrets
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from agile_trainers.adapters.folders import (
    CONFIG,
    PICKLE,
    POSITION_FORM,
    RECORD,
    STATE_FORM,
    WEIGHTS,
    CheckpointError,
    brief,
    check_index,
    is_cached,
    named,
    not_plain,
    read_form,
    read_json,
    read_record,
    write_json,
)
from agile_trainers.adapters.roles import CRITIC, REFERENCE

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


def keyed_digest(text: str) -> tuple[str, str] | None:
    """Compute an HMAC with this user's key, of which nobody else can guess the text.

    Args:
        text: The text. Its digest is no signature of a checkpoint's files.

    Returns:
        Hexadecimal names of the key (8 digits) and the text (32 digits); None if no key can be stored.
    """
    try:
        key = _key(create=True)
    except OSError:
        return None
    named, digest = (
        hmac.new(key, f"{kind}\0value\0{content}".encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()
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


MARKER = "complete.json"
_UNREAD = ("training_args.bin", "learning_curve.png")
POSITION, _STATE_FILE = "rollout/position.json", "trainer_state.json"
_OPTIMIZER = ("optimizer.pt", "optimizer.bin", "optimizer_0", "pytorch_optimizer_0", "latest")
"""File names of the optimizer's state: plain, FSDP's (two kinds), DeepSpeed's."""
_TAGS = ("latest", "latest_universal")
"""Files in which DeepSpeed reads the name of the subfolder to load."""


def files_of(folder: Path) -> dict[str, Path]:
    """Return the files of a folder and its subfolders: relative path, with ``/``, to file.

    Raises:
        CheckpointError: If one is a link, or neither a file nor a folder. A loader follows links out of the folder, past
            what is checked here. Links of the Hub's cache, to a file of the same repository, are files.
        OSError: If a folder cannot be read.
    """
    found, folders = {}, [folder]
    while folders:
        for entry in os.scandir(folders.pop()):
            path = Path(entry.path)
            if entry.is_dir(follow_symlinks=False):
                folders.append(path)
            elif entry.is_file(follow_symlinks=False) or is_cached(path):
                found[path.relative_to(folder).as_posix()] = path
            else:
                raise not_plain(folder, path)
    return found


def mark_complete(folder: Path, known: Mapping[str, Any] | None = None) -> None:
    """Write the marker that makes the folder a complete checkpoint.

    The marker leaves out ``*.md`` files, which may be edited, and what is never read and may be deleted:
    ``training_args.bin``, a pickle, and the card's picture.

    Args:
        folder: The checkpoint.
        known: Files whose fingerprints are known, by relative path. Default: all are computed.
    """
    files = {
        name: path
        for name, path in sorted(files_of(folder).items())
        if path.suffix != ".md" and path.name not in _UNREAD and name != MARKER
    }
    listed = {name: (known or {}).get(name) or _fingerprint(path) for name, path in files.items()}
    signed = {"signature": sign(listed)} if pickles(listed) else {}
    write_json(folder / MARKER, {"files": listed, **signed})


def check_complete(folder: Path, *, resumes: bool = True) -> Path:
    """Check that a folder is a complete checkpoint, and return it.

    Args:
        folder: The folder. Another person may have made it.
        resumes: Whether a run is to go on from it, which needs the optimizer's state.

    Raises:
        CheckpointError: If the folder does not exist, was not written by this library, was not saved to the end, has a
            lost, truncated or changed file or a link, or holds pickles that are not signed by this user.
    """
    try:
        _check_complete(folder, resumes)
    except OSError as error:
        raise CheckpointError(f"{named(str(folder))} cannot be read: {error.strerror or error}.") from error
    return folder


def _check_complete(folder: Path, resumes: bool) -> None:
    if not folder.is_dir():
        near = ", ".join(path.name for path in checkpoints(folder.parent)) or "no checkpoint"
        raise CheckpointError(f"There is no folder {folder}; {folder.parent} holds {near}.")
    if not (folder / RECORD).is_file():
        raise CheckpointError(f"{folder} was not saved by a multi-turn trainer: it has no {RECORD}.")
    record = read_record(folder)
    if not (folder / MARKER).is_file():
        if not (folder / "trainer_state.json").is_file() and checkpoints(folder):
            raise CheckpointError(
                f"{folder} holds a model, not a checkpoint. Its checkpoints are "
                f"{', '.join(path.name for path in checkpoints(folder))}."
            )
        raise CheckpointError(f"{folder} is incomplete: saving was interrupted ({MARKER} is missing).")
    marker = read_json(folder / MARKER)
    listed = marker.get("files")
    if not isinstance(listed, dict):
        raise CheckpointError(f"{folder / MARKER} does not list the checkpoint's files.")
    present = files_of(folder)
    _check_files(folder, present, listed)
    for what, patterns in _needed(record).items():
        if not any(fnmatch(name, pattern) for name in listed for pattern in patterns):
            raise CheckpointError(f"{folder} is incomplete: it was saved without {what} ({' or '.join(patterns)}).")
    if resumes and not any(name.partition("/")[0] in _OPTIMIZER for name in listed):
        raise CheckpointError(
            f"{folder} has no optimizer state (save_only_model=True), so the run cannot resume exactly. Start a new "
            f"run with model={str(folder)!r}."
        )
    if not is_trusted(present, listed, marker.get("signature")):
        raise CheckpointError(
            f"{folder} holds files that may be read with Python's full pickle protocol, which can run code "
            f"({named(pickles(present)[0])}), and was not signed by one of your runs on this machine. If you trust its "
            f"author, set {OPTION}=1."
        )
    _check_states(folder, present, record)
    for path in present.values():
        check_index(path)


def _check_files(folder: Path, present: Mapping[str, Path], listed: Mapping[str, Any]) -> None:
    """Compare the files of a checkpoint with those that its marker lists, and check where DeepSpeed will look."""
    for name, expected in listed.items():
        if name not in present:
            raise CheckpointError(f"{folder} is incomplete: {named(name)} is missing.")
        found = _fingerprint(present[name])
        if not isinstance(expected, dict):
            raise CheckpointError(
                f"{folder / MARKER} holds {brief(expected)} for {named(name)}, expected size and sha256."
            )
        if found != expected:
            size = f"{found['size']} bytes" if found["size"] != expected.get("size") else "another content"
            raise CheckpointError(
                f"{folder} is damaged: {named(name)} has {size}, expected {brief(expected.get('size'))} bytes with "
                f"SHA-256 {brief(expected.get('sha256'))}."
            )
    for name in present.keys() - listed.keys():
        if is_loaded_unlisted(name, listed):
            raise CheckpointError(
                f"{folder} holds {named(name)}, which {MARKER} does not list: it is no part of this checkpoint, but of "
                "another run's, perhaps. Remove it."
            )
    for name in _TAGS:
        tag = present[name].read_text(encoding="utf-8", errors="replace").strip() if name in present else None
        if tag is not None and not re.fullmatch(r"global_step[0-9]{1,18}", tag):
            raise CheckpointError(
                f"{folder / name} names the subfolder {brief(tag)}, expected global_step and a number. It is not followed: "
                "the file was changed, or no run wrote it."
            )


def is_loaded_unlisted(name: str, listed: Collection[str]) -> bool:
    """Return whether a loader would read an unlisted file: of another run that was pushed to the same place, for example.

    Args:
        name: Its path, with ``/``.
        listed: Files that the marker lists.
    """
    folder, _, file = name.rpartition("/")
    if folder in (REFERENCE, CRITIC):
        return file == CONFIG or (not file.startswith(".") and file.endswith((".safetensors", ".bin")))
    if folder:  # Trainer reads further adapters in all subfolders
        return "/" not in folder and file in (WEIGHTS, PICKLE)
    if file in ("model.safetensors", "pytorch_model.bin"):  # read in place of shards, and by Trainer of an adapter
        return "model.safetensors" not in listed and ("model.safetensors.index.json" in listed or WEIGHTS in listed)
    if file == PICKLE:
        return CONFIG in listed and WEIGHTS not in listed
    return file in (CONFIG, WEIGHTS)


def _check_states(folder: Path, present: Mapping[str, Path], record: Mapping[str, Any]) -> None:
    """Check the types of what is read of a checkpoint before a run starts."""
    if "global_step" not in record:
        raise CheckpointError(f"{folder / RECORD} does not name the checkpoint's step (global_step).")
    for name, form in ((_STATE_FILE, STATE_FORM), (POSITION, POSITION_FORM)):
        if name in present:
            state = read_form(present[name], form)
            # A run draws the order of each epoch anew, and an epoch has a step at least.
            if name == _STATE_FILE and not 0 <= state["epoch"] <= state["global_step"] + 1:
                raise CheckpointError(
                    f"{present[name]}: epoch is {brief(state['epoch'])}, expected 0 to {state['global_step']}, the number "
                    "of steps. The file was changed; restore it."
                )


def _needed(record: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the files that an algorithm needs to resume: description to file name patterns."""
    if record.get("lora") is None:
        return {"the model": ("*model*.safetensors", "pytorch_model*", "global_step*")}
    needed: dict[str, tuple[str, ...]] = {"the policy": ("adapter_model*",)}
    if record.get("critic"):
        needed["the critic"] = (f"{CRITIC}/adapter_model*",)
    return needed


def set_aside(folders: list[Path], output_dir: Path) -> Path:
    """Move checkpoints of another branch of a run into a new folder below ``output_dir/superseded``.

    Returns:
        The new folder.
    """
    parent = output_dir / "superseded"
    number = 1 + max((int(path.name) for path in parent.glob("*") if path.name.isdigit()), default=0)
    where = parent / str(number)
    where.mkdir(parents=True)
    for folder in folders:
        folder.rename(where / folder.name)
    return where


def step_of(folder: Path) -> int:
    """Return the step in the name of a folder ``checkpoint-<step>``."""
    return int(folder.name.rpartition("-")[2])


def checkpoints(output_dir: Path) -> list[Path]:
    """Return the folders ``checkpoint-<step>`` ordered by step, incomplete ones included."""
    steps = {path: re.fullmatch(r"checkpoint-(0|[1-9][0-9]*)", path.name) for path in output_dir.glob("checkpoint-*")}
    found = {path: int(match[1]) for path, match in steps.items() if match and path.is_dir()}
    return sorted(found, key=lambda path: found[path])


def newest_complete(output_dir: Path, at_most: int | None = None) -> tuple[Path, list[str]]:
    """Return the complete checkpoint of the latest step, and the reason why each later one was skipped.

    Args:
        output_dir: Folder of the run.
        at_most: Passes over checkpoints of later steps.

    Raises:
        CheckpointError: If no checkpoint is complete.
    """
    skipped: list[str] = []
    for folder in reversed(checkpoints(output_dir)):
        if at_most is not None and step_of(folder) > at_most:
            continue
        try:
            return check_complete(folder), skipped
        except CheckpointError as error:
            skipped.append(str(error))
    why = "\n".join(["", *skipped]) if skipped else f" {output_dir} holds no folder checkpoint-<step>."
    raise CheckpointError(f"There is no checkpoint to resume from.{why}")


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}
