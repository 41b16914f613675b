"""Records the origin of saved folders and verifies that checkpoints are complete.

Every folder that a trainer saves has a record, ``agile_trainers.json``, written before anything else. A checkpoint also has
a marker, ``complete.json``, written after everything else. It lists the size and hash of every other file, so that a
truncated, lost or changed file is detected.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from peft import LoraConfig
from safetensors import SafetensorError

from agile_trainers.adapters.initialization import changes_base
from agile_trainers.adapters.roles import CRITIC
from agile_trainers.adapters.trust import OPTION as TRUST
from agile_trainers.adapters.trust import is_trusted, pickles, sign

_UNREAD = ("training_args.bin", "learning_curve.png")
RECORD, MARKER = "agile_trainers.json", "complete.json"
_OPTIMIZER = ("optimizer.pt", "optimizer.bin", "optimizer_0", "pytorch_optimizer_0", "latest")
"""File names of the optimizer's state: plain, FSDP's (two kinds), DeepSpeed's."""
_LITTLE = 1 << 20
"""Bytes of free space below which a disk counts as full."""
NOT_LORA_SETTINGS = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config",
}  # fmt: skip
"""Fields of a LoRA configuration that are book-keeping, or that only affect how new weights are initialized."""


class CheckpointError(ValueError):
    """Raised when a folder cannot be resumed from; the message gives the reason and the remedy."""


@contextmanager
def naming_full_disk(path: str | Path) -> Iterator[None]:
    """Raise one error that names the path when writing inside the block fails on a full disk.

    The operating system's error names no path, and safetensors and PyTorch raise errors of their own.

    Args:
        path: The file that is written, or its folder.

    Raises:
        OSError: With ``errno.ENOSPC`` and the path as ``filename``, if the disk is full.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if not _is_full(error, Path(path)) or getattr(error, "filename", None) is not None:
            raise
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        full.add_note(
            "Free some space, or choose a folder on another disk. Files that were complete before are unchanged."
        )
        raise full from error


def _is_full(error: BaseException, path: Path) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, SafetensorError):
        return "os error 28" in str(error) or "os error 122" in str(error)
    # PyTorch only reports that the file is shorter than the data written to it.
    there = next((folder for folder in (path, *path.parents) if folder.exists()), None)
    return "inline_container" in str(error) and there is not None and shutil.disk_usage(there).free < _LITTLE


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file atomically.

    Raises:
        OSError: If the file cannot be written. On a full disk, the error names the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with naming_full_disk(path), partial.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        CheckpointError: If the file cannot be read or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, expected a JSON object.")
    return value


def lora_settings(config: LoraConfig) -> dict[str, Any]:
    """Return the settings of a LoRA configuration that change the adapter's function, as JSON values."""
    settings = {name: value for name, value in config.to_dict().items() if name not in NOT_LORA_SETTINGS and value}
    if changes_base(config):
        settings["init_lora_weights"] = config.init_lora_weights  # the weights are relative to that base
    return json.loads(
        json.dumps(settings, default=lambda value: sorted(value) if isinstance(value, set) else str(value))
    )


def mark_complete(folder: Path) -> None:
    """Write the marker that makes the folder a complete checkpoint.

    The marker leaves out ``*.md`` files, which may be edited, and what is never read and may be deleted:
    ``training_args.bin``, a pickle, and the card's picture.
    """
    files = sorted(
        path for path in folder.rglob("*") if path.is_file() and path.suffix != ".md" and path.name not in _UNREAD
    )
    listed = {path.relative_to(folder).as_posix(): _fingerprint(path) for path in files if path.name != MARKER}
    signed = {"signature": sign(listed)} if pickles(folder) else {}
    write_json(folder / MARKER, {"files": listed, **signed})


def check_complete(folder: Path) -> Path:
    """Check that a folder is a complete checkpoint, and return it.

    Raises:
        CheckpointError: If the folder does not exist, was not written by this library, was not saved to the end, has a
            lost, truncated or changed file, or holds pickles that are not signed by this user.
    """
    if not folder.is_dir():
        near = ", ".join(path.name for path in checkpoints(folder.parent)) or "no checkpoint"
        raise CheckpointError(f"There is no folder {folder}; {folder.parent} holds {near}.")
    if not (folder / RECORD).is_file():
        raise CheckpointError(f"{folder} was not saved by a multi-turn trainer: it has no {RECORD}.")
    read_json(folder / RECORD)
    if not (folder / MARKER).is_file():
        if not (folder / "trainer_state.json").is_file() and checkpoints(folder):
            raise CheckpointError(
                f"{folder} holds a model, not a checkpoint. Its checkpoints are "
                f"{', '.join(path.name for path in checkpoints(folder))}."
            )
        raise CheckpointError(f"{folder} is incomplete: saving was interrupted ({MARKER} is missing).")
    listed = read_json(folder / MARKER).get("files")
    if not isinstance(listed, dict):
        raise CheckpointError(f"{folder / MARKER} does not list the checkpoint's files.")
    for name, expected in listed.items():
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} is incomplete: {name} is missing.")
        found = _fingerprint(folder / name)
        if found != expected:
            size = f"{found['size']} bytes" if found["size"] != expected.get("size") else "another content"
            raise CheckpointError(f"{folder} is damaged: {name} has {size}, expected {json.dumps(expected)}.")
    for what, patterns in _needed(read_json(folder / RECORD)).items():
        if not any(fnmatch(name, pattern) for name in listed for pattern in patterns):
            raise CheckpointError(f"{folder} is incomplete: it was saved without {what} ({' or '.join(patterns)}).")
    if not any((folder / name).exists() for name in _OPTIMIZER):
        raise CheckpointError(
            f"{folder} has no optimizer state (save_only_model=True), so the run cannot resume exactly. Start a new "
            f"run with model={str(folder)!r}."
        )
    if not is_trusted(folder, listed, read_json(folder / MARKER).get("signature")):
        raise CheckpointError(
            f"{folder} holds files in Python's full pickle protocol, which can run code ({pickles(folder)[0]}), and was not "
            f"signed by one of your runs on this machine. If you trust its author, set {TRUST}=1."
        )
    return folder


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
    steps = {path: re.fullmatch(r"checkpoint-(\d+)", path.name) for path in output_dir.glob("checkpoint-*")}
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
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}
