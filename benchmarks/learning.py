"""Trains from the same start to success .9 with ours, TRL's ``GRPOTrainer`` and AgileRL 2.58 (``make bench-learning``).

Each training is a process of its own on one core with one thread (``learning_side.py``), and the three sides take turns.
They start from the same tiny model, which has learned the form of an answer from supervised games of which some are good,
and train the same adapter with GRPO on the same environments: as many episodes in an update, groups of eight, no KL. TRL's
side plays through a ``rollout_func`` as a user writes it. A training ends when the mean success of three rollouts in a row
reaches .9. The learning rate of each side and task is the one that arrived after the fewest episodes with a seed of its
own, or came nearest.

Each finished training is a line of ``results/learning.jsonl`` and is not repeated. The tables go to ``results/learning.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from agilerl_gradients import AGILERL
from learning_tasks import EVERY
from matplotlib.figure import Figure
from transformers import PrinterCallback
from transformers.utils import logging
from update_vs_trl import ROOT, with_tables

from agile_trainers.embedded import make_embedded_model, sft_trainer, words_of
from agile_trainers.envs.scripted_policies import ScriptedPolicy, demonstrate, known_policies

RESULTS = ROOT / "benchmarks/results/learning.jsonl"
PAGE = ROOT / "benchmarks/results/learning.md"
PICTURE = ROOT / "docs/images/learning.png"
SIDE = ROOT / "benchmarks/learning_side.py"
BASES = ROOT / "runs/learning"
"""Folder of the models that trainings start from; they are made once."""
DEFAULTS = "ours, defaults"
SIDES = ("ours", DEFAULTS, "TRL", "AgileRL")
COLORS = {"ours": "#0072B2", DEFAULTS: "#56B4E9", "TRL": "#D55E00", "AgileRL": "#009E73"}
GOAL = 0.9
BUDGETS = {"conditional": 4032, "delayed": 8640, "guess_number": 7680}
"""Episodes after which a training ends in any case."""
TASKS = tuple(BUDGETS)
OPTIONS = {"ours": {"advantage_granularity": "trajectory", "num_iterations": 1}}
"""Options of a side with which it does what the others do."""
TUNING = 3
"""The seed by which a learning rate is chosen."""
SEEDS = (0, 1, 2)
RATES = (1e-2, 3e-3)
LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
SLOWEST = 900.0
"""Seconds after which a training is ended."""
Run = dict[str, Any]


def rollout_size(task: str) -> int:
    """Return the episodes of a rollout: a group from each start state, or two."""
    return EVERY[task].episodes


def base(task: str, seed: int) -> Path:
    """Return the folder of the model that the trainings of a seed start from, which is made once."""
    folder = BASES / f"{task}-{seed}"
    if (folder / "done").is_file():
        return folder
    game = EVERY[task]
    count = game.taught * 32
    environment = game.make(0)
    policy = game.teacher or _mixture(known_policies(environment), game.expert)
    rows = demonstrate(environment, policy, range(seed * count, (seed + 1) * count))
    words = words_of(rows, "invalid", "correct", "end")
    untrained = make_embedded_model(folder / "untrained", words=words, max_position_embeddings=512, seed=seed)
    trainer = sft_trainer(untrained, rows, folder, seed=seed, max_steps=game.taught)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_model()
    (folder / "done").touch()
    return folder


def _mixture(policies: dict[str, ScriptedPolicy], expert: float) -> ScriptedPolicy:
    return lambda messages, rng: policies["expert" if rng.random() < expert else "random"](messages, rng)


def run(side: str, task: str, rate: float, seed: int, budget: int) -> Run:
    """Train once, in a process of its own on the last core, at most for a number of episodes.

    Returns:
        The settings, what ``learning_side.py`` prints, and ``process_cpu`` and ``process_wall``, seconds of the whole
        process; or the settings and ``failed``, the end of what it said.
    """
    chosen = {"side": side, "task": task, "rate": rate, "seed": seed}
    size = rollout_size(task)
    python = str(AGILERL) if side == "AgileRL" else sys.executable
    with tempfile.TemporaryDirectory() as folder:
        training = {
            "task": task, "rate": rate, "seed": seed, "episodes": size, "budget": budget // size * size,
            "model": str(base(task, seed)), "folder": folder, "lora": LORA, "goal": GOAL, "options": OPTIONS.get(side, {}),
        }  # fmt: skip
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        core = str(max(os.sched_getaffinity(0)))
        command = ["taskset", "-c", core, python, str(SIDE), side.partition(",")[0], json.dumps(training)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SLOWEST, env=_environment())
        except subprocess.TimeoutExpired:
            return {**chosen, "failed": f"not done after {SLOWEST:.0f} s"}
        wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        return {**chosen, "failed": done.stderr[-500:]}
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    result = json.loads(done.stdout.splitlines()[-1])
    return {**chosen, **result, "process_cpu": round(cpu, 2), "process_wall": round(wall, 2)}


def _environment() -> dict[str, str]:
    """One thread, no network."""
    own = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **own, "HF_HUB_DISABLE_TELEMETRY": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}


# -------------------------------------------------------------------------------------- which runs, and which are done


def saved_runs() -> list[Run]:
    """Return every finished training."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def find(runs: Sequence[Run], side: str, task: str, rate: float, seed: int) -> Run | None:
    """Return the training with these settings, if it is there."""
    wanted = {"side": side, "task": task, "rate": rate, "seed": seed}
    return next((run for run in runs if wanted.items() <= run.items()), None)


