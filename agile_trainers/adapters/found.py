"""Checks that a model can be found, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

from transformers.utils import cached_file

from agile_trainers.adapters.loading import CONFIG, find_adapters
from agile_trainers.adapters.model_folders import hub_file
from agile_trainers.imports import find_model_folder, nearest_folder


def check_model(name: str, revision: str | None = None, *, option: str = "model_name_or_path") -> None:
    """Check that a model can be found, by its configuration.

    Args:
        name: A folder or Hub id, of a model or an adapter.
        revision: Revision of the Hub repository.
        option: Option that has the name, for the message.

    Raises:
        ValueError: If the model cannot be found.
    """
    folder = find_model_folder(name, option)
    if folder is not None:
        find_adapters(str(folder))
        return
    try:
        cached_file(name, "config.json", revision=revision)
    except OSError as error:
        if hub_file(name, CONFIG, revision):
            return
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ValueError(
            f"{option}={name!r} is not a folder{nearest_folder(Path(name)) or ','} and cannot be found on the Hub: "
            f"{reason}. Expected a folder with config.json or adapter_config.json, or a Hub id such as "
            "'Qwen/Qwen2.5-0.5B-Instruct'."
        ) from error
