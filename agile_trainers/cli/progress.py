"""Shows a progress bar for any ``transformers.Trainer`` instead of its log lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import PrinterCallback, Trainer, TrainerCallback

MILESTONES = 8
"""Number of lines that stay on the screen, the only output without a terminal."""


@contextmanager
def show_progress(trainer: Trainer, console: Console, title: str, metrics: Mapping[str, str]) -> Iterator[None]:
    """Show a bar while the trainer trains.

    Args:
        trainer: The trainer, whose own log lines are switched off.
        console: Console for the bar.
        title: Text beside the bar.
        metrics: Key of the trainer's logs to the name beside the bar.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, TextColumn("{task.fields[numbers]}"), console=console, transient=True)
    callback = _Bar(progress, title, metrics)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(callback)
    try:
        with progress:
            yield
    finally:
        trainer.remove_callback(callback)


class _Bar(TrainerCallback):
    def __init__(self, progress: Progress, title: str, metrics: Mapping[str, str]):
        self.progress = progress
        self.title = title
        self.metrics = metrics
        self.task = progress.add_task(title, total=None, numbers="")
        self.last_line = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.progress.update(self.task, total=state.max_steps, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        shown = {name: float(logs[key]) for key, name in self.metrics.items() if logs and key in logs}
        if not shown:
            return
        numbers = "  ".join(f"{name} {value:.2f}" for name, value in shown.items())
        self.progress.update(self.task, numbers=numbers)
        step, total = state.global_step, state.max_steps
        if step == total or step - self.last_line >= total / MILESTONES:
            self.last_line = step
            self.progress.console.print(f"{self.title}  {step:>{len(str(total))}}/{total}  {numbers}", highlight=False)
