"""Checks the keys of a chain's file, before anything slow is imported."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from agile_trainers.cli.yaml_files import YAMLFileError
from agile_trainers.config.other_names import meant

SUPERVISED = ("sft", "dpo")
"""Algorithms of stages with TRL's trainers, which need a data set."""
STAGE_KEYS = ("algorithm", "name", "dataset", "dataset_args", "lora", "merge_lora_configs")
EVOLVE = "evolve"
"""Key of a stage that is a population."""


def check_needed_keys(content: Mapping[str, Any]) -> None:
    """Check that a file has what every chain needs.

    Raises:
        YAMLFileError: If something is missing.
    """
    for name in ("output_dir", "model", "environment", "stages"):
        if not content.get(name):
            raise YAMLFileError(f"`{name}` is missing.")
    if not isinstance(content["stages"], list):
        raise YAMLFileError(f"`stages` must be a list, got {content['stages']!r}.")


def check_stage_keys(content: Mapping[str, Any], options: Collection[str]) -> None:
    """Check the keys of stages that no stage could have, and the data sets that are missing.

    Args:
        content: The file.
        options: Names of the options of all algorithms.

    Raises:
        YAMLFileError: For the first mistake.
    """
    known = [*STAGE_KEYS, *options]
    for stage in content["stages"]:
        if not isinstance(stage, dict) or EVOLVE in stage or ":" in str(stage.get("algorithm")):
            continue
        where = f"stage {str(stage.get('name', stage.get('algorithm')))!r}"
        for key in stage:
            if key not in known:
                raise YAMLFileError(f"{where} knows no {key!r}{meant(key, known) or '.'}")
        if stage.get("algorithm") in SUPERVISED:
            check_has_dataset(stage, where)


def check_has_dataset(stage: Mapping[str, Any], where: str) -> None:
    """Check that a supervised stage has a data set.

    Raises:
        YAMLFileError: If it has none.
    """
    if stage.get("dataset") is None:
        raise YAMLFileError(f"{where}: `dataset` is missing; {stage['algorithm']} trains on one.")
