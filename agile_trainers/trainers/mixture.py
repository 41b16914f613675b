"""Several environments in one run, at construction: their factories, what draws them, and the rows that are for each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from datasets import Dataset

from agile_trainers.envs.base import EnvironmentFactory
from agile_trainers.envs.registry import make_environment_factory
from agile_trainers.rollout.engine import EpisodeSpec
from agile_trainers.rollout.mixture import COLUMN, Mixture
from agile_trainers.trainers.config import MultiTurnConfig

_STREAMED = 1000
"""Rows of a stream that are looked at before training."""
_NAME = re.compile(r"\w[\w.-]*")


def environment_factories(
    environment: Any, arguments: Mapping[str, Any] | None = None
) -> dict[str, EnvironmentFactory]:
    """The factories of a run of several environments, by name.

    Args:
        environment: Ids or factories by name.
        arguments: Keyword arguments of each, by name.

    Raises:
        ValueError: For no environment, a name that cannot be part of a metric's, or what cannot be made.
        ImportError: If a library that one of them needs is missing.
    """
    arguments = arguments or {}
    if not environment:
        raise ValueError("environment is an empty mapping. Name at least one environment, or pass an id or a factory.")
    for name in environment:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"environment: the name {name!r} becomes part of metrics' names. Expected letters, digits and any of "
                "`_.-`, a letter or digit first."
            )
    unknown = [name for name in arguments if name not in environment]
    if unknown:
        raise ValueError(
            f"environment_args names {unknown[0]!r}, which is none of the environments {', '.join(environment)}. With "
            "several environments it gives the arguments of each by its name."
        )
    factories = {}
    for name, one in environment.items():
        given = arguments.get(name) or {}
        if not isinstance(given, Mapping):
            raise ValueError(f"environment_args[{name!r}] must be a mapping of names to values, got {given!r}.")
        try:
            factories[name] = make_environment_factory(one, **given)
        except (ValueError, ImportError) as error:
            raise type(error)(f"environment {name!r}: {error}") from error
    return factories


def made_of(
    environment: Any, arguments: Mapping[str, Any] | None = None
) -> EnvironmentFactory | dict[str, EnvironmentFactory]:
    """What makes the environments of a trainer's ``environment``: one factory, or several by name.

    Args:
        environment: An id or factory, or several by name.
        arguments: Keyword arguments of the environment; of several, those of each by its name.

    Raises:
        ValueError: If one of them cannot be made.
        ImportError: If a library that one of them needs is missing.
    """
    if isinstance(environment, Mapping):
        return environment_factories(environment, arguments)
    return make_environment_factory(environment, **(arguments or {}))


def names_of(environment: Any) -> list[str] | None:
    """The names of several environments; None for one."""
    return list(environment) if isinstance(environment, Mapping) else None


def rows_of_environment(mixture: Mixture, rows: Any, name: str, count: int) -> list[dict[str, Any]]:
    """The first rows that are for one environment, without the column that says so."""
    named = (mixture.of_row(row) for row in rows)
    return list(islice((options for chosen, options in named if chosen == name), count))


def mixture_of(args: MultiTurnConfig, environment: Any) -> Mixture | None:
    """The mixture of a run; None for a single environment.

    Args:
        args: The trainer's, checked for these names by ``with_environment``.
        environment: The trainer's argument.
    """
    if not isinstance(environment, Mapping):
        return None
    weights = args.environment_weights or dict.fromkeys(environment, 1.0)
    assert isinstance(weights, dict)
    groups = args.generation_batch_size // args.num_generations
    return Mixture(tuple(environment), tuple(float(weights[name]) for name in environment), groups)


def first_rows(
    mixture: Mixture | None, args: MultiTurnConfig, train_rows: Any, eval_rows: Any
) -> dict[str | None, dict[str, Any] | None]:
    """The row that each environment is probed with, None without rows; the rows are checked on the way.

    Of a stream no more than the first thousand rows are read; an environment that none of them is for is left out.

    Args:
        mixture: The run's; None for a single environment, whose name is None.
        args: The trainer's.
        train_rows: The trainer's ``train_dataset``; None without rows.
        eval_rows: Its ``eval_dataset``: one, or several by name.

    Raises:
        ValueError: If weights were given beside rows, a row names no environment or an unknown one, or no row is for one of
            the environments.
    """
    if mixture is None:
        return {None: None if train_rows is None else dict(next(iter(train_rows), {}))}
    if args.remove_unused_columns and (train_rows is not None or eval_rows is not None):
        raise ValueError(
            f"remove_unused_columns=True drops the column {COLUMN!r}, which says which of the environments each row is for. "
            "Set remove_unused_columns=False."
        )
    parts = eval_rows.items() if isinstance(eval_rows, Mapping) else [(None, eval_rows)]
    found: dict[str, dict[str, Any]] = {}
    for name, rows in parts:
        if rows is not None:
            found |= _first_of_each(mixture, rows, "eval_dataset" if name is None else f"eval_dataset[{name!r}]")
    if train_rows is None:
        return dict.fromkeys(mixture.names)
    if args.environment_weights is not None:
        raise ValueError(
            f"environment_weights={args.environment_weights} has no effect with a train_dataset, whose column {COLUMN!r} "
            "says how often each environment is played. Leave environment_weights unset."
        )
    found |= _first_of_each(mixture, train_rows, "train_dataset")
    missing = [name for name in mixture.names if name not in found]
    if missing and isinstance(train_rows, Dataset):
        raise ValueError(
            f"No row of train_dataset is for the environment {missing[0]!r}, which would never be played. Add rows with "
            f"{COLUMN}={missing[0]!r}, or leave the environment out."
        )
    return {name: found[name] for name in found}


def with_column(mixture: Mixture | None, columns: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """What reward functions get of each data set, by its name: its columns and, of several environments, their column."""
    own = [] if mixture is None else [COLUMN]
    return {dataset: [*names, *(name for name in own if name not in names)] for dataset, names in columns.items()}


def with_names(rows: Sequence[Mapping[str, Any]], specs: Sequence[EpisodeSpec]) -> list[dict[str, Any]]:
    """The rows as reward functions get them: of several environments, with the column that names each episode's own."""
    return [
        dict(row) if spec.environment is None else {**row, COLUMN: spec.environment}
        for row, spec in zip(rows, specs, strict=True)
    ]


def _first_of_each(mixture: Mixture, rows: Any, where: str) -> dict[str, dict[str, Any]]:
    """The first row of each environment, without the column that names it."""
    found: dict[str, dict[str, Any]] = {}
    chosen: Iterable[Any]
    if isinstance(rows, Dataset) and COLUMN in rows.column_names:
        # Every name is checked, but only one row of each is read.
        names = rows.with_format(None)[COLUMN][:]
        chosen = [rows[index] for index in {name: index for index, name in reversed(list(enumerate(names)))}.values()]
    else:
        chosen = islice(rows, _STREAMED)
    for row in chosen:
        name, options = mixture.of_row(row, where)
        found.setdefault(name, options)
        if len(found) == len(mixture.names) and not isinstance(rows, Dataset):
            break  # no more of a stream is read than it takes
    return found
