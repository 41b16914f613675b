"""Shows the progress of any ``transformers.Trainer`` as a compact table, in a terminal or as plain lines."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PrinterCallback, ProgressCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import CallbackHandler

from agile_trainers.checkpoints.model_card import measure

_EPISODES = {
    "success": ("success",),
    "return": ("return", "return/mean"),  # an evaluation's own counts failed episodes
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
    ended = (key.removesuffix("_runtime") for key in logs if key.endswith("_runtime"))
    name = "" if "learning_rate" in logs else next(ended, "")  # an update has metrics of any name
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


def row_line(row: Row, columns: Sequence[str], width: int | None) -> str:
    """Return a row as a line of text. The name of an evaluation follows its last value.

    Args:
        row: The row.
        columns: Titles of the columns.
        width: Characters of a line; columns that do not fit are left out, the last ones first. None: any number.
    """
    step = f"{row.step}/{row.steps}" if row.steps else str(row.step)
    cells = [short(row.values[title]) if title in row.values else "" for title in columns]
    return _line(step, clock(row.seconds), cells, columns, row.steps, width, row.name)


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


PROGRESS = ("table", "wide", "dicts")
"""Values of ``--progress``: our table, the same with all columns, or the output of transformers."""
BAR = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
"""Columns of a bar of steps or episodes."""
_HEADER_EVERY = 30
"""Number of rows after which the header is repeated."""


class ProgressTable(ProgressCallback):
    """Shows one row per log: success, return, turns, length, entropy and change of the policy.

    A trainer with an environment has one in place of transformers' bar, unless ``disable_tqdm=True``. In a terminal there is
    a bar below the rows. Anywhere else rows are plain lines. Only the main process prints; with a ``log_level`` above
    warnings none does.
    ``trainer.remove_callback(ProgressCallback)`` removes it as it removes that of transformers.

    Args:
        wide: Show TRL's columns too: KL, loss, norm of the gradient, and so on.
        rows: Number of rows, of logs at equal distances. Default: one for each log.
        title: Text beside the bar.
        console: Where to print. Default: standard output.
    """

    def __init__(
        self, *, wide: bool = False, rows: int | None = None, title: str = "training", console: Console | None = None
    ) -> None:
        super().__init__()
        self._wide, self._most, self._title, self._console = wide, rows, title, console
        self._view: _Lines | None = None
        self._started, self._last = time.monotonic(), 0
        self._measured: dict[str, float] = {}
        self._batch: dict[str, float] = {}

    def close(self) -> None:
        """End the output of a run that is over or was interrupted."""
        if self._view is not None:
            self._view.end()
        self._view = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.close()
        self._started, self._last, self._measured, self._batch = time.monotonic(), state.global_step, {}, {}
        self._view = self._open(args, state)
        if self._view is not None:
            self._view.begin(state)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._view is not None:
            self._view.step(state)

    on_step_end = on_step_begin

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        values, name = row_values(logs or {}, wide=self._wide)
        if values and not name:
            values = with_batch(values, self._batch, wide=self._wide)
            self._batch = {**values}
        view, outside = self._view, self._view is None
        if outside and name:
            view = self._open(args, state)
        if view is not None and values and self._is_due(state, values, outside):
            seconds = (logs or {})[f"{name}_runtime"] if outside else time.monotonic() - self._started
            view.add(Row(state.global_step, state.max_steps, seconds, values, name))
        if view is not None and outside:
            view.end()
        elif view is not None and getattr(args, "log_completions", False):
            view.pause()  # TRL prints its table next, with a console of its own

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.close()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Show nothing; an evaluation is a row."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Show nothing; the log of the evaluation was shown."""

    def on_predict(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Show nothing."""

    def _open(self, args: Any, state: Any) -> _Lines | None:
        if not state.is_world_process_zero or args.get_process_log_level() > logging.WARNING:
            return None
        # In a notebook, rich would make a page of each line.
        return _Lines(
            self._console or Console(force_jupyter=False), self._title, wide=self._wide, bar=not args.disable_tqdm
        )

    def _is_due(self, state: Any, values: dict[str, float], outside: bool) -> bool:
        """Return whether the row is one of those that are shown, and add what is measured seldom and was not shown."""
        if outside or self._most is None:
            return True
        step, total = state.global_step, state.max_steps
        self._measured |= {name: values[name] for name in ("change",) if name in values}
        if step != total and step - self._last < total / self._most:
            return False
        values |= self._measured
        self._last, self._measured = step, {}
        return True


class _Lines:
    """Prints rows as lines, with a bar below them in a terminal."""

    def __init__(self, console: Console, title: str, *, wide: bool, bar: bool) -> None:
        self._console, self._title, self._columns, self._rows = console, title, list[str](), 0
        self._width = None if wide and not console.is_terminal else console.width
        self._bar: Progress | None = None
        self._has_bar = bar and console.is_terminal

    def begin(self, state: Any) -> None:
        """Show that a run begins, with the ``TrainerState`` of a trainer."""
        if self._has_bar:
            self._bar = Progress(*BAR, TimeRemainingColumn(), console=self._console, transient=True)
            self._bar.add_task(self._title, total=state.max_steps, completed=state.global_step)
            self._bar.start()
            self._stop = weakref.finalize(self, self._bar.stop)  # a bar that is left hides the cursor

    def step(self, state: Any) -> None:
        """Show that an optimizer step begins or is done."""
        if self._bar is not None:
            self._bar.start()
            self._bar.update(self._bar.task_ids[0], total=state.max_steps, completed=state.global_step)

    def pause(self) -> None:
        """Make room for what others print, until the next step begins."""
        if self._bar is not None:
            self._bar.stop()

    def add(self, row: Row) -> None:
        """Show a row; in one write with its header, after which a reader may leave (``| head -1``)."""
        lines: list[str] = []
        if not self._columns or not set(row.values) <= set(self._columns) or self._rows % _HEADER_EVERY == 0:
            self._columns = [title for title in _COLUMNS if title in self._columns or title in row.values]
            lines.append(_line("step", "time", self._columns, self._columns, row.steps, self._width))
        self._rows += 1
        lines.append(row_line(row, self._columns, self._width))
        self._console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)

    def end(self) -> None:
        """Leave what was shown as it is to stay. Called again, it does nothing."""
        if self._bar is not None:
            self._stop()
        self._bar = None


@contextmanager
def showing(
    callbacks: CallbackHandler,
    console: Console,
    title: str = "training",
    *,
    progress: str = "table",
    rows: int | None = None,
) -> Iterator[None]:
    """Show the progress of a trainer of any kind while it trains.

    Args:
        callbacks: The trainer's. Its own bar and log lines are switched off.
        console: Console for the table.
        title: Text beside the bar.
        progress: One of ``PROGRESS``. ``"dicts"`` leaves the output that transformers gives it.
        rows: Number of rows, of logs at equal distances. Default: one for each log.
    """
    if progress == "dicts":
        use_dicts(callbacks)
        yield
        return
    callbacks.remove_callback(ProgressCallback)
    callbacks.remove_callback(PrinterCallback)
    table = ProgressTable(wide=progress == "wide", rows=rows, title=title, console=console)
    callbacks.add_callback(table)
    try:
        yield
    finally:
        callbacks.remove_callback(table)
        table.close()


def use_table(callbacks: CallbackHandler, *, disable_tqdm: bool) -> None:
    """Give a trainer the table in place of the bar that transformers gave it, or of any output if it brings a table.

    Args:
        callbacks: The trainer's.
        disable_tqdm: The trainer's option, with which it keeps its log lines.
    """
    own = any(isinstance(callback, ProgressTable) for callback in callbacks.callbacks)
    default = PrinterCallback if disable_tqdm else DEFAULT_PROGRESS_CALLBACK
    # The last one is that of `Trainer`; one before it was passed as an argument.
    theirs = [callback for callback in callbacks.callbacks if type(callback) is default][-1:]
    if theirs and (own or not disable_tqdm):
        callbacks.remove_callback(theirs[0])
        if not own:
            callbacks.add_callback(ProgressTable())


def use_dicts(callbacks: CallbackHandler) -> None:
    """Give a trainer the output of transformers back, a bar and every metric of a log in one line."""
    if callbacks.pop_callback(ProgressTable) is not None:
        callbacks.add_callback(DEFAULT_PROGRESS_CALLBACK)


def close_tables(callbacks: CallbackHandler) -> None:
    """End the output of a trainer whose run is over, was interrupted or failed."""
    for callback in callbacks.callbacks:
        if isinstance(callback, ProgressTable):
            callback.close()
