"""Trains ten multi-turn tasks with our defaults and with TRL's ``GRPOTrainer`` (``make bench-suite``).

Ours sets no option but those that a task states for every side: episodes of a rollout, turns and tokens of an answer
(``learning_tasks.py``); and the rate .003. TRL's is its best of two on each task, chosen with a seed of its own. A
training goes on to the budget of its task, so that falls after arrival are seen. AgileRL costs ten times the CPU time and
plays the tasks of ``learning.py`` alone.

Each finished training is a line of ``results/learning_suite.jsonl`` with the values of the options that were studied, and is
not repeated: a later default is compared with an earlier one by the same lines. ``--options '{"num_iterations": 2}'`` trains
ours with other options, ``--algorithm ppo`` another algorithm, and ``--tasks`` some tasks. Trainings are forks of a process
that has made the imports.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from itertools import pairwise
from math import exp, inf, log
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import learning_side
from learning import LORA, base
from learning_side import WINDOW, Progress
from learning_tasks import CHOSEN, HELD_OUT, TASKS
from transformers.utils import logging
from update_vs_trl import ROOT, with_tables

from agile_trainers.evaluation.statistics import mean_test
from agile_trainers.trainers import find_algorithm

RESULTS = ROOT / "benchmarks/results/learning_suite.jsonl"
PAGE = ROOT / "benchmarks/results/learning_suite.md"
LOGS = ROOT / "runs/learning_suite"
"""Logs of trainings, with ``--log``."""
RATES = (1e-2, 3e-3)
RATE = 3e-3
"""Ours on every task: that of the demo."""
TUNING = 3
"""The seed by which TRL's learning rate is chosen."""
SEEDS = (0, 1, 2, 4, 5)
GOALS = (0.8, 0.9)
LAST = 10
"""Rollouts of the success at the end, and of that by start state."""
STUDIED = (
    "num_iterations", "steps_per_generation", "epsilon", "epsilon_high", "scale_rewards", "entropy_coef", "beta",
    "use_adaptive_entropy", "entropy_target", "max_grad_norm", "advantage_granularity", "loss_type", "adam_beta2",
    "advantage_baseline", "replay_successes", "demonstration_loss", "demonstration_coef", "bootstrap_at_limits",
    "gae_lambda", "critic_learning_rate", "critic_warmup_steps", "critic_layers", "whiten_advantages", "vf_coef",
)  # fmt: skip
"""Options whose values are part of a saved training of ours."""
ADDED: dict[str, Any] = {
    "advantage_baseline": "mean",
    "replay_successes": 0,
    "demonstration_loss": "advantage_sft",
    "demonstration_coef": 1.0,
    "bootstrap_at_limits": False,
    "critic_learning_rate": None,
    "critic_warmup_steps": 0,
    "critic_layers": None,
    "whiten_advantages": False,
    "vf_coef": 0.5,
}
"""Values of options that came after the first trainings, whose lines lack them."""
EARLIER: dict[str, Any] = {"num_iterations": 1}
"""The defaults before this suite, where they differ."""
ALGORITHMS, UPDATES = ("grpo", "cispo", "gspo", "reinforce", "ppo"), (1, 2, 4)
"""Our algorithms, and the updates of a batch whose numbers are compared."""
HALVES = {"chosen": CHOSEN, "held out": HELD_OUT}
Run = dict[str, Any]


# --------------------------------------------------------------------------------------------------------------- trainings


def studied(options: dict[str, Any], algorithm: str = "grpo") -> dict[str, Any]:
    """Return the values of the studied options with some set and the others at an algorithm's defaults."""
    with tempfile.TemporaryDirectory() as folder:
        args = find_algorithm(algorithm).config_class(
            **{"output_dir": folder, "gradient_accumulation_steps": 1, "use_cpu": True, "bf16": False, **options}
        )
    return {name: getattr(args, name) for name in STUDIED if hasattr(args, name)}


def train(
    side: str, task: str, rate: float, seed: int, options: dict[str, Any], *, algorithm: str = "grpo", log: bool = False
) -> Run:
    """Train once, in a fork of this process; the algorithm is that of ours."""
    game = TASKS[task]
    chosen: Run = {"side": side, "task": task, "rate": rate, "seed": seed}
    if side == "ours":
        chosen |= {"algorithm": algorithm, "options": studied(options, algorithm)}
    model = str(base(task, seed))
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        training = {
            "task": task, "rate": rate, "seed": seed, "episodes": game.episodes, "model": model, "lora": LORA,
            "budget": game.budget // game.episodes * game.episodes, "folder": folder,
            "options": {**options, **({"logging_steps": 1} if log else {})},
            **({"algorithm": algorithm} if side == "ours" else {}),
        }  # fmt: skip
        child = multiprocessing.get_context("fork").Process(target=_child, args=(side, training, result))
        child.start()
        child.join()
        found = json.loads(result.read_text()) if result.is_file() else {"failed": f"exit code {child.exitcode}"}
    history = found.pop("log", None)
    if log and history:
        LOGS.mkdir(parents=True, exist_ok=True)
        name = "-".join([side, algorithm, task, str(rate), str(seed), *(f"{k}={v}" for k, v in options.items())])
        (LOGS / f"{name}.json").write_text(json.dumps(history))
    return {**chosen, **found}


