"""Checks the folder or Hub repository of a model before it is loaded, and names it where loading fails.

Another person may have made it: what its files name elsewhere on this machine would be read, saved and pushed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers.utils import cached_file

from agile_trainers.adapters import untrusted
from agile_trainers.adapters.folders import check_index, read_json

_SETTINGS, _LONGEST_PATH = ("tokenizer_config.json", "special_tokens_map.json"), 4000
"""Files of the tokenizer's settings, and characters of a text in them that may be a path."""
_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
"""Files that name those of the weights, besides one that ``config.json`` names."""
LOADERS = ("from_pretrained", "create_model_from_path")
"""Functions of transformers, PEFT and TRL that load models and tokenizers."""
RESUMING = (
    "load_from_json",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_scaler",
    "_load_rng_state",
)
"""Functions of transformers that read a checkpoint."""
_OTHERS = (ImportError, MemoryError, torch.OutOfMemoryError)
"""Errors of the machine, not of the folder."""
_BUILDERS = ("/cpp_extension.py", "/op_builder/")
"""Parts of the paths of files that build PyTorch's and DeepSpeed's extensions, which fail for want of a compiler."""


def check_model_folder(model: str, revision: str | None = None) -> None:
    """Reject a model of which a file names another one elsewhere on this machine, or whose chat template cannot be rendered.

    transformers would read the other file. The content of a secret that ``tokenizer_config.json`` names would become the
    vocabulary, which is saved and pushed with the model. A template may run without end, or fill the memory.

    Args:
        model: Folder or Hub id.
        revision: Branch, tag or commit of a Hub repository.

    Raises:
        ValueError: If there is such a file or template, or the tokenizer's settings cannot be read.
    """
    folder, local = Path(model), Path(model).is_dir()

    def find(name: str) -> Path:
        return folder / name if local else Path(hub_file(model, name, revision) or "")

    for path in map(find, _SETTINGS):
        _check_settings(path, read_json(path) if path.is_file() else {})
    config = find("config.json")
    other = read_json(config).get("transformers_weights") if config.is_file() else None
    for name in (*_INDICES, *([other] if isinstance(other, str) else [])):
        if (path := find(name)).is_file():
            check_index(path)
    more = sorted(folder.glob(untrusted.MORE)) if local else []
    untrusted.check_templates(find(_SETTINGS[0]), [find(untrusted.FILE), *more])


def _check_settings(path: Path, settings: dict[str, Any]) -> None:
    """Check the settings of a tokenizer."""
    longest = settings.get("model_max_length", 0)
    if not isinstance(longest, (int, float)):
        raise ValueError(
            f"{path} is damaged: model_max_length is {longest!a:.80}, expected a number. Restore the file."
        )
    for key, value in settings.items():
        if not isinstance(value, str) or key.endswith("_token") or len(value) > _LONGEST_PATH or "\0" in value:
            continue
        if os.path.isfile(value) and not Path(os.path.realpath(value)).is_relative_to(os.path.realpath(path.parent)):
            raise ValueError(
                f"{path} is not read: {key!a:.80} names the file {value!a:.200} outside of its folder. Put a copy of the "
                "file into the folder, or remove the setting."
            )


def hub_file(repository: str, name: str, revision: str | None) -> str | None:
    """Download a file; None if there is no such repository, file or connection."""
    try:
        return cached_file(
            repository,
            name,
            revision=revision,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except OSError:
        # Not a repository: loading it as a model raises the clearest error.
        return None


_NO_GPU = re.compile("CUDA|NVIDIA|XPU|HIP")
"""Words of PyTorch's errors where a device is asked for that is not there."""


@contextmanager
def naming_folder(
    source: str | None, within: Collection[str] = (), kind: type[ValueError] = ValueError
) -> Iterator[None]:
    """Raise one kind of error that names the folder where transformers, PEFT or safetensors fail on its files.

    Their loaders raise ``TypeError``, ``KeyError``, ``AttributeError`` and others on values of a wrong type, and tokenizers
    a ``BaseException``. Missing packages, missing memory, extensions that cannot be built and the Hub's own errors stay.

    Args:
        source: Folder or Hub id that the block loads. None: no error is changed.
        within: Names of functions. Only errors raised inside one of these are changed. Default: all.
        kind: Type of the error.

    Raises:
        ValueError: In place of such an error, with its type and text.
    """
    try:
        yield
    except BaseException as error:
        if source is None or isinstance(error, _OTHERS) or (isinstance(error, ValueError) and source in str(error)):
            raise
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # the exit of a user
            raise
        if isinstance(error, OSError) and (error.errno is not None or not os.path.isdir(source)):
            raise
        passed = _passed(error)
        built = any(part in file for file in passed.values() for part in _BUILDERS)
        if built or (within and not passed.keys() & {*within}):
            raise
        reason = " ".join(str(error).split())
        if _NO_GPU.search(reason) and not torch.cuda.is_available():
            raise kind(
                f"{source} cannot be loaded to a GPU, since PyTorch finds none here: {reason[:200]} Leave device_map unset "
                "(the trainers place the model themselves), or install a PyTorch for this machine's GPU."
            ) from error
        raise kind(
            f"{source} cannot be loaded: {type(error).__name__}: {reason[:1000]}. A file of it is damaged, incomplete or of "
            "another version of its library; copy or download it again."
        ) from error


def _passed(error: BaseException) -> dict[str, str]:
    """Return the names of the functions that an error went through, each with its file."""
    found, trace = dict[str, str](), error.__traceback__
    while trace is not None:
        found[trace.tb_frame.f_code.co_name] = trace.tb_frame.f_code.co_filename
        trace = trace.tb_next
    return found
