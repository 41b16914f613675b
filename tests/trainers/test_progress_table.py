"""The table of a run: its rows in a terminal and a file, and what silences it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from games import make_trainer
from rich.console import Console
from transformers import (
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)  # fmt: skip

from agile_trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer, ProgressTable
from agile_trainers.monitor import health_checks
from agile_trainers.monitor.progress import row_values, short, showing

LOGS: list[dict[str, Any]] = [
    {"success": 0.25, "return/mean": -0.5, "reward": -0.5, "loss": 2e-6, "grad_norm": 1234.5, "turns/mean": 2.0},
    {"eval_success": 0.5, "eval_return": 0.75, "eval_return/mean": 8.0, "eval_other_return": 9.0, "eval_runtime": 3.0},
    {"success": 0.5, "return/mean": 0.5, "reward": 0.7, "rewards/judge/mean": 0.2, "loss": None, "kl": float("nan")},
    {"train_runtime": 3.0, "loss": 1.0},
]
TITLES = ["success", "return", "reward", "turns"]
TERMINAL: dict[str, Any] = {"force_terminal": True, "width": 80, "_environ": {"TERM": "xterm"}}


def printed(
    logs: list[dict[str, Any]], *, main: bool = True, steps: int = 10, args: dict[str, Any] | None = None,
    console: dict[str, Any] | None = None, **of_table: Any,
) -> str:  # fmt: skip
    """Return the text that a table prints in a run with one log a step."""
    screen, control = StringIO(), TrainerControl(should_log=True)
    table = ProgressTable(console=Console(file=screen, **(console or {})), **of_table)
    given = TrainingArguments(output_dir="unused", report_to="none", use_cpu=True, **(args or {}))
    state = TrainerState(max_steps=steps, is_world_process_zero=main)
    table.on_train_begin(given, state, control)
    for step, log in enumerate(logs, 1):
        state.global_step = step
        table.on_step_end(given, state, control)
        table.on_log(given, state, control, logs=log)
    table.on_train_end(given, state, control)
    return screen.getvalue().rstrip()  # older versions of rich end with an empty line


# ------------------------------------------------------------------------------------------------------------- rows


def test_rows_of_training_and_evaluation() -> None:
    lines = [line.split() for line in printed(LOGS).splitlines()]
    assert lines == [
        ["step", "time", "success", "return", "turns"],
        ["1/10", "0:00:00", "0.250", "-0.500", "2.000"],
        ["2/10", "0:00:00", "0.500", "0.750", "eval"],
        ["step", "time", "success", "return", "reward", "turns"],
        ["3/10", "0:00:00", "0.500", "0.500", "0.700"],
    ]


def test_wide_has_the_columns_of_trl_and_is_as_long_as_it_gets_in_a_file() -> None:
    ahead = {"busy/trainer": 0.4, "busy/sampler": 1.0, "busy/environments": 0.25}
    lines = printed([LOGS[0], LOGS[2] | ahead], wide=True).splitlines()
    assert [line.split()[2:] for line in lines] == [
        ["success", "return", "turns", "loss", "grad", "norm"],
        ["0.250", "-0.500", "2.000", "2.0e-06", "1234.5"],
        [*TITLES, "KL", "loss", "grad", "norm", "trainer", "busy", "sampler", "busy", "envs", "busy"],
        ["0.500", "0.500", "0.700", "nan", "0.400", "1.000", "0.250"],
    ]
    assert len(lines[-1]) > 100
    terminal = printed([LOGS[0], LOGS[2] | ahead], wide=True, console=TERMINAL, args={"disable_tqdm": True})
    assert max(map(len, terminal.splitlines())) == 79 and "norm" in terminal and "busy" not in terminal


def test_a_run_without_episodes_has_those_of_its_own() -> None:
    log = {"mean_token_accuracy": 0.9, "entropy": 1.25, "loss": 0.5, "grad_norm": 2.0, "num_tokens": 7.0}
    expected = {"entropy": 1.25, "accuracy": 0.9, "loss": 0.5, "grad norm": 2.0}
    assert row_values(log) == (expected, "")
    assert row_values({**log, "learning_rate": 0.1, "sandbox_runtime": 3.0}) == (expected, "")
    header, *rows = (line.split()[2:] for line in printed([log] * 3).splitlines())
    assert header == ["entropy", "accuracy", "loss", "grad", "norm"]
    assert rows == [["1.250", "0.900", "0.500", "2.000"]] * 3


def test_updates_that_play_nothing_show_the_episodes_of_their_batch() -> None:
    played = {"success": 0.25, "return/mean": 0.5, "turns/mean": 2.0, "entropy": 1.0, "loss": 0.1}
    trained = {"entropy": 0.5, "loss": 0.2}
    lines = [line.split()[2:] for line in printed([played, trained, {**played, "success": 0.75}, trained]).splitlines()]
    assert lines == [
        ["success", "return", "turns", "entropy"],
        ["0.250", "0.500", "2.000", "1.000"],
        ["0.250", "0.500", "2.000", "0.500"],
        ["0.750", "0.500", "2.000", "1.000"],
        ["0.750", "0.500", "2.000", "0.500"],
    ]
    (loss,) = {line.split()[-1] for line in printed([played, trained], wide=True).splitlines()[2:]}
    assert loss == "0.200"


def test_no_row_is_longer_than_the_width_and_cells_are_under_their_titles() -> None:
    """Whatever the numbers, the steps and the name of the evaluation are; a column that does not fit is left out whole."""
    names = ("success", "return/mean", "reward", "turns/mean", "completions/mean_length", "entropy", "policy_change")
    for value in (0.0, -1.5, 123456.0, -1e-9, float("inf"), -9.99e99):
        log = {**dict.fromkeys(names, value), "rewards/judge/mean": 1.0}
        evaluated = {f"eval_{'n' * 70}_{name.split('/')[0]}": value for name in names} | {
            f"eval_{'n' * 70}_runtime": 1.0
        }
        for steps in (7, 300, 10**6):
            header, row, *others = printed([log, evaluated], steps=steps).splitlines()
            assert max(map(len, [header, row, *others])) <= 80 and len(row) == len(header)
            assert others[-1].endswith(f"  eval_{'n' * 12}...")
            titles = header.split()
            assert (
                titles[2:] == ["success", "return", "reward", "turns", "length", "entropy", "change"][: len(titles) - 2]
            )
            assert len(row.split()) == len(titles) and (len(titles) == 9 or steps > 300)
            assert [header.index(title) + len(title) for title in titles] == [
                place
                for place in range(1, len(row) + 1)
                if row[place - 1] != " " and row[place : place + 1] in (" ", "")
            ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.25, "0.250"), (-0.5, "-0.500"), (0.0, "0.000"), (2e-6, "2.0e-06"), (-2e-6, "-2e-06"), (999.9996, "1000.0"),
        (-123.456, "-123.5"), (123456.4, "123456"), (-1234567.0, "-1e+06"), (float("nan"), "nan"), (5e-4, "0.001"),
    ],
)  # fmt: skip
def test_a_number_has_seven_characters_at_most(value: float, text: str) -> None:
    assert short(value) == text


def test_a_number_of_rows_is_spread_over_the_run_with_what_is_measured_seldom() -> None:
    logs = [{"return/mean": 1.0} | ({"policy_change": 0.125} if step == 7 else {}) for step in range(1, 13)]
    lines = [line.split() for line in printed(logs, steps=12, rows=4).splitlines()]
    assert [line[0] for line in lines] == ["step", "3/12", "6/12", "step", "9/12", "12/12"]
    assert [line[3:] for line in lines[-2:]] == [["0.125"], []]


def test_the_header_is_repeated() -> None:
    assert printed(LOGS[:1] * 31).count("success") == 2


# ------------------------------------------------------------------------------------------------------ who prints where


def test_the_bar_is_shown_in_a_terminal_alone_and_left_out_by_disable_tqdm() -> None:
    shown = printed(LOGS, console=TERMINAL)
    assert "training" in shown and shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor comes back
    assert "training" not in printed(LOGS, console=TERMINAL, args={"disable_tqdm": True})
    plain = printed(LOGS)
    assert "training" not in plain and plain.replace("\n", "").isprintable()


@pytest.mark.parametrize("options", [{"main": False}, {"args": {"log_level": "error"}}])
def test_other_processes_and_a_log_level_above_warnings_print_nothing(options: dict[str, Any]) -> None:
    assert printed(LOGS, console=TERMINAL, **options) == ""


def test_the_bar_is_gone_while_trl_prints_its_table() -> None:
    """TRL's console writes past the bar, whose line would be broken."""
    screen, control = StringIO(), TrainerControl()
    table = ProgressTable(console=Console(file=screen, **TERMINAL))
    args, state = TrainingArguments(output_dir="unused", report_to="none", use_cpu=True), TrainerState(max_steps=2)
    args.log_completions = True
    table.on_train_begin(args, state, control)
    table.on_log(args, state, control, logs=LOGS[0])
    shown = screen.getvalue()
    assert shown.count("\x1b[?25h") == 1 and shown.endswith("\x1b[2K")  # the line is erased
    table.on_step_begin(args, state, control)
    assert "training" in screen.getvalue()[len(shown) :]
    table.close()


