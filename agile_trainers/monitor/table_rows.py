"""Makes the rows of the progress table from logs, and lays them out as lines of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from agile_trainers.checkpoints.model_card import measure

_EPISODES = {
    "success": ("success",),
    "return": ("return/mean", "return"),
    "reward": ("reward",),
    "turns": ("turns/mean",),
    "length": ("completions/mean_length",),
    "entropy": ("entropy",),
    "change": ("policy_change",),
}
"""Columns of a run that plays episodes: title to names in the logs, the most important first."""
_BATCH = ("success", "return", "reward", "turns", "length")
"""Columns that are about the episodes, the same for every update of their batch."""
_COLUMNS = _EPISODES | {
    "zero adv.": ("zero_advantage_groups",),
    "KL": ("kl",),
    "accuracy": ("mean_token_accuracy", "rewards/accuracies"),
    "margin": ("rewards/margins",),
    "loss": ("loss",),
    "grad norm": ("grad_norm",),
    "trainer busy": ("busy/trainer",),
    "sampler busy": ("busy/sampler",),
    "envs busy": ("busy/environments",),
}
"""Columns of a wide table, and of a run without episodes."""

_NAME = 20
"""Most characters of an evaluation's name that a line shows."""


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    step: int
    steps: int
    """Steps of the run; 0 for an evaluation before any."""
    seconds: float
    """Time from the begin of the run."""
    values: Mapping[str, float]
    """By title of the column."""
    name: str = ""
    """Prefix of the metrics of an evaluation; empty for training."""


def row_values(logs: Mapping[str, Any], *, wide: bool = False) -> tuple[dict[str, float], str]:
    """Return the values of a log by title of their column, and the prefix of an evaluation.

    Args:
        logs: What a trainer logs. Of the summary at the end nothing is shown.
        wide: With all columns. Otherwise an episode's log has those of ``_EPISODES``.
    """
    if "train_runtime" in logs:  # the summary at the end
        return {}, ""
    name = next((key.removesuffix("_runtime") for key in logs if key.endswith("_runtime")), "")
    if name:
        logs = {key.removeprefix(f"{name}_"): value for key, value in logs.items() if key.startswith(f"{name}_")}
    found: dict[str, float] = {}
    for title, keys in _COLUMNS.items():
        values = [logs[key] for key in keys if key in logs]
        if values and isinstance(values[0], int | float):
            found[title] = float(values[0])
    if "return" in found:
        if measure([logs]) == "return":
            found.pop("reward", None)  # no reward function adds to the environment's
        if not wide:
            found = {title: value for title, value in found.items() if title in _EPISODES}
    return found, name


def with_batch(values: dict[str, float], batch: Mapping[str, float], *, wide: bool) -> dict[str, float]:
    """Complete the values of an update that played nothing by those of its generation batch.

    Args:
        values: By title.
        batch: The values of the update before; without a return where the run plays nothing.
        wide: With all columns.
    """
    if "return" in values or "return" not in batch:
        return values
    kept = values if wide else {title: value for title, value in values.items() if title in _EPISODES}
    return {title: batch[title] for title in _BATCH if title in batch} | kept


def columns_of(rows: Sequence[Row], known: Sequence[str] = ()) -> list[str]:
    """Return the titles of the columns of some rows and those that were known before, in their order."""
    titles = {*known}.union(*(row.values for row in rows))
    return [title for title in _COLUMNS if title in titles]


def header_line(columns: Sequence[str], steps: int, width: int | None) -> str:
    """Return the header as a line of text; see :func:`row_line`."""
    return _line("step", "time", columns, columns, steps, width)


def row_line(row: Row, columns: Sequence[str], width: int | None) -> str:
    """Return a row as a line of text. The name of an evaluation follows its last value.

    Args:
        row: The row.
        columns: Titles of the columns.
        width: Characters of a line; columns that do not fit are left out, the last ones first. None: any number.
    """
    cells = [short(row.values[title]) if title in row.values else "" for title in columns]
    return _line(step_text(row), clock(row.seconds), cells, columns, row.steps, width, row.name)


def step_text(row: Row) -> str:
    """Return the step of a row, with the number of steps where it is known."""
    return f"{row.step}/{row.steps}" if row.steps else str(row.step)


def _line(
    step: str, seconds: str, cells: Sequence[str], titles: Sequence[str], steps: int, width: int | None, name: str = ""
) -> str:
    end = f"  {name if len(name) <= _NAME else f'{name[: _NAME - 3]}...'}" if name else ""
    line = shown = f"{step:>{max(4, 2 * len(str(steps)) + 1)}}  {seconds:>7}"
    for cell, title in zip(cells, titles, strict=True):
        line += f"  {cell:>{max(len(title), 7)}}"
        if width is not None and len(line) + (len(end) if cell else 0) > width:
            break
        shown = line if cell else shown
    return (shown + end)[:width]


def short(value: float) -> str:
    """Return a number with three decimals if it has room in 7 characters, else in fewer digits."""
    formats = (
        (".3f", ".1f", ".0f", ".0e") if not isfinite(value) or value == 0 or abs(value) >= 5e-4 else (".1e", ".0e")
    )
    texts = [f"{value:{form}}" for form in formats]
    return next((text for text in texts if len(text) <= 7), texts[-1])


def clock(seconds: float) -> str:
    """Return a time as hours, minutes and seconds."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
