"""Shows the table of a run in the cell of a notebook, updated in place, with its learning curve."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from html import escape
from typing import Any

from agile_trainers.checkpoints.model_card import draw_curve, panels
from agile_trainers.monitor.table_rows import Row, clock, columns_of, header_line, row_line, short, step_text

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
