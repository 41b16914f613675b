"""Which rows an evaluation plays, and by which of its metrics the best checkpoint is chosen."""

from __future__ import annotations

import copy
from typing import Any

from transformers import SchedulerType

from agile_trainers.trainers.config import MultiTurnConfig

_KEPT = ("prompt", "image", "images")
"""Columns that ``remove_unused_columns`` keeps, in TRL too."""


def kept_columns(args: MultiTurnConfig, dataset: Any, name: str) -> Any:
    """A data set, or several by name, as its rows are played: with ``remove_unused_columns``, only what TRL keeps.

    Raises:
        ValueError: If nothing is left.
    """
    if not args.remove_unused_columns or dataset is None:
        return dataset
    if isinstance(dataset, dict):
        return {key: kept_columns(args, part, f"{name}[{key!r}]") for key, part in dataset.items()}
    columns = _columns(dataset)
    kept = [column for column in columns if column in _KEPT]
    if not kept:
        raise ValueError(
            f"remove_unused_columns=True leaves nothing of {name}, whose columns are {', '.join(columns)}: it keeps "
            "'prompt' only. Set remove_unused_columns=False, with which reset gets all columns."
        )
    return dataset.select_columns(kept)


def rows_of(eval_rows: Any, eval_dataset: Any) -> Any:
    """What ``evaluate(eval_dataset)`` plays: the trainer's data sets for None, one of them for its name.

    Raises:
        ValueError: If there is none of that name.
    """
    if not isinstance(eval_dataset, str):
        return eval_rows if eval_dataset is None else eval_dataset
    names = list(eval_rows) if isinstance(eval_rows, dict) else []
    if eval_dataset not in names:
        there = f"there are {', '.join(map(repr, names))}" if names else "eval_dataset is no dict of data sets"
        raise ValueError(f"eval_dataset={eval_dataset!r} is the name of no evaluation data set: {there}.")
    return eval_rows[eval_dataset]


def played_columns(args: MultiTurnConfig, train_dataset: Any, eval_dataset: Any) -> dict[str, list[str]]:
    """The columns of the data sets that a run plays, by the data set's name; no columns where it plays seeds.

    Args:
        args: Says whether it evaluates.
        train_dataset: The user's, or None.
        eval_dataset: The user's, one or several by name, or None.
    """
    played = {"train_dataset": train_dataset}
    if isinstance(eval_dataset, dict):
        played |= {f"eval_dataset[{name!r}]": part for name, part in eval_dataset.items()}
    elif eval_dataset is not None or args.eval_strategy != "no":
        played["eval_dataset"] = eval_dataset
    return {name: [] if dataset is None else _columns(dataset) for name, dataset in played.items()}


def with_best_metric(args: MultiTurnConfig, *, by_reward: bool, eval_dataset: Any) -> MultiTurnConfig:
    """``metric_for_best_model`` where it is needed and unset: the return, or the reward where reward functions add to it.

    Args:
        args: For episodes.
        by_reward: Whether there are reward functions.
        eval_dataset: Several by name have no metric in common.

    Raises:
        ValueError: If it is a loss, which no evaluation of episodes has, or if there is no default.
    """
    plateau = args.lr_scheduler_type == SchedulerType.REDUCE_ON_PLATEAU
    if not (args.load_best_model_at_end or args.save_strategy == "best" or plateau):
        return args
    metric = "reward" if by_reward else "return"
    if not args.best_metric_is_unset:
        if str(args.metric_for_best_model).endswith("loss"):
            raise ValueError(
                f"metric_for_best_model={args.metric_for_best_model!r} is no metric of episodes, whose evaluation has no "
                f"loss. Leave it unset ({metric!r}), or choose 'success' or any other that evaluate() returns."
            )
        return args
    if isinstance(eval_dataset, dict):
        names = ", ".join(repr(f"{name}_{metric}") for name in eval_dataset)
        raise ValueError(f"metric_for_best_model must say which of the data sets decides. Set it to one of {names}.")
    if args.lower_is_better_was_asked:
        raise ValueError(
            f"greater_is_better=False would choose the checkpoint with the lowest {metric}. Leave it unset, or set "
            "metric_for_best_model to what should be low."
        )
    args = copy.copy(args)
    args.metric_for_best_model, args.greater_is_better = metric, True
    if plateau:
        args.lr_scheduler_kwargs = {"mode": "max", **dict(args.lr_scheduler_kwargs or {})}
    return args


def _columns(dataset: Any) -> list[str]:
    names = getattr(dataset, "column_names", None)
    return list(names) if names is not None else list(next(iter(dataset), {}))