def _child(side: str, training: dict[str, Any], result: Path) -> None:
    """Train, and write what came of it."""
    progress = Progress(training["episodes"], inf, training["budget"])
    started = time.process_time()
    try:
        with open(os.devnull, "w") as nowhere:
            sys.stdout = nowhere
            history = learning_side.SIDES[side](progress=progress, imported=lambda: None, **training)
    except BaseException:
        result.write_text(json.dumps({"failed": traceback.format_exc()[-500:]}))
        raise
    curve = [round(success, 4) for success in progress.curve()]
    assert curve, "no rollout was played"
    by_start = progress.by_start(TASKS[training["task"]].rows, LAST)
    cpu = round(time.process_time() - started, 2)
    found = {"episodes": len(progress.outcomes), "curve": curve, "by_start": by_start, "cpu": cpu, "log": history}
    result.write_text(json.dumps(found))


def saved_runs() -> list[Run]:
    """Return every finished training."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def find(
    runs: Sequence[Run], side: str, task: str, rate: float, seed: int, options: dict[str, Any], algorithm: str = "grpo"
) -> Run | None:
    """Return the training with these settings, if it is there; ``options`` as :func:`studied` returns them."""
    for run in runs:
        same = (run["side"], run["task"], run["rate"], run["seed"]) == (side, task, rate, seed)
        same &= side != "ours" or run.get("algorithm", "grpo") == algorithm
        # An option that a later version added was at its default.
        added = {name: value for name, value in ADDED.items() if name in options}
        if same and (side != "ours" or {**added, **run["options"]} == options):
            return run
    return None


def save(run: Run) -> None:
    """Add a training to the results; several processes may."""
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(run) + "\n")


# ----------------------------------------------------------------------------------------------------------------- measures


def arrival(curve: Sequence[float], goal: float) -> int | None:
    """Return the number of rollouts until the mean of ``WINDOW`` in a row reached a goal; None if it never did."""
    means = windows(curve)
    return next((n + WINDOW for n, mean in enumerate(means) if mean >= goal - 1e-9), None)


def windows(curve: Sequence[float]) -> list[float]:
    """Return the mean success of each ``WINDOW`` rollouts in a row."""
    return [fmean(curve[n : n + WINDOW]) for n in range(len(curve) - WINDOW + 1)]


def falls(curve: Sequence[float]) -> int:
    """Count how often that mean fell below .8 after it had arrived at .9; only a rise to .8 begins a new fall."""
    first = arrival(curve, 0.9)
    above = [] if first is None else [mean >= GOALS[0] - 1e-9 for mean in windows(curve)[first - WINDOW :]]
    return sum(before and not after for before, after in pairwise(above))


def episodes_to(run: Run, goal: float) -> int | None:
    """Return the episodes of a training until it arrived at a goal."""
    rollouts = arrival(run["curve"], goal)
    return None if rollouts is None else rollouts * TASKS[run["task"]].episodes


def chosen_rate(runs: Sequence[Run], task: str) -> float | None:
    """Return the rate of TRL's fewest episodes to .9 in the sweep, else of its largest area; None before the sweep."""
    tried = [find(runs, "TRL", task, rate, TUNING, {}) for rate in RATES]
    found = [run for run in tried if run is not None and "failed" not in run]
    if len([run for run in tried if run is not None]) < len(RATES) or not found:
        return None
    return float(min(found, key=lambda run: (episodes_to(run, 0.9) or inf, -fmean(run["curve"])))["rate"])


def paired(runs: Sequence[Run], others: Sequence[Run], goal: float) -> tuple[float, float, float] | None:
    """Compare the episodes to a goal of trainings with the same tasks and seeds.

    A training that does not arrive counts with its budget.

    Returns:
        The geometric mean of the ratios of episodes, first over second, and its 95 % interval; None without pairs, and an
        interval from 0 to infinity where the pairs are too few for one.
    """
    by_pair = {(run["task"], run["seed"]): run for run in others}
    logs = [
        log(_counted(run, goal) / _counted(by_pair[run["task"], run["seed"]], goal))
        for run in runs
        if (run["task"], run["seed"]) in by_pair
    ]
    if not logs:
        return None
    low, high = mean_test(logs).interval if len(logs) > 1 else (-inf, inf)
    return exp(fmean(logs)), exp(low), exp(high)


