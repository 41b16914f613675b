"""Checks the inputs of a run before anything is loaded or launched."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from agile_trainers.adapters import find_adapters
from agile_trainers.adapters.loading import CONFIG
from agile_trainers.cli.errors import cut, message
from agile_trainers.imports import nearest
from agile_trainers.records.plain import from_json


def check_model(name: str, revision: str | None = None, *, option: str = "model_name_or_path") -> None:
    """Check that a model can be found, by its configuration.

    Args:
        name: A folder or Hub id, of a model or an adapter.
        revision: Revision of the Hub repository.
        option: Option that has the name, for the message.

    Raises:
        ValueError: If the model cannot be found.
    """
    folder, expected = Path(name).expanduser(), "Expected a folder with config.json or adapter_config.json"
    if folder.is_dir():
        find_adapters(str(folder))
        return
    if folder.exists():
        raise ValueError(f"{option}={name!r} is a file. {expected}, or a Hub id.")
    beside = folder.parent.iterdir() if folder.parent.is_dir() else ()
    near = nearest(folder.name, [one.name for one in beside if one.is_dir()], count=1)
    if name.startswith(("/", ".", "~")) or len(folder.parts) > 2:
        raise ValueError(f"There is no folder {option}={name!r}{near or '.'} {expected}.")
    try:
        cached_file(name, "config.json", revision=revision)
    except OSError as error:
        if _is_adapter(name, revision):
            return
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ValueError(
            f"{option}={name!r} is not a folder{near or ','} and cannot be found on the Hub: {reason}. "
            f"{expected}, or a Hub id such as 'Qwen/Qwen2.5-0.5B-Instruct'."
        ) from error


def _is_adapter(name: str, revision: str | None) -> bool:
    try:
        return cached_file(name, CONFIG, revision=revision) is not None
    except OSError:
        return False


def check_output(folder: str | Path) -> None:
    """Check that files can be written to a folder, which is created if it does not exist.

    Raises:
        ValueError: If the folder cannot be written to.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"output_dir={str(folder)!r} cannot be written to: {message(error)}") from error


def json_object(text: str) -> dict[str, Any]:
    """Read the value of an option that takes a JSON object; a ``type`` of ``argparse``.

    Raises:
        argparse.ArgumentTypeError: If the text is anything else.
    """
    try:
        value = from_json(text, written=True)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{cut(repr(text))} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'expected a JSON object such as {{"level": "easy"}}, got {cut(repr(text))}')
    return value
