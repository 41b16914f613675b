"""Compares the units of the advantage (``advantage_granularity``) seed by seed (``make bench-granularity``).

GRPO trains with ``turn`` and ``trajectory`` on guess-the-number, with the settings of ``agile-trainers demo`` and one
supervised stage per seed, and on three probes. REINFORCE and PPO, which have ``token``, train with ``turn`` and ``token`` on
guess-the-number. Each finished run is a line of ``benchmarks/results/granularity.jsonl`` and is not repeated. The table goes
to ``results/learning.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import probes
import torch
from datasets import concatenate_datasets, disable_progress_bars
from taught import taught
from transformers import PrinterCallback
from transformers.utils import logging

from agile_environments.guess_number import demonstrations
from agile_trainers.cli import demo as demo
from agile_trainers.embedded import make_embedded_model, words_of
from agile_trainers.trainers import find_algorithm

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results" / "granularity.jsonl"
PAGE = ROOT / "results" / "learning.md"
BEGIN, END = "<!-- begin: written by benchmarks/granularity.py -->", "<!-- end -->"
BASES = Path("runs/granularity")
"""Folder of the supervised models, one per seed."""
SEEDS = (0, 1, 2, 3, 4)
UPDATES, EPISODES = 200, 1000
"""Updates of a run of guess-the-number (the demo has 300), and episodes of its last evaluation."""
GAME = "guess_number"
UNITS = {"grpo": ("turn", "trajectory"), "reinforce": ("turn", "token"), "ppo": ("turn", "token")}
"""Values that are compared. The first is the one that a run of several turns has by default."""
TASKS = {"grpo": (GAME, "grid", "eight_turns"), "reinforce": (GAME,), "ppo": (GAME,)}
SAME = "delayed"
"""A probe of which one seed is run: its episodes have equally many turns and are rewarded at their end, so that the units of
GRPO are the same."""
OWN = {"grpo": {}, "reinforce": {"num_generations": 1}, "ppo": {"num_generations": 1, "whiten_advantages": True}}
"""Options of an algorithm on guess-the-number beside the demo's."""
OF_DEMO = (
    "max_turns", "max_new_tokens", "num_generations", "per_device_train_batch_size", "max_steps", "learning_rate",
    "lr_scheduler_type", "entropy_coef", "entropy_coef_schedule", "beta", "gradient_checkpointing", "bf16", "use_cpu",
    "seed", "save_strategy", "report_to", "logging_steps", "disable_tqdm",
)  # fmt: skip
T975 = (12.706, 4.303, 3.182, 2.776)
"""The .975 quantile of Student's t with 1 to 4 degrees of freedom."""
Run = dict[str, Any]


def wanted() -> list[Run]:
    """Return the settings of all runs: GRPO's first, and seed by seed, so that an interrupted benchmark holds pairs."""
    return [
        {"algorithm": algorithm, "task": task, "unit": unit, "seed": seed}
        for algorithms in (("grpo",), ("reinforce", "ppo"))
        for seed in SEEDS
        for algorithm in algorithms
        for task in (*TASKS[algorithm], *((SAME,) if algorithm == "grpo" and seed == SEEDS[0] else ()))
        for unit in UNITS[algorithm]
    ]


def run(chosen: Run) -> Run:
    """Train once.

    Returns:
        The settings; ``after``, the success at the end; ``during``, its mean over training; ``needed``, the episodes after
        which a probe stayed solved (None without); ``cpu``, CPU seconds.
    """
    torch.set_num_threads(1)
    started = time.process_time()
    result = _game(**chosen) if chosen["task"] == GAME else _probe(**chosen)
    return {**chosen, **result, "cpu": round(time.process_time() - started, 1)}


def _probe(algorithm: str, task: str, unit: str, seed: int) -> Run:
    """Train on a probe with the recipe of ``make probes`` and ``gamma=1``; a run that ends solved keeps its last score."""
    chosen = probes.settings(algorithm, task, seed)
    chosen["options"] = {**probes.RECIPE, "advantage_granularity": unit}
    result = probes.run_settings(chosen)
    scores = result["curve"]["score"][1:]
    scores += scores[-1:] * (probes.EVALUATIONS - len(scores))
    return {"after": scores[-1], "during": round(fmean(scores), 4), "needed": result["episodes_to_solve"]}