def _counted(run: Run, goal: float) -> int:
    return episodes_to(run, goal) or int(run["episodes"])


# ------------------------------------------------------------------------------------------------------------------- report


def of_side(
    runs: Sequence[Run], side: str, tasks: Sequence[str], options: dict[str, Any] | None = None, algorithm: str = "grpo"
) -> list[Run]:
    """Return the finished trainings of a side with its rates; ``options`` as :func:`studied` returns them."""
    rates = {task: RATE if side == "ours" else chosen_rate(runs, task) for task in tasks}
    found = (
        find(runs, side, task, rate, seed, options or {}, algorithm)
        for task, rate in rates.items()
        if rate
        for seed in SEEDS
    )
    return [run for run in found if run is not None and "failed" not in run]


def summary(runs: Sequence[Run]) -> list[str]:
    """Return the cells of some trainings: arrivals, episodes to each goal, success at the end, falls, area."""
    arrived = sum(episodes_to(run, GOALS[-1]) is not None for run in runs)
    counts = [
        f"{fmean(_counted(run, goal) for run in runs):,.0f}"
        + ("" if all(episodes_to(run, goal) for run in runs) else " or more")
        for goal in GOALS
    ]
    end, area = fmean(fmean(run["curve"][-LAST:]) for run in runs), fmean(fmean(run["curve"]) for run in runs)
    fell = sum(falls(run["curve"]) for run in runs)
    return [f"{arrived}/{len(runs)}", *counts, f"{end:.3f}", str(fell), f"{area:.3f}"]


