"""Reads the values that files of chains and populations share: options, LoRA settings, data sets."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from datasets import Dataset
from peft import LoraConfig

from agile_trainers.adapters.lora_settings import check_one_policy, check_scales
from agile_trainers.cli.parser import Parser
from agile_trainers.cli.yaml_files import YAMLFileError, naming_place
from agile_trainers.config.other_names import meant
from agile_trainers.config.rules import Rule, check_kinds, check_nulls, check_rules, in_unit_interval
from agile_trainers.envs.base import check_no_text_for_booleans
from agile_trainers.envs.questions.rows import FILES, read_dataset
from agile_trainers.envs.registry import environment_factories
from agile_trainers.imports import exits_reported, load_named, nearest
from agile_trainers.trainers.registry import algorithm_names, find_algorithm


def make_config(config: type, options: Mapping[str, Any], output_dir: Path | None, where: str) -> Any:
    """Make a configuration from YAML values, parsed as on the command line (``1e-3`` is a number).

    Args:
        config: Its class, any dataclass.
        options: Field name to value.
        output_dir: Its ``output_dir``; None for a class without one.
        where: Place in the file, for the error.

    Raises:
        YAMLFileError: For a value that the class does not accept.
    """

    def refuse(message: str) -> NoReturn:
        raise ValueError(message)

    parser = Parser([config])
    parser.error = refuse  # type: ignore[method-assign]
    folder = {} if output_dir is None else {"output_dir": str(output_dir)}
    with naming_place(where):
        check_nulls(config, options)
        parser.set_defaults_with_config(**options, **folder)
        (made,) = parser.parse_args_into_dataclasses(args=[])
        check_kinds(made)
    return made


def check_dataset(name: str, arguments: Mapping[str, Any], where: str) -> None:
    """Check that a data set's file or function exists, without loading it, and the texts among its arguments.

    Raises:
        YAMLFileError: If a file or function does not exist, or an argument such as ``streaming`` is the text of a boolean.
    """
    path = Path(name)
    with naming_place(f"{where}: dataset {name!r}"):
        if _is_function(name):
            load_named(name)
            return
        check_no_text_for_booleans(arguments, "its arguments")
    if path.suffix.lower() in FILES and not path.is_file():
        raise YAMLFileError(f"{where}: there is no file {name}.")


def _is_function(dataset: str) -> bool:
    return bool(dataset.partition(":")[2]) and not Path(dataset).exists()


def stage_rows(name: str, arguments: dict[str, Any]) -> Dataset:
    """Load the rows of a stage.

    Args:
        name: ``module.path:function`` that returns rows, or a source of
            :func:`~agile_trainers.envs.questions.rows.read_dataset` (the split is ``train``).
        arguments: Arguments of the function or of ``datasets.load_dataset``.
    """
    if _is_function(name):
        with exits_reported(f"The data set's function {name!r}"):
            rows = load_named(name)(**arguments)
            return rows if isinstance(rows, Dataset) else Dataset.from_list(list(rows))
    return read_dataset(name, **{"split": "train", **arguments})


def read_environment(content: Mapping[str, Any]) -> Any:
    """Find the factory of ``environment``, or several by name, with ``environment_args``.

    Raises:
        YAMLFileError: If there is no such environment, or it does not take the arguments.
    """
    sys.path[:0] = [] if os.getcwd() in sys.path else [os.getcwd()]  # needed for module.path:name
    arguments = mapping(content.get("environment_args"), None, "`environment_args`")
    with naming_place("environment"):
        return environment_factories(content["environment"], arguments)


def check_algorithm(algorithm: Any, others: Iterable[str], where: str) -> None:
    """Check that an algorithm exists.

    Args:
        algorithm: Its name, or ``module.path:Class``.
        others: Names that are accepted besides those of algorithms.
        where: Place in the file, for the error.

    Raises:
        YAMLFileError: If it does not.
    """
    known = [*others, *algorithm_names()]
    if not isinstance(algorithm, str) or (algorithm not in known and ":" not in algorithm):
        raise YAMLFileError(
            f"{where}: `algorithm` must be one of {', '.join(known)}, or 'module.path:Class' of your own, got "
            f"{algorithm!r}{nearest(str(algorithm), known) or '.'}"
        )
    if algorithm not in others:
        with naming_place(where):
            find_algorithm(algorithm)


_LoraValues = dataclasses.make_dataclass(
    "_LoraValues",
    [
        ("r", int, 8),
        ("lora_alpha", float, 8.0),
        ("lora_dropout", float, 0.0),
        *((one.name, bool, one.default) for one in dataclasses.fields(LoraConfig) if one.type in (bool, "bool")),
    ],
)
"""Fields of ``LoraConfig`` that are numbers or booleans; the types parse them."""
_LORA_RULES = (
    Rule(("r",), lambda _, r: r <= 2**16, "{name} must be at most 65536, got {value!r}: no weight has a higher rank."),
    in_unit_interval("lora_dropout"),
)


def read_lora(raw: Any, where: str) -> LoraConfig | None:
    """Make LoRA settings from a mapping of ``LoraConfig``'s fields; None without one.

    Raises:
        YAMLFileError: If PEFT rejects them, or would once there is a model.
    """
    if raw is None:
        return None
    given = mapping(raw, LoraConfig.__dataclass_fields__, where)
    values = {name: value for name, value in given.items() if name in options_of(_LoraValues)}
    parsed = make_config(_LoraValues, values, None, where)
    texts = {name: getattr(parsed, name) for name, value in values.items() if isinstance(value, str)}
    with naming_place(where):
        check_rules(parsed, _LORA_RULES)
        config = LoraConfig(**{"task_type": "CAUSAL_LM", **given, **texts})
        check_one_policy(config)
        check_scales(config)
        return config


def options_of(config: type) -> set[str]:
    """Return the names that a file may set of a configuration."""
    return {f.name for f in dataclasses.fields(config) if f.init} - {"output_dir"}


def mapping(value: Any, known: Iterable[str] | None, where: str) -> dict[str, Any]:
    """Check that a value is a mapping with known keys, and return it; None becomes an empty one."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise YAMLFileError(f"{where} must be a mapping of names to values, got {value!r}.")
    if odd := [key for key in value if not isinstance(key, str)]:
        raise YAMLFileError(f"{where}: {odd[0]!r} is not a name. Put names in quotation marks.")
    if known is not None:
        names = list(known)
        for key in value:
            if key not in names:
                raise YAMLFileError(f"{where} knows no {key!r}{meant(key, names) or '.'}")
    return value
