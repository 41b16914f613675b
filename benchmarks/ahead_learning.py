"""Trains with batches of earlier policies, by lag and correction, and compares the runs seed by seed.

GRPO trains an adapter on a game of three turns with two digits each, where the second digit chooses what the next turn
shows. Lag is ``batches_ahead``. The learning rate is one at which lag 0 learns and lag 4 breaks without a correction; it was
found among those that the last runs have. Each finished run is a line of ``benchmarks/results/ahead_learning.jsonl`` and is
not repeated. Tables and picture go to ``results/ahead.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
from datasets import disable_progress_bars
from matplotlib.figure import Figure
from peft import LoraConfig
from scipy import stats
from taught import taught
from transformers import PrinterCallback
from transformers.utils import logging

from agile_trainers.embedded import make_embedded_model, sft_trainer, words_of
from agile_trainers.envs.base import ResetResult, StepResult
from agile_trainers.envs.scripted_policies import demonstrate
from agile_trainers.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results" / "ahead_learning.jsonl"
PAGE = ROOT / "results" / "ahead.md"
PICTURE = ROOT.parent / "docs" / "images" / "ahead_learning.png"
BEGIN, END = "<!-- begin: written by benchmarks/ahead_learning.py -->", "<!-- end -->"
BASES = Path("runs/ahead_learning")
"""Folder of the supervised models, one per seed."""
SEEDS = (0, 1, 2, 3, 4)
LAGS = (1, 2, 4)
CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {"drift_correction": None},
    "turn_truncate 2": {"drift_correction": "turn_truncate", "drift_clip_max": 2.0},
    "sequence_truncate 2": {"drift_correction": "sequence_truncate", "drift_clip_max": 2.0},
    "sequence_truncate": {"drift_correction": "sequence_truncate", "drift_clip_max": None},
    "token_truncate 2": {"drift_correction": "token_truncate", "drift_clip_max": 2.0},
    "decision_truncate 2": {"drift_correction": "decision_truncate", "drift_clip_max": 2.0},
    "decision_truncate": {"drift_correction": "decision_truncate", "drift_clip_max": None},
}
"""Name of a correction to its options."""
DEFAULT = "turn_truncate 2"
COLORS = ("#000000", "#0072B2", "#D55E00", "#CC79A7", "#009E73", "#56B4E9", "#E69F00")
"""A colour per correction that colour-blind readers can tell apart (Okabe and Ito)."""
RATE, STEPS, EVERY = 2e-3, 60, 5
"""Learning rate; updates of a run; updates between two evaluations."""
SWEEP = (1e-3, 3e-3, 1e-2)
"""Other learning rates that lag 0 and lag 4 without a correction were tried at, on one seed."""
CURVES = {
    "success": "success", "reward": "reward", "reward_std": "reward_std", "kl": "drift/kl",
    "effective": "drift/effective_sample_size",
}  # fmt: skip
"""Column of a saved run to the metric of each batch."""
Run = dict[str, Any]


class Chain:
    """Shows a digit on each of three turns; the right answer is two digits, which depend on the turn and on that digit.

    The next turn shows the second digit of the answer. Each right digit is rewarded with 1/6; an answer of other than two
    digits has no reward.
    """

    turns, digits = 3, 3

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Show the first digit, which the seed chooses."""
        self._turn, self._right, self._shown = 0, 0, (seed or 0) % self.digits
        return f"first {self._shown}", {}

    def step(self, action: str) -> StepResult:
        """Take an answer."""
        right = 0
        said = [int(digit) for digit in re.findall(r"\d", action)]
        if len(said) == 2:
            wanted = (self._shown + self._turn) % self.digits, (2 * self._shown + self._turn + 1) % self.digits
            right = sum(one == other for one, other in zip(said, wanted))
            self._shown = said[1] % self.digits
        self._right += right
        self._turn += 1
        over = self._turn == self.turns
        shown = "end" if over else f"{('first', 'second', 'third')[self._turn]} {self._shown}"
        return shown, right / (2 * self.turns), over, False, {"success": over and self._right == 2 * self.turns}


def base(seed: int) -> Path:
    """Return the folder of the seed's model, which answers with any two digits."""

    def trainer_of(untrained: Path, output: Path) -> Any:
        rows = demonstrate(Chain(), lambda messages, chance: " ".join(chance.choices("012", k=2)), range(1500))
        model = make_embedded_model(untrained, words=words_of(rows, "end"), seed=seed)
        return sft_trainer(model, rows, output, seed=seed, max_steps=60)

    return taught(BASES / str(seed), trainer_of)


