"""Sets up a run of several environments: the mixture that draws them, and the rows of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from datasets import Dataset

from agile_trainers.config.multi_turn import MultiTurnConfig
from agile_trainers.rollout.seeds import COLUMN, Mixture

_STREAMED = 1000
"""Number of rows of a stream that are read before training."""


def names_of(environment: Any) -> list[str] | None:
    """Return the names of several environments; None for one."""
    return list(environment) if isinstance(environment, Mapping) else None


def rows_of_environment(mixture: Mixture, rows: Any, name: str, count: int) -> list[dict[str, Any]]:
    """Return the first rows of one environment, without the column that names it."""
    named = (mixture.of_row(row) for row in rows)
    return list(islice((options for chosen, options in named if chosen == name), count))


def mixture_of(args: MultiTurnConfig, environment: Any) -> Mixture | None:
    """Make the mixture of a run; None for a single environment.

    Args:
        args: The trainer's, checked for these names by ``with_environment``.
        environment: The trainer's argument.
    """
    if not isinstance(environment, Mapping):
        return None
    return Mixture(tuple(environment), args.generation_batch_size // args.num_generations)


def first_rows(
    mixture: Mixture | None, args: MultiTurnConfig, train_rows: Any, eval_rows: Any
) -> dict[str | None, dict[str, Any] | None]:
    """Return the row with which each environment is probed, None without rows, and check the rows.

    At most the first thousand rows of a stream are read; an environment without any of them is left out.

    Args:
        mixture: The run's; None for a single environment, whose name is None.
        args: The trainer's.
        train_rows: The trainer's ``train_dataset``; None without rows.
        eval_rows: Its ``eval_dataset``: one, or several by name.

    Raises:
        ValueError: If a row names no environment or an unknown one, or no row is for one of
            the environments, or evaluations would play one of them in no episode.
    """
    if mixture is None:
        return {None: None if train_rows is None else dict(next(iter(train_rows), {}))}
    if args.remove_unused_columns and (train_rows is not None or eval_rows is not None):
        raise ValueError(
            f"remove_unused_columns=True drops the column {COLUMN!r}, which says which of the environments each row is for. "
            "Set remove_unused_columns=False."
        )
    if eval_rows is None and args.eval_strategy != "no":
        mixture.evaluated(args.num_eval_episodes)
    parts = eval_rows.items() if isinstance(eval_rows, Mapping) else [(None, eval_rows)]
    found: dict[str, dict[str, Any]] = {}
    for name, rows in parts:
        if rows is not None:
            found |= _first_of_each(mixture, rows, "eval_dataset" if name is None else f"eval_dataset[{name!r}]")
    if train_rows is None:
        return dict.fromkeys(mixture.names)
    found |= _first_of_each(mixture, train_rows, "train_dataset")
    missing = [name for name in mixture.names if name not in found]
    if missing and isinstance(train_rows, Dataset):
        raise ValueError(
            f"No row of train_dataset is for the environment {missing[0]!r}, which would never be played. Add rows with "
            f"{COLUMN}={missing[0]!r}, or leave the environment out."
        )
    return {name: found[name] for name in found}


def with_column(mixture: Mixture | None, columns: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the columns that reward functions get, by data set; several environments add the column of their names."""
    own = [] if mixture is None else [COLUMN]
    return {dataset: [*names, *(name for name in own if name not in names)] for dataset, names in columns.items()}


def _first_of_each(mixture: Mixture, rows: Any, where: str) -> dict[str, dict[str, Any]]:
    """Return the first row of each environment, without the column that names it."""
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
            break  # read no more of a stream than needed
    return found