def _game(algorithm: str, task: str, unit: str, seed: int) -> Run:
    """Train as the demo does, from the supervised model of the seed."""
    budget = demo.Budget(rl_steps=UPDATES, eval_episodes=EPISODES)
    trainer_class = find_algorithm(algorithm)
    with tempfile.TemporaryDirectory() as folder:
        # The demo's options when the results were recorded.
        of_demo = demo.make_arguments(Path(folder), seed, budget, num_iterations=1, entropy_coef=0.08)
        options = {name: getattr(of_demo, name) for name in OF_DEMO} | OWN[algorithm] | {"advantage_granularity": unit}
        trainer = trainer_class(
            model=str(_supervised(seed, budget)),
            environment=demo.ENVIRONMENT,
            args=trainer_class.config_class(
                output_dir=folder, num_eval_episodes=EPISODES, log_rollouts=0, diagnosis_interval=0, **options
            ),
            train_dataset=concatenate_datasets(
                [demo.secrets()] * (of_demo.num_generations // options["num_generations"])
            ),
            eval_dataset=demo.secrets(),
            peft_config=demo.lora(),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        after = trainer.evaluate()["eval_success"]
    curve = [entry["success"] for entry in trainer.state.log_history if "success" in entry]
    return {"after": round(after, 4), "during": round(fmean(curve), 4), "needed": None}


def _supervised(seed: int, budget: demo.Budget) -> Path:
    """Return the folder of the seed's supervised model."""

    def trainer_of(untrained: Path, output: Path) -> Any:
        words = words_of(demonstrations(100), "invalid", "correct")
        return demo.make_sft_trainer(make_embedded_model(untrained, words=words, seed=seed), output, seed, budget)

    return taught(BASES / str(seed), trainer_of)


def saved_runs() -> list[Run]:
    """Return every saved run."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


# ------------------------------------------------------------------------------------------------------------- report


def interval(values: list[float]) -> tuple[float, float]:
    """Return the interval (95 %) of Student's t for the mean of two to five values."""
    middle = fmean(values)
    half = T975[len(values) - 2] * stdev(values) / len(values) ** 0.5
    return middle - half, middle + half


def table(runs: list[Run]) -> str:
    """Return a markdown table: a row per algorithm, task and second unit, with means and paired differences."""
    lines = [
        "| algorithm | task | units | seeds | success after | difference | success during | difference |",
        "|---|---|---|---|---|---|---|---|",
    ]
    by = {tuple(run[name] for name in ("algorithm", "task", "unit", "seed")): run for run in runs}
    for algorithm, (first, second) in UNITS.items():
        for task in (*TASKS[algorithm], *((SAME,) if algorithm == "grpo" else ())):
            pairs = [
                (by[algorithm, task, first, seed], by[algorithm, task, second, seed])
                for seed in SEEDS
                if (algorithm, task, first, seed) in by and (algorithm, task, second, seed) in by
            ]
            if pairs:
                cells = [algorithm, task, f"{first}, {second}", str(len(pairs))]
                for name in ("after", "during"):
                    cells += _compared([(one[name], other[name]) for one, other in pairs])
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _compared(pairs: list[tuple[float, float]]) -> list[str]:
    means = ", ".join(f"{fmean(column):.3f}" for column in zip(*pairs))
    differences = [other - one for one, other in pairs]
    if len(differences) < 2 or not stdev(differences):  # no interval of one difference, or of equal ones
        return [means, f"{fmean(differences):+.3f}"]
    low, high = interval(differences)
    return [means, f"{fmean(differences):+.3f} ({low:+.3f} to {high:+.3f})"]


def write_page(runs: list[Run]) -> None:
    """Write the table between the markers of ``results/learning.md``."""
    head, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n\n{table(runs)}\n\n{END}{rest.partition(END)[2]}")


def main() -> int:
    """Make the runs that are not saved, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="run nothing; write the table from the saved runs")
    options = parser.parse_args()
    disable_progress_bars()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for chosen in [] if options.report else wanted():
        if any(chosen.items() <= saved.items() for saved in saved_runs()):
            continue
        result = run(chosen)
        with RESULTS.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(result, flush=True)
    print(table(saved_runs()))
    write_page(saved_runs())
    return 0


if __name__ == "__main__":
    sys.exit(main())
