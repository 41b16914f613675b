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
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from peft import LoraConfig
from safetensors import SafetensorError

from agile_trainers.adapters.forms import POSITION_FORM, RECORD_FORM, STAGE, STATE_FORM, misfits
from agile_trainers.adapters.initialization import changes_base
from agile_trainers.adapters.roles import CRITIC
from agile_trainers.adapters.trust import OPTION as TRUST
from agile_trainers.adapters.trust import is_trusted, pickles, sign
from agile_trainers.records.plain import json_bytes

_UNREAD = ("training_args.bin", "learning_curve.png")
RECORD, MARKER = "agile_trainers.json", "complete.json"
POSITION, _STATE_FILE = "rollout/position.json", "trainer_state.json"
_OPTIMIZER = ("optimizer.pt", "optimizer.bin", "optimizer_0", "pytorch_optimizer_0", "latest")
"""File names of the optimizer's state: plain, FSDP's (two kinds), DeepSpeed's."""
_LITTLE = 1 << 20
"""Bytes of free space below which a disk counts as full."""
NOT_LORA_SETTINGS = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config",
}  # fmt: skip
"""Fields of a LoRA configuration that are book-keeping, or that only affect how new weights are initialized."""
_TAGS = ("latest", "latest_universal")
"""Files in which DeepSpeed reads the name of the subfolder to load."""
_RUN_ID = re.compile(r"[\w\-]{0,100}", re.ASCII)
"""Ids of runs, which name the folders of records."""
_STAGES = 100
"""Stages of a history, beyond which it is not one that a run wrote."""


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
    partial.unlink(missing_ok=True)  # which may be a link to another file
    with naming_full_disk(path), partial.open("x", encoding="utf-8") as file:
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
        value = json.loads(json_bytes(path).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, expected a JSON object.")
    return value


def read_form(path: Path, form: Any) -> dict[str, Any]:
    """Read a JSON file that holds an object of a form, see :mod:`agile_trainers.adapters.forms`.

    Raises:
        CheckpointError: If the file cannot be read, or a value has another form.
    """
    content = read_json(path)
    _check_form(path, content, form)
    return content


def read_record(folder: Path) -> dict[str, Any]:
    """Read the record of a folder, of which another person may be the author.

    Returns:
        The record. ``parent`` has the known fields of each stage and no others.

    Raises:
        CheckpointError: If it cannot be read, or a field is not of its type.
    """
    path = folder / RECORD
    record = read_form(path, RECORD_FORM)
    if not _RUN_ID.fullmatch(record.get("run_id", "")):
        raise CheckpointError(
            f"{path}: run_id is {_shown(record['run_id'])}, expected letters, digits and hyphens: it names a folder. "
            "Remove it, and the run goes on as a branch of its own."
        )
    stages: list[dict[str, Any]] = []
    stage = record.get("parent")
    while stage is not None:
        where = "parent" + ".parent" * len(stages)
        if not isinstance(stage, dict) or "source" not in stage or len(stages) == _STAGES:
            raise CheckpointError(
                f"{path}: {where} is {_shown(stage)}, expected a stage with a source, or null. Remove it, and the model has "
                "no known history."
            )
        _check_form(path, stage, STAGE, where)
        stages.append({name: stage.get(name) for name in STAGE.of})
        stage = stage.get("parent")
    if "parent" in record:
        record["parent"] = None
        for stage in reversed(stages):
            record["parent"] = {**stage, "parent": record["parent"]}
    return record


def _check_form(path: Path, found: Any, form: Any, where: str = "") -> None:
    for misfit in misfits(found, form, where):
        raise CheckpointError(
            f"{path}: {_named(misfit.where) or 'it'} is {_shown(misfit.value)}, expected {misfit.expected}. The file was "
            "changed, or no run wrote it; restore or remove it."
        )


def _named(name: str) -> str:
    """Show the name of a file in an error; one that a terminal would not show is escaped."""
    return name if name.isprintable() and len(name) <= 200 else _shown(name)


def _shown(value: Any) -> str:
    """Show a value of a file in an error, whatever its size and characters."""
    if isinstance(value, (dict, list)):
        return f"a {type(value).__name__} of {len(value)}"
    text = value[:80] if isinstance(value, str) else value
    return f"{text!a:.80}"


def lora_settings(config: LoraConfig) -> dict[str, Any]:
    """Return the settings of a LoRA configuration that change the adapter's function, as JSON values."""
    settings = {name: value for name, value in config.to_dict().items() if name not in NOT_LORA_SETTINGS and value}
    if changes_base(config):
        settings["init_lora_weights"] = config.init_lora_weights  # the weights are relative to that base
    return json.loads(
        json.dumps(settings, default=lambda value: sorted(value) if isinstance(value, set) else str(value))
    )


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
                raise _not_plain(folder, path)
    return found


def check_no_links(folder: Path, subfolders: Collection[str]) -> None:
    """Reject a folder of adapters in which a file is a link, as to a secret that a later push would publish.

    Args:
        folder: The folder.
        subfolders: Names of those that are read. Links to others are left alone.

    Raises:
        CheckpointError: If a file or one of these folders is a link, or something is neither a file nor a folder.
    """
    for part in (folder, *(folder / name for name in subfolders if name)):
        for entry in os.scandir(part) if part.is_dir() else ():
            read = part == folder and entry.name in subfolders
            folders = entry.is_dir(follow_symlinks=not read)
            if not (folders or entry.is_file(follow_symlinks=False) or is_cached(Path(entry.path))):
                raise _not_plain(folder, Path(entry.path))


def _not_plain(folder: Path, path: Path) -> CheckpointError:
    kind = "a link" if path.is_symlink() else "no regular file"
    return CheckpointError(
        f"{folder} is not read: {_named(path.relative_to(folder).as_posix())} is {kind}. Put a copy of the file or folder "
        "there, or remove it."
    )


def is_cached(path: Path) -> bool:
    """Return whether a path is a link in a snapshot of the Hub's cache, to the file's content in ``blobs``."""
    target, snapshot = (Path(os.path.realpath(one)) for one in (path, path.parent))
    inside = (target.parent.parent / "snapshots") in snapshot.parents
    return path.is_symlink() and target.parent.name == "blobs" and inside and target.is_file()


def check_index(path: Path) -> None:
    """Reject the index of a model's weights if it names files elsewhere, which a loader would read.

    Args:
        path: Any file. One that is no index is accepted.

    Raises:
        CheckpointError: If it is an index that cannot be read, or a name in it is not that of a file beside it.
    """
    if not path.name.endswith(".index.json"):
        return
    names = read_json(path).get("weight_map")
    for name in names.values() if isinstance(names, dict) else [names]:
        if not isinstance(name, str) or name in ("", "..") or Path(name).name != name or "\\" in name:
            raise CheckpointError(
                f"{path} is not read: weight_map names {_shown(name)}, expected the names of files beside it. Restore the "
                "file."
            )


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
        raise CheckpointError(f"{_named(str(folder))} cannot be read: {error.strerror or error}.") from error
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
            f"({_named(pickles(present)[0])}), and was not signed by one of your runs on this machine. If you trust its "
            f"author, set {TRUST}=1."
        )
    _check_states(folder, present, record)
    for path in present.values():
        check_index(path)