def table(runs: Sequence[Run]) -> str:
    """Each task and side as a Markdown table; means over seeds."""
    lines = [
        "| task | kind | rate | side | arrived at .9 | episodes to .8 | to .9 | at the end | falls | area |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for half, names in HALVES.items():
        for task in names:
            for name, of in _sides(runs, [task]).items():
                if of:
                    kind = f"{TASKS[task].kind} ({half})"
                    cells = [f"`{task}`", kind, format(of[0]["rate"], "g"), name, *summary(of)]
                    lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _sides(runs: Sequence[Run], tasks: Sequence[str]) -> dict[str, list[Run]]:
    earlier, now = studied(EARLIER), studied({})
    sides = {"TRL": of_side(runs, "TRL", tasks), "ours": of_side(runs, "ours", tasks, now)}
    return sides if earlier == now else {**sides, "ours, earlier": of_side(runs, "ours", tasks, earlier)}


def ratio_table(runs: Sequence[Run]) -> str:
    """The sides compared over the tasks of each half, as a Markdown table."""
    lines = ["| tasks | compared | pairs | episodes to .8 | episodes to .9 |", "|---|---|---|---|---|"]
    for half, names in {**HALVES, "all": tuple(TASKS)}.items():
        sides = _sides(runs, names)
        pairs = [("ours", "ours, earlier"), ("ours", "TRL"), ("ours, earlier", "TRL")]
        for first, second in pairs:
            if sides.get(first) and sides.get(second):
                lines.append(_ratios([half, f"{first} / {second}"], sides[first], sides[second]))
    return "\n".join(lines)


def _ratios(cells: list[str], runs: Sequence[Run], others: Sequence[Run]) -> str:
    keys = {(run["task"], run["seed"]) for run in runs} & {(run["task"], run["seed"]) for run in others}
    return f"| {' | '.join([*cells, str(len(keys)), *_shown(runs, others)])} |"


def _shown(runs: Sequence[Run], others: Sequence[Run]) -> list[str]:
    """Return the ratios of episodes to each goal as cells; of a single pair without an interval."""
    found = [paired(runs, others, goal) for goal in GOALS]
    return [
        "" if one is None else "{:.2f} ({:.2f} to {:.2f})".format(*one).replace(" (0.00 to inf)", "") for one in found
    ]


def ablation_table(runs: Sequence[Run]) -> str:
    """Options beside the earlier defaults, on the same tasks and seeds of each half, as a Markdown table."""
    lines = [
        "| half | options | tasks, runs | arrived | falls | at the end | area | episodes to .8, ratio | to .9, ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    earlier = studied(EARLIER)
    for half, names in HALVES.items():
        base_runs = {(run["task"], run["seed"]): run for run in of_side(runs, "ours", names, earlier)}
        groups: dict[str, list[Run]] = {}
        for run in runs:
            key = (run["task"], run["seed"])
            if (
                run["side"] != "ours"
                or key not in base_runs
                or "failed" in run
                or run.get("algorithm", "grpo") != "grpo"
            ):
                continue
            values = {**earlier, **run["options"]}
            changed = [f"`{name}={values[name]}`" for name in values if values[name] != earlier.get(name)]
            if run["rate"] != base_runs[key]["rate"]:
                changed.append(f"`learning_rate={run['rate']:g}`")
            groups.setdefault(", ".join(changed) or "none", []).append(run)
        for name, of in sorted(groups.items()):
            others = [base_runs[run["task"], run["seed"]] for run in of]
            arrived, _, _, end, fell, area = summary(of)
            cells = [half, name, _counts(of), arrived, fell, end, area]
            cells += _shown(of, others)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _counts(runs: Sequence[Run]) -> str:
    return f"{len({run['task'] for run in runs})}, {len(runs)}"


def algorithm_table(runs: Sequence[Run]) -> str:
    """Numbers of updates of each batch by algorithm, beside one update on the same tasks and seeds, as a Markdown table."""
    lines = [
        "| algorithm | half | updates of a batch | tasks, runs | arrived | falls | at the end | CPU seconds | "
        "episodes to .8, ratio | to .9, ratio |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for algorithm in ALGORITHMS:
        for half, names in HALVES.items():
            sides = {
                updates: {
                    (run["task"], run["seed"]): run
                    for run in of_side(runs, "ours", names, studied({"num_iterations": updates}, algorithm), algorithm)
                }
                for updates in UPDATES
            }
            for updates, of in sides.items():
                both = [(run, one) for key, run in of.items() if (one := sides[1].get(key))]
                if both:
                    tried, once = [run for run, _ in both], [one for _, one in both]
                    arrived, _, _, end, fell, _ = summary(tried)
                    cells = [algorithm, half, str(updates), _counts(tried), arrived, fell, end]
                    cells += [f"{fmean(run['cpu'] for run in tried):.0f}", *_shown(tried, once)]
                    lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def tables(runs: Sequence[Run]) -> dict[str, str]:
    """The tables of the page by the name in their markers."""
    return {
        "suite": table(runs),
        "suite ratios": ratio_table(runs),
        "suite options": ablation_table(runs),
        "suite algorithms": algorithm_table(runs),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is not done yet, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="train nothing; write the tables of what is saved")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="tasks to train")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS), help="seeds to train")
    parser.add_argument("--sides", nargs="+", choices=("ours", "TRL"), default=["TRL", "ours"], help="sides to train")
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="grpo", help="algorithm of ours")
    parser.add_argument("--options", type=json.loads, default={}, help="options of ours, as JSON")
    parser.add_argument("--sweep", action="store_true", help="TRL's learning rates alone")
    parser.add_argument("--rate", type=float, help="a learning rate in place of the chosen one")
    parser.add_argument("--log", action="store_true", help=f"keep the logs of ours in {LOGS.relative_to(ROOT)}")
    options = parser.parse_args(argv)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if not options.report:
        for task in options.tasks:
            for rate in RATES if options.rate is None else ():
                _train_unless_done("TRL", task, rate, TUNING, {})
        for seed in () if options.sweep else options.seeds:
            for task in options.tasks:
                for side in options.sides:
                    of_task = options.rate or (RATE if side == "ours" else chosen_rate(saved_runs(), task))
                    if of_task is not None:
                        given = options.options if side == "ours" else {}
                        _train_unless_done(side, task, of_task, seed, given, options.algorithm, log=options.log)
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), tables(saved_runs())), encoding="utf-8")
    return 0


def _train_unless_done(
    side: str, task: str, rate: float, seed: int, options: dict[str, Any], algorithm: str = "grpo", log: bool = False
) -> None:
    if find(saved_runs(), side, task, rate, seed, studied(options, algorithm), algorithm):
        return
    run = train(side, task, rate, seed, options, algorithm=algorithm, log=log and side == "ours")
    save(run)
    if "failed" in run:
        print(side, task, rate, seed, run["failed"], flush=True)
        return
    to = [episodes_to(run, goal) for goal in GOALS]
    end, area = fmean(run["curve"][-LAST:]), fmean(run["curve"])
    of = f"ours, {algorithm}" if side == "ours" else side
    shown = f"to .8, .9: {to}, end {end:.3f}, area {area:.3f}, falls {falls(run['curve'])}"
    print(
        f"{of} {task} rate {rate:g} seed {seed} {options}: {shown}, start {run['curve'][0]}, {run['cpu']} s",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
