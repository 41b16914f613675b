"""Checks the inputs of a run before anything is loaded or launched."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from agile_trainers.cli.errors import cut, message
from agile_trainers.records.plain import from_json

_MISSING = {
    "model_name_or_path": "the Hub id or folder of the model to train.",
    "environment": "{0} trains on an environment's episodes, not on a data set alone.",
    "teacher": "{0} trains on a teacher alone: the folder or Hub id of an adapter or a model.",
    "use_peft": "{0} trains policy and critic as two LoRA adapters on one base. Add --use_peft, and --lora_target_modules "
    "all-linear to adapt every linear layer.",
}
"""Option that is needed to the reason."""


def missing(option: str, algorithm: str) -> str:
    """Return the error of an option that a command needs and was not given.

    Args:
        option: ``model_name_or_path``, ``environment``, ``teacher`` or ``use_peft``.
        algorithm: The command.
    """
    return f"--{option} is missing: {_MISSING[option].format(algorithm)}"


def environment_arguments(text: str) -> Any:
    """Read ``environment_args``, given as text.

    Raises:
        ValueError: If it is not JSON.
    """
    try:
        return from_json(text, written=True)
    except ValueError as error:
        raise ValueError(
            f'environment_args must be a JSON object such as \'{{"level": "easy"}}\', got {len(text)} characters that are '
            f"none: {error}."
        ) from error


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
