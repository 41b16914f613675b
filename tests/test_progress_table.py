"""The table of a training command: its rows, on a terminal and in a file, and the options that silence it."""

from __future__ import annotations

import logging
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from transformers import PrinterCallback, ProgressCallback

from agile_trainers.monitor.progress import show_table

LOGS: list[dict[str, Any]] = [
    {"success": 0.25, "return/mean": -0.5, "reward": -0.5, "loss": 2e-6, "grad_norm": 1234.5, "turns/mean": 2.0},
    {"eval_success": 0.5, "eval_return": 0.75, "eval_other_return": 9.0, "eval_runtime": 3.0},
    {"success": 0.5, "return/mean": 0.5, "reward": 0.7, "rewards/judge/mean": 0.2, "loss": None, "kl": float("nan")},
    {"train_runtime": 3.0, "loss": 1.0},
]


class Trainer:
    """The part of ``Trainer`` that the table uses."""

    def __init__(self, *, main: bool = True, level: int = logging.WARNING, disable_tqdm: bool = False) -> None:
        self.args = SimpleNamespace(disable_tqdm=disable_tqdm, get_process_log_level=lambda: level)
        self.main = main
        self.callbacks: list[Any] = [ProgressCallback(), PrinterCallback()]

    def is_world_process_zero(self) -> bool:
        return self.main

    def remove_callback(self, which: Any) -> None:
        self.callbacks = [one for one in self.callbacks if one is not which and type(one) is not which]

    def add_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)


def printed(trainer: Any, logs: list[dict[str, Any]], **of_console: Any) -> str:
    screen = StringIO()
    with show_table(trainer, Console(file=screen, **of_console)):
        state = SimpleNamespace(global_step=0, max_steps=10)
        for callback in trainer.callbacks:
            callback.on_train_begin(None, state, None)
        for step, log in enumerate(logs, 1):
            state.global_step = step
            for callback in trainer.callbacks:
                callback.on_step_end(None, state, None)
                callback.on_log(None, state, None, logs=log)
    assert not trainer.callbacks
    return screen.getvalue().rstrip()  # older versions of rich end with an empty line


def test_rows_of_training_and_evaluation() -> None:
    lines = [line.split() for line in printed(Trainer(), LOGS).splitlines()]
    assert lines == [
        ["step", "time", "success", "return", "turns", "loss", "grad", "norm"],
        ["1/10", "0:00:00", "0.250", "-0.500", "2.000", "2.0e-06", "1.2e+03"],
        ["2/10", "0:00:00", "0.500", "0.750", "eval"],
        ["step", "time", "success", "return", "reward", "turns", "KL", "loss", "grad", "norm"],
        ["3/10", "0:00:00", "0.500", "0.500", "0.700", "nan"],
    ]


def test_who_was_busy_is_shown_where_batches_are_played_ahead() -> None:
    log = {"success": 0.5, "busy/trainer": 0.4, "busy/sampler": 1.0, "busy/environments": 0.25, "turns/mean": 2.0}
    title, row = printed(Trainer(), [log]).splitlines()
    assert title.split()[3:] == ["trainer", "busy", "sampler", "busy", "envs", "busy", "turns"]
    assert row.split()[2:] == ["0.500", "0.400", "1.000", "0.250", "2.000"]


def test_columns_are_under_their_titles_and_fit_the_terminal() -> None:
    header, first, *_ = printed(Trainer(), LOGS).splitlines()
    assert header.index("loss") + 4 == first.index("2.0e-06") + 7 and len(header) == len(first)
    terminal = printed(Trainer(disable_tqdm=True), LOGS, force_terminal=True, width=40, _environ={"TERM": "xterm"})
    assert max(map(len, terminal.splitlines())) <= 40 and "success   return" in terminal and "loss" not in terminal


def test_the_bar_is_shown_on_a_terminal_alone_and_left_out_by_disable_tqdm() -> None:
    terminal = {"force_terminal": True, "width": 80, "_environ": {"TERM": "xterm"}}
    assert "training" in printed(Trainer(), LOGS, **terminal)
    assert "training" not in printed(Trainer(disable_tqdm=True), LOGS, **terminal)
    assert "training" not in printed(Trainer(), LOGS)


@pytest.mark.parametrize("options", [{"main": False}, {"level": logging.ERROR}])
def test_other_processes_and_a_log_level_above_warnings_print_nothing(options: dict[str, Any]) -> None:
    assert printed(Trainer(**options), LOGS, force_terminal=True) == ""


def test_the_header_is_repeated() -> None:
    assert printed(Trainer(), LOGS[:1] * 31).count("success") == 2


def test_a_number_of_rows_is_spread_over_the_run() -> None:
    screen, trainer = StringIO(), Trainer()
    with show_table(trainer, Console(file=screen), rows=4):  # type: ignore[arg-type]
        (table,) = trainer.callbacks
        for step in range(1, 13):
            table.on_log(None, SimpleNamespace(global_step=step, max_steps=12), None, logs={"loss": 1.0})
    steps = [line.split()[0] for line in screen.getvalue().rstrip().splitlines()]
    assert steps == ["step", "3/12", "6/12", "9/12", "12/12"]
