"""Trains without a fault, five algorithms on eight tasks and three seeds, and records what the diagnosis reads of each.

Nothing is wrong with any of the 120 runs, so that each finding but ``solved`` is a false alarm. A line of
``results/healthy_runs.jsonl`` has the options and metrics of a run, which is not repeated; ``--replay`` plays the diagnosis
on them again without training. The model is that of ``planted_failures.py``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from planted_failures import GROUP, HIGH, Run, recorded, settings, train
from probes import ALGORITHMS, OWN_REWARD, TURN_LEVEL

from agile_environments.guess_number import LEVELS, GuessNumber
from agile_trainers.evaluation.diagnosis import Diagnosis
from agile_trainers.trainers import find_algorithm

RESULTS = Path(__file__).resolve().parent / "results" / "healthy_runs.jsonl"
NAMES = ("grpo", "gspo", "cispo", "reinforce", "ppo")
STEPS = {
    "conditional": 30, "two_inputs": 50, "memory": 50, "delayed": 50, "grid": 40, "eight_turns": 25, "guess_number": 24,
    "guess_number, easy": 24,
}  # fmt: skip
"""Updates of a run on each task: the probes of 64 episodes, guess-the-number of 96."""
SEEDS = (0, 1, 2)
Line = dict[str, Any]


def run_of(algorithm: str, task: str, seed: int) -> Run:
    """Return a run of the table."""
    if task.startswith("guess_number"):
        options: dict[str, Any] = {"learning_rate": 1e-3} if algorithm in ("gspo", "ppo") else {}
        if not task.endswith("easy"):
            return Run(steps=STEPS[task], options=options, algorithm=algorithm, seed=seed)
        high, guesses = LEVELS["easy"]
        rows = [{"secret": n + 1} for n in range(high)] * (HIGH // high)
        easy = partial(GuessNumber, level="easy")
        return Run(easy, STEPS[task], {**options, "max_turns": guesses}, algorithm, rows=rows, seed=seed)
    own = OWN_REWARD.get(task, {}) if algorithm in TURN_LEVEL else {}
    options = {**ALGORITHMS[algorithm].options, **own, "per_device_train_batch_size": 8 * GROUP}
    return Run(steps=STEPS[task], options=options, algorithm=algorithm, seed=seed, probe=task)


def saved() -> list[Line]:
    """Return every recorded run."""
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()] if RESULTS.exists() else []


@cache
def _options(algorithm: str, chosen: str) -> Any:
    return find_algorithm(algorithm).config_class(output_dir="runs/replayed", **json.loads(chosen))


def told(line: Line) -> list[tuple[int, str]]:
    """Play the diagnosis on a recorded run, and return the log (from 1) and the name of each finding."""
    columns = {name: v if isinstance(v, list) else [v] * line["logs"] for name, v in line["metrics"].items()}
    diagnosis = Diagnosis(_options(line["algorithm"], json.dumps(line["options"])))
    found = []
    for log in range(line["logs"]):
        values = {name: column[log] for name, column in columns.items() if column[log] is not None}
        found += [(log + 1, finding.name) for finding in diagnosis.look(log + 1, values)]
    return found


def main() -> int:
    """Train what is not recorded, and report. Return 1 if a run is told of a fault."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--replay", action="store_true", help="train nothing")
    replay = parser.parse_args().replay
    torch.set_num_threads(1)
    done = {(line["algorithm"], line["task"], line["seed"]) for line in saved()}
    wanted = [(name, task, seed) for seed in SEEDS for task in STEPS for name in NAMES]
    with tempfile.TemporaryDirectory() as folder:
        for name, task, seed in wanted if not replay else ():
            if (name, task, seed) in done:
                continue
            run, started = run_of(name, task, seed), time.process_time()
            record = recorded(run, train(run, Path(folder)))
            line = {
                "algorithm": name,
                "task": task,
                "seed": seed,
                "cpu_seconds": round(time.process_time() - started, 1),
            }
            line |= {"logs": record["logs"], "options": settings(run), "metrics": record["metrics"]}
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(line)}\n")
            print(name, task, seed, line["cpu_seconds"], told(line), flush=True)
    false = Counter[str]()
    for line in saved():
        found = [one for one in told(line) if one[1] != "solved"]
        false.update({name for _, name in found})
        if found:
            print(line["algorithm"], line["task"], line["seed"], found)
    print(f"{len(saved())} of {len(wanted)} runs; told of a fault: {dict(false) or 'none'}")
    return 1 if false else 0


if __name__ == "__main__":
    raise SystemExit(main())