def test_a_finding_is_said_below_the_row_of_its_step(tmp_path: Path) -> None:
    """The health checks look at a step before it is logged, so that its log has the findings, and warn after it."""
    screen, order = StringIO(), list[str]()
    table = ProgressTable(console=Console(file=screen))
    args = MultiTurnGRPOConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True, bf16=False)
    measurements: Any = None
    checks = health_checks.HealthChecks(args, measurements, speaks=True)
    state, handler = TrainerState(max_steps=3), logging.Handler()
    handler.emit = lambda record: order.append(f"{record.getMessage()[:21]} after {screen.getvalue().count('/3')}")  # type: ignore[method-assign]
    health_checks.logger.addHandler(handler)
    try:
        table.on_train_begin(args, state, TrainerControl())
        state.global_step = 1
        with checks.looking(1, {"stop/environment_error": [0.5]}):
            assert [finding.name for finding in checks.unwritten()] == ["environment_failing"] and not order
            table.on_log(args, state, TrainerControl(), logs=LOGS[0])
        table.close()
    finally:
        health_checks.logger.removeHandler(handler)
    assert order == ["[environment_failing] after 1"]


# -------------------------------------------------------------------------------------------------------------- trainers


class Fails(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        raise RuntimeError("the disk is gone")


def kinds(trainer: Any) -> set[type]:
    """The classes of a trainer's callbacks that show progress."""
    return {
        type(one) for one in trainer.callback_handler.callbacks if isinstance(one, ProgressCallback | PrinterCallback)
    }


@pytest.fixture
def trainer(embedded_model: Path, tmp_path: Path) -> Iterator[Any]:
    with make_trainer(embedded_model, tmp_path, max_steps=2, disable_tqdm=False, num_eval_episodes=4) as made:
        yield made


def test_a_script_prints_the_table_and_keeps_the_metrics(trainer: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Training, an evaluation alone, the loop by hand, and a run without the callback."""
    trainer.train()
    out = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert [line[0] for line in out] == ["step", "1/2", "2/2"] and out[0][2:5] == ["success", "return", "turns"]
    logged = [entry for entry in trainer.state.log_history if "return/mean" in entry]
    assert [row[3] for row in out[1:]] == [short(entry["return/mean"]) for entry in logged] and len(logged[0]) > 40
    trainer.evaluate()
    out = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert [line[0] for line in out] == ["step", "2/2"] and out[1][-1] == "eval"
    trainer.start()
    trainer.update(trainer.rollout())
    trainer.finish()
    assert [line.split()[0] for line in capfd.readouterr().out.splitlines()] == ["step", "1/2"]
    trainer.remove_callback(ProgressCallback)
    trainer.train()
    assert capfd.readouterr().out == "" and kinds(trainer) == set()


def test_who_asks_for_another_output_gets_it(embedded_model: Path, tmp_path: Path, trainer: Any) -> None:
    assert kinds(trainer) == {ProgressTable}
    own = ProgressTable(wide=True, console=Console(file=StringIO()))
    made = {
        "the lines of transformers": (make_trainer(embedded_model, tmp_path / "a"), {PrinterCallback}),
        "a table of its own": (make_trainer(embedded_model, tmp_path / "b", callbacks=[own]), {ProgressTable}),
        "TRL's trainer": (of_trl(embedded_model, tmp_path / "c"), {ProgressCallback}),
    }
    for what, (one, expected) in made.items():
        assert kinds(one) == expected, what
    with showing(trainer.callback_handler, Console(file=StringIO()), progress="dicts"):
        assert kinds(trainer) == {ProgressCallback}
    with showing(trainer.callback_handler, Console(file=StringIO()), progress="wide"):
        assert kinds(trainer) == {ProgressTable}
    assert kinds(trainer) == set()


def of_trl(model: Path, folder: Path) -> MultiTurnGRPOTrainer:
    """A trainer without an environment."""
    args = MultiTurnGRPOConfig(str(folder), use_cpu=True, bf16=False, report_to="none", per_device_train_batch_size=8)
    rows = Dataset.from_dict({"prompt": ["a", "b"]})
    return MultiTurnGRPOTrainer(str(model), lambda completions, **_: [1.0] * len(completions), args, rows)


def test_a_run_that_fails_leaves_no_bar(embedded_model: Path, tmp_path: Path) -> None:
    screen = StringIO()
    callbacks: list[TrainerCallback] = [ProgressTable(console=Console(file=screen, **TERMINAL)), Fails()]
    trainer = make_trainer(embedded_model, tmp_path, callbacks=callbacks, disable_tqdm=False)
    with pytest.raises(RuntimeError, match="disk is gone"):
        trainer.train()
    assert screen.getvalue().count("\x1b[?25h") == 1
    trainer.start()
    with pytest.raises(RuntimeError, match="disk is gone"):
        trainer.update(trainer.rollout())
    assert screen.getvalue().count("\x1b[?25h") == 2
