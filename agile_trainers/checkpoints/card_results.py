"""Adds the results of an evaluation to the metadata of a model card, and leaves its text as it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, metadata_load, metadata_save
from huggingface_hub.repocard_data import eval_results_to_model_index

from agile_trainers.adapters.folders import is_cached
from agile_trainers.records.plain import replacing

CARD = "README.md"
_UNREADABLE = (yaml.YAMLError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError)
"""Errors of PyYAML, and of values that are of another form than a model index."""


def add_results(folder: Path, results: Sequence[EvalResult]) -> Path:
    """Add results to the ``model-index`` of ``README.md``, which is created if it does not exist.

    A result of the same environment and metric, played with the same limits on episodes of the same kind, takes the place of
    the earlier one. The text below the metadata and the other metadata stay as they are; comments in the metadata are lost.

    Args:
        folder: Folder of the model.
        results: The results.

    Returns:
        The card.

    Raises:
        ValueError: If the card is a link or no file, or its metadata cannot be read.
        OSError: If the card cannot be written.
    """
    card, name = folder / CARD, folder.resolve().name
    if (card.is_symlink() and not is_cached(card)) or (card.exists() and not card.is_file()):
        raise ValueError(f"{card} is no regular file. Put a copy of the card there, or remove it.")
    try:
        data = (metadata_load(card) if card.is_file() else None) or {}
        index = _merged(data.get("model-index") or [{"name": name, "results": []}], results)
        with replacing(card) as partial:
            partial.write_bytes(card.read_bytes() if card.is_file() else f"# {name}\n".encode())
            metadata_save(partial, {**data, "model-index": index})
    except _UNREADABLE as error:
        raise ValueError(
            f"The metadata at the top of {card} cannot be read: {str(error)[:300]}. Correct or remove it."
        ) from error
    return card


def _merged(index: list[Any], results: Sequence[EvalResult]) -> list[Any]:
    """Return a model index in which each result replaces that of the same environment, metric, limits and episodes."""
    (first, *others) = index
    kept = []
    new = [
        _key(result.task_type, result.dataset_type, result.metric_type, result.metric_name, result.metric_args)
        for result in results
    ]
    for entry in first["results"]:
        place = entry["task"]["type"], entry["dataset"]["type"]
        metrics = [
            one for one in entry["metrics"] if _key(*place, one["type"], one.get("name"), one.get("args")) not in new
        ]
        if metrics:
            kept.append({**entry, "metrics": metrics})
    (made,) = eval_results_to_model_index(first["name"], list(results))
    return [{**first, "results": [*kept, *made["results"]]}, *others]


def _key(task: str, environment: str, metric: str, name: str | None, arguments: Any) -> tuple[Any, ...]:
    played = {key: (arguments or {}).get(key) for key in ("limits", "episodes_of")}
    return task, environment, metric, name, played