def _check_files(folder: Path, present: Mapping[str, Path], listed: Mapping[str, Any]) -> None:
    """Compare the files of a checkpoint with those that its marker lists, and check where DeepSpeed will look."""
    for name, expected in listed.items():
        if name not in present:
            raise CheckpointError(f"{folder} is incomplete: {_named(name)} is missing.")
        found = _fingerprint(present[name])
        if not isinstance(expected, dict):
            raise CheckpointError(
                f"{folder / MARKER} holds {_shown(expected)} for {_named(name)}, expected size and sha256."
            )
        if found != expected:
            size = f"{found['size']} bytes" if found["size"] != expected.get("size") else "another content"
            raise CheckpointError(
                f"{folder} is damaged: {_named(name)} has {size}, expected {_shown(expected.get('size'))} bytes with "
                f"SHA-256 {_shown(expected.get('sha256'))}."
            )
    for name in _TAGS:
        tag = present[name].read_text(encoding="utf-8", errors="replace").strip() if name in present else None
        if tag is not None and not re.fullmatch(r"global_step[0-9]{1,18}", tag):
            raise CheckpointError(
                f"{folder / name} names the subfolder {_shown(tag)}, expected global_step and a number. It is not followed: "
                "the file was changed, or no run wrote it."
            )


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
                    f"{present[name]}: epoch is {_shown(state['epoch'])}, expected 0 to {state['global_step']}, the number "
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
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}
