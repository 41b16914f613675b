"""Shows the progress of any ``transformers.Trainer`` as a compact table: in a terminal, a file of lines or a notebook."""

from __future__ import annotations

import base64
import importlib.util
import logging
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PrinterCallback, ProgressCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import CallbackHandler
from transformers.utils import is_in_notebook

from agile_trainers.checkpoints.model_card import draw_curve, panels
from agile_trainers.monitor.table_rows import (
    Row,
    clock,
    columns_of,
    header_line,
    row_line,
    row_values,
    short,
    step_text,
    with_batch,
)

PROGRESS = ("table", "wide", "dicts")
"""Values of ``--progress``: our table, the same with all columns, or the output of transformers."""
BAR = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
"""Columns of a bar of steps or episodes."""
_HEADER_EVERY = 30
"""Number of rows after which the header is repeated."""


class View(Protocol):
    """Shows the rows of a run."""

    def begin(self, state: Any) -> None:
        """Show that a run begins, with the ``TrainerState`` of a trainer."""

    def step(self, state: Any) -> None:
        """Show that an optimizer step begins or is done."""

    def pause(self) -> None:
        """Make room for what others print, until the next step begins."""

    def add(self, row: Row, state: Any) -> None:
        """Show a row."""

    def end(self) -> None:
        """Leave what was shown as it is to stay. Called again, it does nothing."""


class ProgressTable(ProgressCallback):
    """Shows one row per log: success, return, turns, length, entropy and change of the policy.

    A trainer with an environment has one in place of transformers' bar, unless ``disable_tqdm=True``. In a terminal there is
    a bar below the rows. In a notebook the table is updated in place, with the learning curve below it. Anywhere else rows
    are plain lines. Only the main process prints; with a ``log_level`` above warnings none does.
    ``trainer.remove_callback(ProgressCallback)`` removes it as it removes that of transformers.

    Args:
        wide: Show TRL's columns too: KL, loss, norm of the gradient, and so on.
        rows: Number of rows, of logs at equal distances. Default: one for each log.
        title: Text beside the bar.
        console: Where to print, as text. Default: standard output, or the cell of a notebook.
    """

    def __init__(
        self, *, wide: bool = False, rows: int | None = None, title: str = "training", console: Console | None = None
    ) -> None:
        super().__init__()
        self._wide, self._most, self._title, self._console = wide, rows, title, console
        self._view: View | None = None
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

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._view is not None:
            self._view.step(state)

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
            view.add(Row(state.global_step, state.max_steps, seconds, values, name), state)
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

    def _open(self, args: Any, state: Any) -> View | None:
        if not state.is_world_process_zero or args.get_process_log_level() > logging.WARNING:
            return None
        if self._console is None and is_in_notebook() and importlib.util.find_spec("IPython"):
            return LiveTable(self._title)
        return _Lines(self._console or Console(), self._title, wide=self._wide, bar=not args.disable_tqdm)

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
        if self._has_bar:
            self._bar = Progress(*BAR, TimeRemainingColumn(), console=self._console, transient=True)
            self._bar.add_task(self._title, total=state.max_steps, completed=state.global_step)
            self._bar.start()
            self._stop = weakref.finalize(self, self._bar.stop)  # a bar that is left hides the cursor

    def step(self, state: Any) -> None:
        if self._bar is not None:
            self._bar.start()
            self._bar.update(self._bar.task_ids[0], total=state.max_steps, completed=state.global_step)

    def pause(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def add(self, row: Row, state: Any) -> None:
        if not self._columns or not set(row.values) <= set(self._columns) or self._rows % _HEADER_EVERY == 0:
            self._columns = columns_of([row], self._columns)
            self._print(header_line(self._columns, row.steps, self._width))
        self._rows += 1
        self._print(row_line(row, self._columns, self._width))

    def end(self) -> None:
        if self._bar is not None:
            self._stop()
        self._bar = None

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


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


# -------------------------------------------------------------------------------------------------------- in a notebook


ROWS = 20
"""Largest number of rows that are shown, at equal distances over the run."""
_SHARE = 1 / 20
"""Largest share of a run's time that the display takes."""
_SECONDS = 0.5
"""Shortest time from one update of the display to the next."""


class LiveTable:
    """A table in the output of a notebook's cell.

    Args:
        title: Text above the table.
    """

    def __init__(self, title: str) -> None:
        self._title, self._rows = title, list[Row]()
        self._handle: Any = None
        self._started, self._next = time.monotonic(), 0.0
        self._state: Any = None
        self._is_run = False

    def begin(self, state: Any) -> None:
        """Show that a run begins."""
        self._is_run = True
        self._show(state)

    def step(self, state: Any) -> None:
        """Show that an optimizer step is done, unless the display was updated a moment ago."""
        self._show(state)

    def pause(self) -> None:
        """Keep the table, since others print beside it."""

    def add(self, row: Row, state: Any) -> None:
        """Show a row, now or with the next update of the display."""
        self._rows.append(row)
        self._show(state)

    def end(self) -> None:
        """Show everything that was not shown yet."""
        if self._state is not None:
            self._next = 0.0
            self._show(self._state, over=True)
        self._state = None

    def _show(self, state: Any, *, over: bool = False) -> None:
        from IPython.display import display

        self._state = state
        begun = time.monotonic()
        if begun < self._next:
            return
        heading = run_heading(self._title, state.global_step, state.max_steps, begun - self._started, over=over)
        # A curve of one evaluation is a point.
        shown = panels(state.log_history) if self._is_run else []
        picture = draw_curve(shown) if any(len(panel.training) > 1 for panel in shown) else None
        content = {
            "text/html": page(heading if self._is_run else "", self._rows, picture),
            "text/plain": plain_table(self._rows) or self._title,
        }
        if self._handle is None:
            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)
        now = time.monotonic()
        self._next = now + max(_SECONDS, (now - begun) / _SHARE)


