"""Shows the progress of a population: a table of its members after each round, and a bar while they train."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_callback import CallbackHandler

from agile_trainers.monitor.progress import BAR
from agile_trainers.monitor.table_rows import clock
from agile_trainers.populations import Round
from agile_trainers.populations.lineage import with_error

REPLAYED = "done before"


class MemberProgress:
    """Shows a population on a console, for ``Population(on_trainer=...)`` and ``run(on_round=...)``.

    Args:
        console: The console. The bar is shown on a terminal alone.
        fitness: Name of the fitness, for the header.
    """

    def __init__(self, console: Console, fitness: str) -> None:
        self._console, self._fitness = console, fitness
        self.bar = Progress(*BAR, console=console, transient=True, disable=not console.is_terminal)
        """A context manager that shows the bar while the population runs."""

    def watch(self, callbacks: CallbackHandler, member: int) -> None:
        """Show the steps of a member in the bar instead of its trainer's own output."""
        callbacks.remove_callback(ProgressCallback)
        callbacks.remove_callback(PrinterCallback)
        callbacks.add_callback(_Steps(self.bar, f"member {member}"))

    def show(self, done: Round) -> None:
        """Print the table of a round, and the reasons of what was decided."""
        self._console.print(round_table(done, self._fitness))
        for line in round_reasons(done):
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class _Steps(TrainerCallback):
    def __init__(self, bar: Progress, title: str) -> None:
        self._bar = bar
        self._task = bar.add_task(title, total=None)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._bar.update(self._task, total=state.max_steps, completed=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._bar.update(self._task, visible=False)


def round_table(done: Round, fitness: str) -> Table:
    """Make the table of a round: its members, the best first, then the copies that were made.

    Args:
        done: The round.
        fitness: Name of the fitness.
    """
    title = f"round {done.number} of {done.rounds}, {done.episodes:,} episodes, {clock(done.seconds)}"
    names = list(dict.fromkeys(name for event in (*done.trained, *done.decided) for name in event.hyperparameters))
    title += f" ({REPLAYED})" if done.replayed else ""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for name in ("member", *names, "steps", fitness):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("then", no_wrap=True)
    fates = {event.member: event.event for event in done.decided if event.event != "born"}
    for event in done.trained:
        score = with_error(event.fitness, event.standard_error)
        values = [value_text(event.hyperparameters.get(name)) for name in names]
        steps = str(event.steps) if event.event == "trained" else "-"
        table.add_row(str(event.member), *values, steps, score, fates.get(event.member, ""))
    for event in done.decided:
        if event.event == "born":
            values = [value_text(event.hyperparameters.get(name)) for name in names]
            table.add_row(str(event.member), *values, str(event.steps), "", f"copy of {event.parent}")
    return table


def round_reasons(done: Round) -> list[str]:
    """Return a line for each decision that has a reason or a change, and for each member with a failure."""
    lines = []
    for event in done.trained:
        if event.failed_episodes:
            lines.append(
                f"  member {event.member}: the environment failed in {event.failed_episodes} evaluation episodes, which "
                "count against it"
            )
        if event.unreported_episodes:
            lines.append(
                f"  member {event.member}: {event.unreported_episodes} evaluation episodes report no success, and count as "
                "unsuccessful"
            )
    for event in (*(one for one in done.trained if one.event == "failed"), *done.decided):
        moved = ", ".join(f"{name} {value_text(a)} to {value_text(b)}" for name, (a, b) in event.changes.items())
        parts = [part for part in (moved, *event.reason.splitlines()[:1]) if part]
        what = f"copy of {event.parent}" if event.event == "born" else event.event
        if parts:
            lines.append(f"  member {event.member}, {what}: {'; '.join(parts)}")
    return lines


def value_text(value: float | None) -> str:
    """Return a hyperparameter's value in three digits."""
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.3g}"
