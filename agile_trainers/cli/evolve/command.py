"""``agile-trainers evolve population.yaml``: trains a population and selects among its members; resumes when run again."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_callback import CallbackHandler

from agile_trainers.cli.errors import mistakes_of_options
from agile_trainers.cli.evolve.plan import PopulationFile, PopulationPlan, read_population
from agile_trainers.cli.train import Started
from agile_trainers.monitor.progress import BAR, clock, use_dicts
from agile_trainers.populations import Lineage, Population, PopulationError, Processes, Round, split_processes
from agile_trainers.populations.lineage import FILE, with_error

WINNER = "winner"
"""Folder of the best member's policy."""


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of ``agile-trainers evolve``."""
    parser = argparse.ArgumentParser(
        prog="agile-trainers evolve",
        description="Trains a population: members with hyperparameters of their own on one frozen base, which are evaluated "
        "after each round and selected, copied and mutated. Run again, it goes on where it was left. docs/populations.md "
        "describes the file.",
    )
    parser.add_argument("population", type=Path, help="the YAML file")
    parser.add_argument("--dry-run", action="store_true", help="check the file and show the plan; train nothing")
    parser.add_argument("--progress", choices=("table", "dicts"), default="table", help="output while training: a table of "
                        "the members after each round, or every metric of a log, as transformers prints it")  # fmt: skip
    return parser


def main(argv: Sequence[str]) -> None:
    """Parse the options and run the population.

    Args:
        argv: The options.

    Raises:
        YAMLFileError: If the file cannot be run.
        SystemExit: With code 2, if its folder holds another population, or all members failed.
    """
    parser = make_parser()
    options = parser.parse_args(argv)
    processes = split_processes()
    console = Console(quiet=not processes.is_main)
    file = read_population(options.population)
    if options.dry_run:
        _show_plan(file, console)
        return
    with mistakes_of_options(parser, PopulationError):
        folder, population = run_plan(
            file.plan, file.model, file.environment, file.plan.lora, console,
            table=options.progress == "table", processes=processes,
        )  # fmt: skip
    if processes.is_main:
        _show_winner(population.lineage, folder, file, console)


def run_plan(
    plan: PopulationPlan,
    model: str,
    environment: Any,
    lora: Any,
    console: Console,
    *,
    table: bool = True,
    processes: Processes | None = None,
    winner: Path | None = None,
) -> tuple[Path, Population]:
    """Train a population and copy its winner to a folder.

    Args:
        plan: The population.
        model: The model or adapter that members start from.
        environment: Its factory, or several by name.
        lora: Settings of the members' adapters; None if ``model`` is an adapter.
        console: Console for the output.
        table: Show a table of the members after each round instead of the output of transformers.
        processes: See ``Population``.
        winner: Folder of the winner's policy. Default: ``winner`` in the population's.

    Returns:
        The winner's folder, and the population.
    """
    processes = processes or Processes()
    fitness = plan.search["fitness"]
    progress = MemberProgress(console, fitness if isinstance(fitness, str) else "fitness")

    def on_trainer(trainer: Any, member: int) -> None:
        trainer.add_callback(Started())
        if table:
            progress.watch(trainer.callback_handler, member)
        else:
            use_dicts(trainer.callback_handler)

    population = plan.make(model, environment, lora, on_trainer=on_trainer, processes=processes)
    with progress.bar if table else nullcontext():
        population.run(progress.show if table else None)
    folder = winner or population.output_dir / WINNER
    if processes.is_main:
        _export(population, folder)
    return folder, population


def _export(population: Population, folder: Path) -> None:
    """Copy the winner's policy to a folder, whole or not at all; an earlier one is replaced."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    made = population.export(partial / folder.name)  # the card has the folder's name
    if folder.exists():
        shutil.rmtree(folder)
    made.rename(folder)
    partial.rmdir()


def _show_plan(file: PopulationFile, console: Console) -> None:
    plan = file.plan
    settings = plan.make(file.model, file.environment, plan.lora, load=False).lineage.settings
    console.print(
        f"{settings['members']} members of {plan.algorithm} on {file.model}, strategy {settings['strategy']['name']}, "
        f"rounds end at steps {', '.join(map(str, settings['rounds']))}.",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
    for name, one in plan.hyperparameters.items():
        scale = ", drawn on a logarithmic scale" if one.log else ""
        console.print(f"  {name} from {value_text(one.low)} to {value_text(one.high)}{scale}", highlight=False)
    folder = Path(plan.config.output_dir)
    if not (folder / FILE).is_file():
        console.print(f"{folder}: not begun", markup=False, highlight=False, soft_wrap=True)
        return
    lineage = Lineage.read(folder)
    done = max((event.round for event in lineage.events), default=0)
    state = "finished" if lineage.finished else f"{done} of {len(settings['rounds'])} rounds done"
    best = "" if lineage.best is None else f", the best is member {lineage.best}"
    console.print(f"{folder}: {state}{best}", markup=False, highlight=False, soft_wrap=True)


def _held_out(lineage: Lineage) -> str:
    """Say how the winner did on episodes by which it was not chosen."""
    found, fitness = lineage.held_out, lineage.settings["fitness"]
    if found is None or found.fitness is None:
        return "Every held-out episode failed in the environment."
    failed = f", {found.failed_episodes} of which failed and count against it" if found.failed_episodes else ""
    return (
        f"It was chosen by these episodes, which flatters it. On {found.episodes} others{failed}: {fitness} "
        f"{with_error(found.fitness, found.standard_error)}."
    )


def _show_winner(lineage: Lineage, folder: Path, file: PopulationFile, console: Console) -> None:
    """Print the winner, its folder, and what can be done with it."""
    last = lineage.winner
    assert last is not None
    values = ", ".join(f"{name} {value_text(value)}" for name, value in last.hyperparameters.items())
    fitness = f"{lineage.settings['fitness']} {with_error(last.fitness, last.standard_error)}"
    parts = [
        f"The winner is member {last.member} after {last.steps} updates: {fitness}, {values}.",
        _held_out(lineage),
        f"Its policy is in {folder}.",
        f"  evaluate it   agile-trainers eval {folder}{file.environment_options} --episodes 500",
        f"  see episodes  agile-trainers view {folder.parent}",
        f"  go on         model: {folder} in the file of a chain, or --model_name_or_path {folder}",
        f"  push it       hf upload USER/NAME {folder}",
    ]
    for part in parts:
        console.print(part, markup=False, highlight=False, soft_wrap=True)


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