def chosen_rate(runs: Sequence[Run], side: str, task: str) -> float | None:
    """Return the learning rate of a side on a task; None before the sweep has ended."""
    tried = [find(runs, side, task, rate, TUNING) for rate in RATES]
    found = [run for run in tried if run is not None]
    return None if len(found) < len(RATES) else float(min(found, key=_worth)["rate"])


def _worth(run: Run) -> tuple[float, float]:
    """Order trainings: those that arrived by their episodes, then the others by their last success."""
    if "failed" in run:
        return float("inf"), 0.0
    return (run["episodes"], 0.0) if run["arrived"] else (float("inf"), -fmean(run["curve"][-3:]))


def budget(runs: Sequence[Run], side: str, task: str, seed: int) -> int:
    """Return the most episodes of a training: in the sweep, those of the best rate so far, which it has to beat."""
    tried = [find(runs, side, task, rate, TUNING) for rate in RATES] if seed == TUNING else []
    return min([BUDGETS[task], *(run["episodes"] for run in tried if run is not None and run.get("arrived"))])


def left(runs: Sequence[Run]) -> list[tuple[str, str, float, int]]:
    """Return the trainings to do, as far as they are known: the sweep, and then seed by seed with the chosen rates."""
    wanted = [(side, task, rate, TUNING) for task in BUDGETS for rate in RATES for side in SIDES]
    rates = {(side, task): chosen_rate(runs, side, task) for side in SIDES for task in BUDGETS}
    wanted += [
        (side, task, rate, seed)
        for tasks in (TASKS[:-1], TASKS[-1:])  # the longest last
        for seed in SEEDS
        for task in tasks
        for side in SIDES
        if (rate := rates[side, task]) is not None
    ]
    return [one for one in wanted if find(runs, *one) is None]


def final(runs: Sequence[Run], side: str, task: str) -> list[Run]:
    """Return the trainings of a side with the chosen rate, in the order of their seeds."""
    rate = chosen_rate(runs, side, task)
    found = [None if rate is None else find(runs, side, task, rate, seed) for seed in SEEDS]
    return [run for run in found if run is not None and "failed" not in run]


# -------------------------------------------------------------------------------------------------------------------- report


