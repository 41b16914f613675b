"""Reads the record and the other JSON files of a saved folder, and rejects those of another form."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from safetensors import SafetensorError
from transformers import TrainerState

from agile_trainers.records.plain import json_bytes, replacing

WITHHELD = re.compile(r"<(\w+), withheld(?:: ([0-9a-f]{8})-([0-9a-f]{32}))?>")
"""Text in place of a value that does not leave the machine, whatever its form: type, name of the key, digest."""
CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
"""Files of an adapter; of the two kinds of weights PEFT reads the first that is there."""
_LONGEST, _MOST = 10_000, 2**53
"""Characters of a name, and the largest count, beyond which no run wrote it."""


class Count:
    """The form of an integer from 0 on."""


class Name:
    """The form of a text that is shown."""


@dataclass(frozen=True)
class Fields:
    """The form of a dictionary with known names."""

    of: dict[str, Any]
    """Forms by name."""
    required: tuple[str, ...] = ()
    only: bool = False
    """True if there may be no other names, as they become arguments."""


def form_of(kind: Any) -> Fields:
    """Return the form of a dataclass that was written as JSON: its fields alone, those without a default required.

    Args:
        kind: The class. An integer is a :class:`Count`, a literal a :class:`Name`, a tuple a list.
    """
    hints = {name: _form(hint) for name, hint in get_type_hints(kind).items()}
    required = [one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING]
    return Fields({one.name: hints[one.name] for one in fields(kind)}, tuple(required), only=True)


def _form(hint: Any) -> Any:
    kind, inside = get_origin(hint), get_args(hint)
    if kind in (list, tuple):
        return [_form(inside[0])]
    if kind is dict:
        return {str: _form(inside[1])}
    if kind is UnionType:
        return tuple(map(_form, inside))
    if kind is Literal:
        return Name
    return form_of(hint) if is_dataclass(hint) else {int: Count, float: NUMBER, NoneType: None}.get(hint, hint)


@dataclass(frozen=True)
class Misfit:
    """A value that has another form."""

    where: str
    """Its place, such as ``options.max_turns``."""
    value: Any
    expected: str


NUMBER = int | float
_TABLE = {str: Any}
STAGE = Fields(
    {"source": Name, **dict.fromkeys(("commit", "algorithm", "environment"), (Name, None)), "global_step": (int, None)},
    required=("source",),
)  # fmt: skip
"""A ``parent`` in a record, without its own."""
OPTIONS = Fields({
    **dict.fromkeys(("max_turns", "max_new_tokens", "max_observation_length", "num_iterations"), Count),
    **dict.fromkeys(("environment_workers", "environment_processes", "top_k", "min_new_tokens"), Count),
    **dict.fromkeys(("max_model_length", "max_environments"), (Count, None)),
    **dict.fromkeys(("temperature", "top_p", "repetition_penalty"), NUMBER),
    **dict.fromkeys(("min_p", "environment_timeout"), (NUMBER, None)),
    "history": (str, {str: (str, None)}, None), "on_rewrite": str,
    "training_chat_template": bool, "do_sample": bool, "system_prompt": (str, None),
    "chat_template_kwargs": (_TABLE, None), "environment_limits": ({str: {str: Count}}, None), "stop_strings": ([str], None),
})  # fmt: skip
"""Options in a record that an evaluation of the policy takes from it, and the one that copied checkpoints go by."""
RECORD_FORM = Fields({
    "algorithm": Name, "environment": (Name, None), "environment_arguments": _TABLE, "base_model": (_TABLE, None),
    "lora": (_TABLE, None), "critic": bool, "global_step": Count, "run_id": Name, "versions": {str: str}, "options": OPTIONS,
})  # fmt: skip
_CALLBACK = Fields({"args": _TABLE, "attributes": _TABLE}, required=("args", "attributes"), only=True)
STATE_FORM = Fields(
    {
        **{one.name: Any for one in fields(TrainerState)},
        **dict.fromkeys(("global_step", "max_steps"), Count),
        **dict.fromkeys(("epoch", "logging_steps", "num_train_epochs", "total_flos", "num_input_tokens_seen"), NUMBER),
        **dict.fromkeys(("eval_steps", "save_steps", "best_metric"), (NUMBER, None)),
        **dict.fromkeys(("train_batch_size", "best_global_step"), (Count, None)),
        **dict.fromkeys(("is_local_process_zero", "is_world_process_zero", "is_hyper_param_search"), bool),
        **dict.fromkeys(("best_model_checkpoint", "trial_name"), (str, None)),
        "trial_params": (_TABLE, None), "log_history": [Fields({"step": Count}, required=("step",))],
        "stateful_callbacks": ({str: (_CALLBACK, [_CALLBACK])}, None),
    },
    required=("epoch", "global_step"), only=True,
)  # fmt: skip
"""``trainer_state.json``."""
_SHIFT = dict.fromkeys(("first", "now", "p", "share"), NUMBER) | {"batch": Count}
_LEVEL = {"first": NUMBER, "waiting": NUMBER, "shift": Fields(_SHIFT, required=tuple(_SHIFT), only=True)}
_COURSE = {
    **dict.fromkeys(("start", "last", "total", "squares"), NUMBER), "count": Count, "errors": [NUMBER],
    "levels": [Fields(_LEVEL, required=tuple(_LEVEL), only=True)],
}  # fmt: skip
_HISTORY = Fields(
    {"patience": bool, "groups": Count, "latest": {str: [NUMBER]}, "earliest": {str: [NUMBER]},
     "counts": {str: Count}, "notes": {str: str}, "courses": {str: Fields(_COURSE, required=tuple(_COURSE), only=True)}},
    only=True,
)  # fmt: skip
_ANSWER = Fields({"prompt_ids": [Count], "answer_ids": [Count]}, required=("prompt_ids", "answer_ids"), only=True)
_HEALTH = Fields(
    {
        "diagnosis": Fields(
            {"history": _HISTORY, "said": {str: NUMBER}, "seen": {str: Count}, "told_at": {str: Count}},
            required=("history",),
        ),
        "measurements": Fields({"landmarks": [_ANSWER], "first": [[NUMBER]]}, required=("landmarks", "first")),
    },
    required=("diagnosis", "measurements"),
)
POSITION_FORM = Fields(
    {
        "generation": Count, "position": Count, "pass_tokens": (Count, None), "rows": (Count, None),
        "successes": Count, "geometry": Fields({"processes": Count}, required=("processes",)),
        "watch": (Fields({}, only=True), _HEALTH),
        "skipped_steps": Fields({"skipped": Count, "in_a_row": Count}, only=True),
        "packing": Fields({"checked": bool, "refused": (str, None)}, only=True),
        "tasks": Fields({"counts": {str: [NUMBER]}, "discarded": Count}),
    },
    required=("generation", "position", "geometry"),
)  # fmt: skip
"""``rollout/position.json``."""
SUCCESSES_FORM = Fields(
    {"kept": {str: Fields({"worth": (NUMBER, None), "rewards": [(NUMBER, None)], "episode": str},
                          required=("worth", "rewards", "episode"), only=True)}},
    required=("kept",),
)  # fmt: skip
"""``rollout/successes.json``."""


def misfits(value: Any, form: Any, where: str = "") -> Iterator[Misfit]:
    """Yield the parts of a JSON value that have another form, the first ones first.

    Args:
        value: The value. A text in place of a withheld one has any form.
        form: Its form.
        where: Its place.
    """
    if form is Any or (isinstance(value, str) and WITHHELD.fullmatch(value)):
        return
    if isinstance(form, tuple):
        found = [next(misfits(value, one, where), None) for one in form]
        if None not in found:
            inside = [one for one in found if one is not None and one.where != where]
            yield from inside[:1] or [Misfit(where, value, " or ".join(one.expected for one in found if one))]
    elif isinstance(form, (dict, Fields)) and isinstance(value, dict):
        forms = form.of if isinstance(form, Fields) else dict.fromkeys(value, next(iter(form.values())))
        if isinstance(form, Fields):
            for name in form.required:
                if name not in value:
                    yield Misfit(where, value, f"an object with {name}")
        for name, one in value.items():
            if name in forms:
                yield from misfits(one, forms[name], f"{where}.{name}" if where else name)
            elif isinstance(form, Fields) and form.only:
                yield Misfit(where, value, f"an object without {name!a:.80}")
    elif isinstance(form, list) and isinstance(value, list):
        for index, one in enumerate(value):
            yield from misfits(one, form[0], f"{where}[{index}]")
    elif not _is(value, form):
        yield Misfit(where, value, _named(form))


def _is(value: Any, form: Any) -> bool:
    if form is None:
        return value is None
    if form is Count:
        return type(value) is int and 0 <= value <= _MOST
    if form is Name:
        return isinstance(value, str) and len(value) <= _LONGEST
    if isinstance(form, (dict, list, Fields)):
        return False
    return isinstance(value, form) and isinstance(value, bool) == (form is bool)


def _named(form: Any) -> str:
    if isinstance(form, (dict, Fields)):
        return "an object"
    if isinstance(form, list):
        return "a list"
    known = {None: "null", Count: "an integer from 0 on", Name: "a short text", str: "a text", bool: "true or false"}
    return known.get(form, "a number")


RECORD = "agile_trainers.json"
_LITTLE = 1 << 20
"""Bytes of free space below which a disk counts as full."""
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
    with naming_full_disk(path), replacing(path) as partial, partial.open("x", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


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
    """Read a JSON file that holds an object of a form, see :mod:`agile_trainers.adapters.folders`.

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
            f"{path}: run_id is {brief(record['run_id'])}, expected letters, digits and hyphens: it names a folder. "
            "Remove it, and the run goes on as a branch of its own."
        )
    stages: list[dict[str, Any]] = []
    stage = record.get("parent")
    while stage is not None:
        where = "parent" + ".parent" * len(stages)
        if not isinstance(stage, dict) or "source" not in stage or len(stages) == _STAGES:
            raise CheckpointError(
                f"{path}: {where} is {brief(stage)}, expected a stage with a source, or null. Remove it, and the model has "
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
            f"{path}: {named(misfit.where) or 'it'} is {brief(misfit.value)}, expected {misfit.expected}. The file was "
            "changed, or no run wrote it; restore or remove it."
        )


def named(name: str) -> str:
    """Show the name of a file in an error; one that a terminal would not show is escaped."""
    return name if name.isprintable() and len(name) <= 200 else brief(name)


def brief(value: Any) -> str:
    """Show a value of a file in an error, whatever its size and characters."""
    if isinstance(value, (dict, list)):
        return f"a {type(value).__name__} of {len(value)}"
    text = value[:80] if isinstance(value, str) else value
    return f"{text!a:.80}"


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
                raise not_plain(folder, Path(entry.path))


def not_plain(folder: Path, path: Path) -> CheckpointError:
    """Make the error of a path that is a link or no regular file."""
    kind = "a link" if path.is_symlink() else "no regular file"
    return CheckpointError(
        f"{folder} is not read: {named(path.relative_to(folder).as_posix())} is {kind}. Put a copy of the file or folder "
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
                f"{path} is not read: weight_map names {brief(name)}, expected the names of files beside it. Restore the "
                "file."
            )
