"""Shows the progress of any ``transformers.Trainer`` as a table or a bar instead of its log lines."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import isfinite
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback

from agile_trainers.checkpoints.model_card import measure

PROGRESS = ("table", "dicts")
"""Values of ``--progress``: our table, or the output of transformers."""
_COLUMNS = {
    "success": ("success",),
    "return": ("return/mean", "return"),
    "reward": ("reward",),
    "trainer busy": ("busy/trainer",),
    "sampler busy": ("busy/sampler",),
    "envs busy": ("busy/environments",),
    "turns": ("turns/mean",),
    "entropy": ("entropy",),
    "zero adv.": ("zero_advantage_groups",),
    "KL": ("kl",),
    "accuracy": ("mean_token_accuracy", "rewards/accuracies"),
    "margin": ("rewards/margins",),
    "loss": ("loss",),
    "grad norm": ("grad_norm",),
}
"""Title of each column of the table to its names in the logs, the most important first."""
BAR = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
"""Columns of a bar of steps or episodes."""
_HEADER_EVERY = 30
"""Number of rows after which the header is repeated."""


@contextmanager
def show_table(trainer: Trainer, console: Console, title: str = "training", rows: int | None = None) -> Iterator[None]:
    """Show a table while the trainer trains: one row per log, and a bar below if the console is a terminal.

    Only the main process prints. ``disable_tqdm`` leaves out the bar, and a ``log_level`` above warnings
    the table too.

    Args:
        trainer: The trainer. Its own bar and log lines are switched off.
        console: Console for the table.
        title: Text beside the bar.
        rows: Number of rows, of logs at equal distances. Default: one for each log.
    """
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    if not trainer.is_world_process_zero() or trainer.args.get_process_log_level() > logging.WARNING:
        yield
        return
    shown = console.is_terminal and not trainer.args.disable_tqdm
    bar = Progress(*BAR, TimeRemainingColumn(), console=console, transient=True, disable=not shown)
    table = _Table(bar, title, rows)
    trainer.add_callback(table)
    try:
        with bar:
            yield
    finally:
        trainer.remove_callback(table)


class _Table(TrainerCallback):
    def __init__(self, bar: Progress, title: str, most: int | None):
        self.bar, self.most, self.last = bar, most, 0
        self.task = bar.add_task(title, total=None)
        self.columns: list[str] = []
        self.rows = 0
        self.started = time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.started = time.monotonic()
        self.bar.update(self.task, total=state.max_steps, completed=state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.update(self.task, total=state.max_steps, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        found = _row(logs or {})
        step, total = state.global_step, state.max_steps
        if not found or (self.most is not None and step != total and step - self.last < total / self.most):
            return
        self.last = step
        if not self.columns or not set(found) <= {*self.columns, "_"} or self.rows % _HEADER_EVERY == 0:
            self.columns = [name for name in _COLUMNS if name in {*self.columns, *found}]
            self._print("step", "time", self.columns, state)
        self.rows += 1
        prefix = found.pop("_", "")
        cells = [f"{_short(found[name]) if name in found else '':>{_width(name)}}" for name in self.columns]
        self._print(
            f"{state.global_step}/{state.max_steps}", clock(time.monotonic() - self.started), cells, state, prefix
        )

    def _print(self, step: str, clock: str, cells: list[str], state: Any, prefix: str = "") -> None:
        console, width = self.bar.console, 2 * len(str(state.max_steps)) + 1
        line = f"{step:>{width}}  {clock:>7}"
        for cell, name in zip(cells, self.columns, strict=True):
            longer = f"{line}  {cell:>{_width(name)}}"
            if console.is_terminal and len(longer) + len(prefix) + 2 * bool(prefix) > console.width:
                break
            line = longer
        line += f"  {prefix}" if prefix else ""
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _row(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return title to value of one log, with the evaluation's prefix as ``"_"``; empty where there is nothing to show."""
    if "train_runtime" in logs:  # the summary at the end
        return {}
    prefixes = [key.removesuffix("_runtime") for key in logs if key.endswith("_runtime")]
    start = f"{prefixes[0]}_" if prefixes else ""
    found: dict[str, Any] = {}
    for name, keys in _COLUMNS.items():
        values = [logs[start + key] for key in keys if start + key in logs]
        if values and isinstance(values[0], int | float):
            found[name] = float(values[0])
    if "return" in found and measure([logs]) == "return":
        found.pop("reward", None)  # no reward function adds to the environment's
    return found | ({"_": prefixes[0]} if found and prefixes else {})


def _width(name: str) -> int:
    return max(len(name), 7)


def _short(value: float) -> str:
    if not isfinite(value) or value == 0 or 5e-4 <= abs(value) < 1000:
        return f"{value:.3f}"
    return f"{value:.1e}"


def clock(seconds: float) -> str:
    """Return a time as hours, minutes and seconds."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