def run_heading(title: str, step: int, steps: int, seconds: float, *, over: bool) -> str:
    """Return the line above the table as HTML: a bar, the steps done, and the time since the run began.

    Args:
        title: Its first words.
        step: Optimizer steps done.
        steps: Optimizer steps of the run.
        seconds: Time since the run began.
        over: Without the bar, since the run is over or was interrupted.
    """
    bar = f'<progress value="{step}" max="{steps}" style="vertical-align:middle"></progress> '
    return f"{escape(title)}: {'' if over else bar}{step} of {steps} steps, {clock(seconds)}"


def shown_rows(rows: Sequence[Row], most: int = ROWS) -> list[Row]:
    """Return at most ``most`` rows at equal distances, the first and the last among them."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(place * (len(rows) - 1) / (most - 1))] for place in range(most)]


def table_html(rows: Sequence[Row]) -> str:
    """Return the table of some rows as HTML; empty without rows."""
    if not rows:
        return ""
    columns, shown = columns_of(rows), shown_rows(rows)
    cell = "padding:1px 10px;text-align:right"
    named = any(row.name for row in shown)

    def line(kind: str, texts: Sequence[str]) -> str:
        cells = [f'<{kind} style="{cell}">{escape(text)}</{kind}>' for text in texts]
        return f"<tr>{''.join(cells)}</tr>"

    lines = [line("th", ["step", "time", *columns, *([""] if named else [])])]
    for row in shown:
        values = [short(row.values[title]) if title in row.values else "" for title in columns]
        lines.append(line("td", [step_text(row), clock(row.seconds), *values, *([row.name] if named else [])]))
    table = f'<table style="border-collapse:collapse;font-variant-numeric:tabular-nums">{"".join(lines)}</table>'
    if len(shown) < len(rows):
        table += f"<div>{len(shown)} of {len(rows)} rows; trainer.state.log_history has all of them</div>"
    return table


def plain_table(rows: Sequence[Row]) -> str:
    """Return the same table as lines of text, for a program that shows no HTML."""
    columns = columns_of(rows)
    lines = [row_line(row, columns, 80) for row in shown_rows(rows)]
    return "\n".join([header_line(columns, rows[-1].steps, 80), *lines]) if rows else ""


def page(heading: str, rows: Sequence[Row], picture: bytes | None) -> str:
    """Return what a cell shows as HTML: heading, table, and the learning curve as a PNG inside the page."""
    parts = [f"<div>{heading}</div>" if heading else "", table_html(rows)]
    if picture is not None:
        data = base64.b64encode(picture).decode("ascii")
        parts.append(
            f'<img alt="learning curve" style="width:720px;max-width:100%" src="data:image/png;base64,{data}">'
        )
    return f"<div>{''.join(parts)}</div>"