def wanted() -> list[Run]:
    """Return the settings of all runs: seed by seed, so that an interrupted benchmark holds pairs; then the sweep."""
    pairs = [(0, "none"), *product(LAGS[::-1], CORRECTIONS)]
    runs = [{"lag": lag, "correction": name, "seed": seed, "rate": RATE} for seed in SEEDS for lag, name in pairs]
    return runs + [
        {"lag": lag, "correction": "none", "seed": SEEDS[0], "rate": rate} for rate in SWEEP for lag in (0, LAGS[-1])
    ]


def run(lag: int, correction: str, seed: int, rate: float) -> Run:
    """Train once.

    Returns:
        The settings; ``during``, the mean return of evaluations all along; ``after``, that of the last three; ``evaluated``,
        each; the columns of ``CURVES``, a value per update (None without one); ``cpu``, CPU seconds.
    """
    torch.set_num_threads(1)
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        ahead = {"batches_ahead": lag, **CORRECTIONS[correction]} if lag else {}
        trainer = MultiTurnGRPOTrainer(
            model=str(base(seed)),
            environment=Chain,
            args=MultiTurnGRPOConfig(
                output_dir=folder, seed=seed, max_steps=STEPS, num_iterations=1, max_turns=Chain.turns, max_new_tokens=2,
                per_device_train_batch_size=64, num_generations=8, learning_rate=rate, lr_scheduler_type="constant",
                beta=0.0, entropy_coef=0.02, eval_strategy="steps", eval_steps=EVERY, num_eval_episodes=96,
                logging_steps=1, save_strategy="no", report_to="none", log_rollouts=False, use_cpu=True, bf16=False,
                gradient_checkpointing=False, disable_tqdm=True, diagnosis_interval=0, **ahead,
            ),
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    history = trainer.state.log_history
    evaluated = [round(entry["eval_return"], 4) for entry in history if "eval_return" in entry]
    updates = [entry for entry in history if "loss" in entry]
    curves = {
        column: [None if name not in entry else round(entry[name], 5) for entry in updates]
        for column, name in CURVES.items()
    }
    return {
        "lag": lag,
        "correction": correction,
        "seed": seed,
        "rate": rate,
        "during": round(fmean(evaluated), 4),
        "after": round(fmean(evaluated[-3:]), 4),
        "evaluated": evaluated,
        **curves,
        "cpu": round(time.process_time() - started, 1),
    }


def saved_runs() -> list[Run]:
    """Return every saved run."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


# ------------------------------------------------------------------------------------------------------------- report


def scores(runs: list[Run]) -> dict[tuple[str, str], list[float]]:
    """Return, by lag and correction, the ``after`` of each seed that is complete; the lag ``"all"`` is the mean over lags.

    Lag 0 has no correction and counts as that of each.
    """
    by = {(run["lag"], run["correction"], run["seed"]): run["after"] for run in runs if run["rate"] == RATE}
    cells = [(0, "none"), *product(LAGS, CORRECTIONS)]
    seeds = [seed for seed in SEEDS if all((*cell, seed) in by for cell in cells)]
    found = {(str(lag), name): [by[lag, name, seed] for seed in seeds] for lag, name in cells}
    for name in CORRECTIONS:
        found["all", name] = [fmean(by[lag, name, seed] for lag in LAGS) for seed in seeds]
    return found


def comparisons() -> list[tuple[tuple[str, str], tuple[str, str]]]:
    """Return the pairs of cells that are compared, the one that is subtracted last."""
    latest = str(LAGS[-1])
    lags = [((latest, name), ("0", "none")) for name in ("none", DEFAULT)]
    others = [name for name in CORRECTIONS if name not in ("none", DEFAULT)]
    return lags + [
        ((lag, one), (lag, other))
        for lag in (latest, "all")
        for one, other in [*((name, "none") for name in (DEFAULT, *others)), *((name, DEFAULT) for name in others)]
    ]


def compared(one: Sequence[float], other: Sequence[float]) -> tuple[float, float, float, float]:
    """Compare two cells seed by seed.

    Returns:
        The mean difference; its bootstrap interval (95 %), from all resamples of the pairs; and the p-value of the paired t
        test.
    """
    differences = np.subtract(one, other)
    means = np.fromiter((fmean(drawn) for drawn in product(differences, repeat=len(differences))), float)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(differences.mean()), float(low), float(high), float(stats.ttest_rel(one, other).pvalue)


def holm(values: Sequence[float]) -> list[float]:
    """Return the p-values corrected for their number (Holm, 1979), in the order given."""
    adjusted, highest = [0.0] * len(values), 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=lambda index: values[index])):
        highest = max(highest, min((len(values) - rank) * values[index], 1.0))
        adjusted[index] = highest
    return adjusted


def tables(runs: list[Run]) -> str:
    """Return the tables as markdown: mean returns, comparisons, and learning rates."""
    found = scores(runs)

    def cell(lag: str, name: str) -> str:
        values = found[lag, name]
        return f"{fmean(values):.2f} ({min(values):.2f} to {max(values):.2f})"

    lines = [
        "| correction | lag 0 | " + " | ".join(f"lag {lag}" for lag in LAGS) + " |",
        "|---|---|" + "---|" * len(LAGS),
    ]
    for name in CORRECTIONS:
        lines.append(f"| {name} | {cell('0', 'none')} | {' | '.join(cell(str(lag), name) for lag in LAGS)} |")
    results = [compared(found[one], found[other]) for one, other in comparisons()]
    lines += [
        "",
        "| difference | mean | bootstrap interval | p, paired t | p, Holm | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for (one, other), (mean, low, high, p), adjusted in zip(comparisons(), results, holm([p for *_, p in results])):
        verdict = ("better" if mean > 0 else "worse") if adjusted < 0.05 else "cannot be told apart"
        tested = f"{mean:+.2f} | {low:+.2f} to {high:+.2f} | {p:.3f} | {adjusted:.3f} | {verdict}"
        lines.append(f"| {_named(one, other)} | {tested} |")
    rates = sorted({run["rate"] for run in runs})
    lines += ["", "| learning rate | lag 0 | lag 4, none |", "|---|---|---|"]
    tried = {(run["rate"], run["lag"]): run["after"] for run in runs if run["correction"] == "none" and not run["seed"]}
    lines += [
        f"| {rate:g} | {tried[rate, 0]:.2f} | {tried[rate, LAGS[-1]]:.2f} |"
        for rate in rates
        if {(rate, 0), (rate, LAGS[-1])} <= tried.keys()
    ]
    return "\n".join(lines)


def _named(one: tuple[str, str], other: tuple[str, str]) -> str:
    lag = "all lags" if one[0] == "all" else f"lag {one[0]}"
    return f"{lag}: {one[1]} - {'lag 0' if other[0] == '0' else other[1]}"


def picture(runs: list[Run]) -> Figure:
    """Draw the return of evaluations over updates, the mean over seeds: a panel for each lag, a line for each correction."""
    figure = Figure(figsize=(8.0, 2.8), layout="constrained")
    panels = figure.subplots(1, len(LAGS), sharey=True)
    updates = range(EVERY, STEPS + 1, EVERY)

    def draw(panel: Any, lag: int, name: str, **style: Any) -> None:
        curves = [it["evaluated"] for it in runs if (it["lag"], it["correction"], it["rate"]) == (lag, name, RATE)]
        if curves:
            panel.plot(updates, np.mean(curves, axis=0), linewidth=1.5, **style)

    for panel, lag in zip(panels, LAGS):
        draw(panel, 0, "none", color="0.6", linestyle="--", label="lag 0")
        for name, color in zip(CORRECTIONS, COLORS):
            draw(panel, lag, name, color=color, label=name)
        panel.set(title=f"lag {lag}", xlabel="updates", ylim=(0, 1))
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("return")
    panels[0].legend(frameon=False, fontsize=7, loc="upper left")
    return figure


def write_page(runs: list[Run]) -> None:
    """Write the tables between the markers of ``results/ahead.md``, and the picture."""
    head, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n\n{tables(runs)}\n\n{END}{rest.partition(END)[2]}")
    picture(runs).savefig(PICTURE, dpi=130)


def main() -> int:
    """Make the runs that are not saved, and write tables and picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--report", action="store_true", help="run nothing; write tables and picture from the saved runs"
    )
    options = parser.parse_args()
    disable_progress_bars()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for chosen in [] if options.report else wanted():
        if any(chosen.items() <= saved.items() for saved in saved_runs()):
            continue
        result = run(**chosen)
        with RESULTS.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print({name: value for name, value in result.items() if not isinstance(value, list)}, flush=True)
    print(tables(saved_runs()))
    write_page(saved_runs())
    return 0


if __name__ == "__main__":
    sys.exit(main())