def table(runs: Sequence[Run]) -> str:
    """Episodes and seconds of each side and task as a Markdown table; means over seeds (lowest to highest)."""
    lines = [
        "| task | side | rate | arrived | episodes | CPU seconds | with imports | wall seconds | CPU seconds, ours / it | "
        "with imports | defaults / it | with imports |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for task in BUDGETS:
        for side in SIDES:
            of = final(runs, side, task)
            if not of:
                continue
            cells = [f"`{task}`", side, f"{of[0]['rate']:g}", f"{sum(run['arrived'] for run in of)}/{len(of)}"]
            cells += [_range([run["episodes"] for run in of])]
            cells += [_range([run[name] for run in of]) for name in ("cpu", "process_cpu", "process_wall")]
            for ours in ("ours", DEFAULTS):
                mine = final(runs, ours, task)
                for name in ("cpu", "process_cpu"):
                    ratio = (
                        sum(run[name] for run in mine) / sum(run[name] for run in of) if len(mine) == len(of) else None
                    )
                    cells.append("" if side == ours or ratio is None else f"{ratio:.2f}")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def speed_table(runs: Sequence[Run]) -> str:
    """CPU milliseconds of an episode, imports aside, as a Markdown table."""
    lines = [f"| task | turns | {' | '.join(SIDES)} |", "|---|---|---|---|---|---|"]
    turns = {"conditional": "1", "delayed": "3", "guess_number": "1 to 4"}
    for task in BUDGETS:
        cells = [f"`{task}`", turns[task]]
        for side in SIDES:
            of = final(runs, side, task)
            cells.append(f"{1000 * sum(r['cpu'] for r in of) / sum(r['episodes'] for r in of):.2f}" if of else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def sweep_table(runs: Sequence[Run]) -> str:
    """The sweep as a Markdown table: the episodes to the goal at each rate, or the last success."""
    lines = [
        f"| task | side | {' | '.join(f'{rate:g}' for rate in RATES)} |",
        "|---|---|" + "---|" * len(RATES),
    ]
    for task in BUDGETS:
        for side in SIDES:
            cells = [f"`{task}`", side]
            for rate in RATES:
                run = find(runs, side, task, rate, TUNING)
                cells.append("" if run is None else _outcome(run))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _outcome(run: Run) -> str:
    if "failed" in run:
        return "failed"
    arrived = f"{run['episodes']}"
    return arrived if run["arrived"] else f"not after {arrived}: {fmean(run['curve'][-3:]):.2f}"


def _range(values: Sequence[float]) -> str:
    form = ".0f" if max(values) >= 20 else ".1f"
    return f"{fmean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def tables(runs: Sequence[Run]) -> dict[str, str]:
    """The tables of the page by the name in their markers."""
    return {"learning": table(runs), "learning speed": speed_table(runs), "learning sweep": sweep_table(runs)}


def draw(runs: Sequence[Run], file: Path) -> None:
    """Draw the success of each training over its CPU seconds, imports aside."""
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    axes = figure.subplots(1, len(BUDGETS), sharey=True)
    for axis, task in zip(axes, BUDGETS, strict=True):
        for side in SIDES:
            for run in final(runs, side, task):
                size = rollout_size(task)
                seconds = [run["cpu"] * (n + 1) * size / run["episodes"] for n in range(len(run["curve"]))]
                label = side if run["seed"] == SEEDS[0] else None
                axis.plot(seconds, run["curve"], color=COLORS[side], linewidth=1, label=label)
        axis.axhline(GOAL, color="grey", linewidth=0.6)
        axis.set(title=task, xlabel="CPU seconds, without imports", xscale="log", ylim=(0, 1))
    axes[0].set_ylabel("success of a rollout")
    axes[0].legend(frameon=False)
    file.parent.mkdir(exist_ok=True)
    figure.savefig(file, dpi=120)


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is not done yet, and write the tables and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--report", action="store_true", help="train nothing; write tables and picture of what is saved"
    )
    options = parser.parse_args(argv)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    total = len(BUDGETS) * len(SIDES) * (len(RATES) + len(SEEDS))
    while not options.report and (todo := left(saved_runs())):
        side, task, rate, seed = todo[0]
        result = run(side, task, rate, seed, budget(saved_runs(), side, task, seed))
        with RESULTS.open("a") as file:
            file.write(json.dumps(result) + "\n")
        seconds = "" if "failed" in result else f" episodes, {result['process_cpu']} CPU seconds"
        done = len(saved_runs())
        print(f"{done}/{total}  {task}, {side}, {rate:g}, seed {seed}: {_outcome(result)}{seconds}", flush=True)
    found = tables(saved_runs())
    print("\n\n".join(found.values()))
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
    draw(saved_runs(), PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
