"""Measures what task sampling saves: adaptive beside uniform draws, and replaced zero-advantage groups, over seeds.

``mixed`` plays guess-the-number with ranges of 4 to 64 numbers in 4 guesses from a model that saw games of all ranges, once
with each ``task_sampling``. ``demo`` is the RL stage of ``agile-trainers demo`` with several values of
``resample_zero_advantage_groups``. Each finished run is a line of ``benchmarks/results/task_sampling.jsonl`` and is not
repeated. The tables go to ``results/learning.md``, the picture to ``docs/images/``. The exit code is 1 if a target is
missed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
from datasets import Dataset, disable_progress_bars
from matplotlib.figure import Figure
from transformers import PrinterCallback, TrainerCallback
from transformers.utils import logging

from agile_environments.guess_number import GuessNumber, demonstrations, random_legal_policy
from agile_trainers import embedded
from agile_trainers.cli import demo as demo
from agile_trainers.embedded import make_embedded_model, words_of
from agile_trainers.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results" / "task_sampling.jsonl"
PAGE = ROOT / "results" / "learning.md"
PICTURE = ROOT.parent / "docs" / "images" / "task_sampling.png"
BEGIN, END = "<!-- begin: written by benchmarks/task_sampling.py -->", "<!-- end -->"
BASES = Path("runs/task_sampling")
"""Folder of the models that runs start from; they are made once."""
RANGES, GUESSES, GROUP, GROUPS = (4, 8, 16, 32, 64), 4, 8, 16
SFT_STEPS, UPDATES, EVERY = 1000, 320, 20
"""Updates of the two stages of ``mixed``, and updates between two evaluations."""
LEARNING_RATE, ENTROPY = 2e-3, 0.03
"""Learning rate and entropy bonus of the best uniform run that was tried; both fall linearly to 0."""
ROWS, EVALUATED = 64, 128
"""Rows of each range, whose secrets are spread over it, and episodes of each range in one evaluation."""
HALVING = fmean(min(1.0, (2**GUESSES - 1) / high) for high in RANGES)
"""Success of the best policy, which finds 15 numbers in 4 guesses."""
MIXED_ARMS: dict[str, dict[str, Any]] = {
    "uniform": {"task_sampling": "uniform"},
    "adaptive": {"task_sampling": "adaptive"},  # a task is a row
    "adaptive by game": {"task_sampling": "adaptive", "task_column": "game"},  # rows of the same game are a task
}
DEMO_UPDATES = 300
DEMO_ARMS: dict[str, dict[str, Any]] = {
    "none": {},
    "replace 2": {"resample_zero_advantage_groups": 2},
    "replace 4": {"resample_zero_advantage_groups": 4},
    "replace 2, adaptive": {"resample_zero_advantage_groups": 2, "task_sampling": "adaptive"},
}
SHARE_OF_BEST, TARGET_RATIO, TARGET_FACTOR = 0.9, 0.7, 2.0
Run = dict[str, Any]


class Game(GuessNumber):
    """A game whose row may name it, for ``task_column``."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed, {name: value for name, value in (options or {}).items() if name != "game"})


class _Evaluate(TrainerCallback):
    """Evaluates every range after every few updates, and keeps the episodes played so far and the successes."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.curve: list[list[float]] = []
        secrets = range(EVALUATED)
        self.rows = [
            Dataset.from_list([{"high": high, "secret": 1 + n * high // EVALUATED} for n in secrets]) for high in RANGES
        ]

    def note(self) -> None:
        successes = [self.trainer.evaluate(rows)["eval_success"] for rows in self.rows]
        self.curve.append(
            [self.trainer.state.global_step * GROUP * GROUPS, *(round(success, 4) for success in successes)]
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % EVERY == 0:
            self.note()


def mixed_base() -> Path:
    """Teach an untrained model the format and the meaning of the hints by random legal games of all ranges, once."""
    folder = BASES / f"mixed-{SFT_STEPS}"
    if (folder / "sft" / "model.safetensors").is_file():
        return folder / "sft"
    count = SFT_STEPS * 32 // len(RANGES)
    games = [
        game
        for high in RANGES
        for game in demonstrations(count, 0, random_legal_policy, GuessNumber(high=high, max_turns=GUESSES))
    ]
    untrained = make_embedded_model(folder / "untrained", words=words_of(games, "invalid", "correct"), seed=0)
    return _saved(
        embedded.sft_trainer(untrained, games, folder / "sft", seed=0, max_steps=SFT_STEPS, lr_scheduler_type="linear")
    )


def _saved(trainer: Any) -> Path:
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_model()
    return Path(trainer.args.output_dir)


def mixed(seed: int, arm: str) -> Run:
    """Train on rows of all ranges with one way of drawing them.

    Returns:
        ``curve``, for each evaluation the episodes played and the success at each range; ``informative_shares``, the share
        of informative groups (with an advantage) before each evaluation but the first.
    """
    with tempfile.TemporaryDirectory() as folder:
        games = [(high, 1 + n * high // ROWS) for high in RANGES for n in range(ROWS)]
        rows = [{"high": high, "secret": secret, "game": f"{high}-{secret}"} for high, secret in games]
        watch = _Evaluate()
        watch.trainer = trainer = MultiTurnGRPOTrainer(
            model=str(mixed_base()),
            environment=lambda: Game(max_turns=GUESSES),
            args=MultiTurnGRPOConfig(
                output_dir=f"{folder}/rl",
                num_iterations=1,
                **MIXED_ARMS[arm],
                max_turns=GUESSES,
                max_new_tokens=2,
                num_generations=GROUP,
                per_device_train_batch_size=GROUP * GROUPS,
                max_steps=UPDATES,
                num_eval_episodes=EVALUATED,
                learning_rate=LEARNING_RATE,
                lr_scheduler_type="linear",
                entropy_coef=ENTROPY,
                entropy_coef_schedule="linear",
                advantage_granularity="trajectory",
                beta=0.0,
                seed=seed,
                **_QUIET,
            ),
            train_dataset=Dataset.from_list(rows),
            callbacks=[watch],
        )
        trainer.remove_callback(PrinterCallback)
        watch.note()
        trainer.train()
    shares = [1 - log["zero_advantage_groups"] for log in trainer.state.log_history if "zero_advantage_groups" in log]
    # One value for each evaluation but the first.
    shares = [round(fmean(shares[n : n + EVERY]), 4) for n in range(0, len(shares), EVERY)]
    return {"curve": watch.curve, "informative_shares": shares}


_QUIET: dict[str, Any] = {
    "gradient_checkpointing": False, "bf16": False, "use_cpu": True, "save_strategy": "no", "report_to": "none",
    "logging_steps": 1, "disable_tqdm": True, "log_rollouts": 0, "diagnosis_interval": 0,
}  # fmt: skip


def demo_stage(seed: int, arm: str) -> Run:
    """Train as the demo does; return the share of groups with an advantage over its last third, and episodes played."""
    budget = replace(demo.Budget(), rl_steps=DEMO_UPDATES, eval_episodes=600)
    base = BASES / f"demo-{seed}" / "sft"
    if not (base / "model.safetensors").is_file():
        words = words_of(demonstrations(100), "invalid", "correct")
        _saved(
            demo.make_sft_trainer(
                make_embedded_model(base.parent / "untrained", words=words, seed=seed), base, seed, budget
            )
        )
    with tempfile.TemporaryDirectory() as folder:
        # The demo's options when the results were recorded.
        args = demo.make_arguments(Path(folder), seed, budget, num_iterations=1, entropy_coef=0.08)
        args.log_rollouts, args.diagnosis_interval = 0, 0
        for name, value in DEMO_ARMS[arm].items():
            setattr(args, name, value)
        trainer = MultiTurnGRPOTrainer(
            model=str(base),
            environment=demo.ENVIRONMENT,
            args=args,
            train_dataset=demo.secrets(),
            eval_dataset=demo.secrets(),
            peft_config=demo.lora(),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        success = trainer.evaluate()["eval_success"]
    logs = [entry for entry in trainer.state.log_history if "zero_advantage_groups" in entry]
    last = logs[len(logs) * 2 // 3 :]
    updates, batch = len(logs), GROUP * demo.HIGH
    return {
        "informative": round(1 - fmean(log["zero_advantage_groups"] for log in last), 4),
        "episodes": int(logs[-1].get("episodes_played", updates * batch)),
        "episodes_per_update": round(batch + GROUP * fmean(log.get("resampling/groups", 0.0) for log in last), 1),
        "success": round(success, 4),
    }


PARTS = {"mixed": (mixed, tuple(MIXED_ARMS)), "demo": (demo_stage, tuple(DEMO_ARMS))}


def settings(part: str, arm: str) -> dict[str, Any]:
    """Return what a run of a part depends on, except the code."""
    if part == "demo":
        return {"updates": DEMO_UPDATES, **DEMO_ARMS[arm]}
    return {
        "ranges": list(RANGES), "rows": ROWS, "sft": SFT_STEPS, "updates": UPDATES, "every": EVERY, "episodes": EVALUATED,
        "learning_rate": LEARNING_RATE, "entropy_coef": ENTROPY, "group": GROUP, "groups": GROUPS,
    }  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- summary


def smooth(curve: list[list[float]]) -> tuple[np.ndarray, np.ndarray]:
    """Return episodes, and the mean of each success over ranges with its neighbours."""
    episodes, success = np.array([[n, fmean(of_ranges)] for n, *of_ranges in curve]).T
    padded = np.pad(success, 1, mode="edge")
    return episodes, (padded[:-2] + padded[1:-1] + padded[2:]) / 3


def episodes_to(curve: list[list[float]], success: float) -> float:
    """Return the episodes after which the smoothed curve first reaches a success, interpolated; the last if it does not."""
    episodes, values = smooth(curve)
    reached = np.flatnonzero(values >= success)
    if not len(reached):
        return float(episodes[-1])
    at = int(reached[0])
    return float(np.interp(success, values[at - 1 : at + 1], episodes[at - 1 : at + 1])) if at else 0.0


def interval(values: list[float], seed: int = 0) -> tuple[float, float]:
    """Return the percentile bootstrap interval (95 %) of the geometric mean over seeds."""
    logs = np.log(values)
    drawn = np.random.default_rng(seed).integers(len(logs), size=(10_000, len(logs)))
    low, high = np.quantile(np.exp(logs[drawn].mean(axis=1)), (0.025, 0.975))
    return float(low), float(high)


def summarize(runs: list[Run]) -> dict[str, dict[str, Any]]:
    """Compare the arms of each part with its first arm, seed by seed; means of ratios are geometric over seeds.

    Returns:
        Comparisons by part and arm, of the pairs that are there.
    """
    found: dict[str, dict[str, Any]] = {}
    for part, (_, (base, *others)) in PARTS.items():
        by = {(run["seed"], run["arm"]): run for run in runs if run["part"] == part}
        for other in others:
            seeds = sorted(seed for seed, arm in by if arm == other and (seed, base) in by)
            if seeds:
                pairs = [(by[seed, base], by[seed, other]) for seed in seeds]
                compared = (_mixed_summary if part == "mixed" else _demo_summary)(pairs)
                found.setdefault(part, {})[other] = {"seeds": seeds, **compared}
    return found


def _compared(ratios: list[float]) -> dict[str, Any]:
    return {"ratio": float(np.exp(np.log(ratios).mean())), "interval": interval(ratios) if len(ratios) > 1 else None}


def _columns(pairs: list[tuple[Run, Run]], value: Callable[[Run], float]) -> list[float]:
    """Return the mean of a value over seeds, of both arms."""
    return [fmean(value(pair[arm]) for pair in pairs) for arm in (0, 1)]


def _mixed_summary(pairs: list[tuple[Run, Run]]) -> dict[str, Any]:
    """Compare the episodes to .9 of the best smoothed success of either run of a seed, and to .9 of its gain.

    The gain is over the first evaluation, which both runs of a seed share. A run that does not reach it counts with all its
    episodes. There is no ratio of the first if a run begins there.
    """
    best = [max(smooth(run["curve"])[1].max() for run in pair) for pair in pairs]
    first = [fmean(pair[0]["curve"][0][1:]) for pair in pairs]
    targets = {
        "needed": [SHARE_OF_BEST * top for top in best],
        "gained": [start + SHARE_OF_BEST * (top - start) for top, start in zip(best, first, strict=True)],
    }
    needed = {
        name: [[episodes_to(run["curve"], aim) for run in pair] for pair, aim in zip(pairs, aims, strict=True)]
        for name, aims in targets.items()
    }
    compared = {
        name: _compared([other / base for base, other in counts]) if min(map(min, counts)) > 0 else None
        for name, counts in needed.items()
    }
    return {
        "compared": compared,
        **{name: [fmean(column) for column in zip(*counts)] for name, counts in needed.items()},
        "start": _columns(pairs, lambda run: fmean(run["curve"][0][1:])),
        "success": _columns(pairs, lambda run: float(smooth(run["curve"])[1][-1])),
        "informative": _columns(pairs, lambda run: fmean(run["informative_shares"])),
        **{
            f"range of {high}": _columns(pairs, lambda run: fmean(point[at] for point in run["curve"][-3:]))  # noqa: B023
            for at, high in enumerate(RANGES, 1)
        },
    }


def _demo_summary(pairs: list[tuple[Run, Run]]) -> dict[str, Any]:
    names = ("informative", "episodes", "episodes_per_update", "success")
    ratios = {name: [other[name] / base[name] for base, other in pairs] for name in names[:2]}
    return {
        "compared": {name: _compared(of_seeds) for name, of_seeds in ratios.items()},
        **{name: _columns(pairs, lambda run: run[name]) for name in names},  # noqa: B023
    }


def _shown(ratio: dict[str, Any] | None) -> str:
    if ratio is None:
        return "none: a run begins there"
    if ratio["interval"] is None:
        return f"{ratio['ratio']:.2f} (one seed)"
    return f"{ratio['ratio']:.2f} ({ratio['interval'][0]:.2f} to {ratio['interval'][1]:.2f})"


def mixed_table(arm: str, of: dict[str, Any]) -> str:
    """Write the comparison of an arm with uniform draws as a table."""
    labels = {
        "needed": ("episodes to .9 of the best success", ",.0f"),
        "gained": ("episodes to .9 of the gain in success", ",.0f"),
        "start": ("success before training", ".3f"),
        "success": ("success after training", ".3f"),
        **{f"range of {high}": (f"success after training, range of {high}", ".2f") for high in RANGES},
        "informative": ("share of groups with an advantage", ".2f"),
    }
    rows = [f"| {len(of['seeds'])} seeds | uniform | {arm} | ratio (95 % interval) |", "|---|---|---|---|"]
    for name, (label, form) in labels.items():
        ratio = _shown(of["compared"][name]) if name in of["compared"] else ""
        rows.append(f"| {label} | {of[name][0]:{form}} | {of[name][1]:{form}} | {ratio} |")
    return "\n".join(rows)


def demo_table(arms: dict[str, dict[str, Any]]) -> str:
    """Write the comparison of arms of the demo as a table, a row per arm."""
    rows = [
        "| options | seeds | groups with an advantage, last third | over none | episodes | over none | success after |",
        "|---|---|---|---|---|---|---|",
    ]
    largest = max(arms.values(), key=lambda of: len(of["seeds"]))
    named = [("none", 0, largest), *((arm, 1, of) for arm, of in arms.items())]
    for arm, at, of in named:
        informative, episodes = (_shown(of["compared"][name]) if at else "" for name in ("informative", "episodes"))
        options = ", ".join(f"`{name}={value!r}`" for name, value in DEMO_ARMS[arm].items()) or "none"
        cells = [options, str(len(of["seeds"])), f"{of['informative'][at]:.3f}", informative]
        cells += [f"{of['episodes'][at]:,.0f}", episodes, f"{of['success'][at]:.3f}"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def tables(found: dict[str, dict[str, Any]]) -> str:
    """Write the summary as tables."""
    parts = [mixed_table(arm, of) for arm, of in found.get("mixed", {}).items()]
    return "\n\n".join([*parts, *([demo_table(found["demo"])] if "demo" in found else [])])


def picture(runs: list[Run]) -> Figure:
    """Draw success and share of groups with an advantage over episodes: mean of each arm, and the range over seeds."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    success, informative = figure.subplots(1, 2)
    for arm, color in zip(MIXED_ARMS, ("tab:gray", "tab:blue", "tab:green")):
        of_arm = [run for run in runs if run["part"] == "mixed" and run["arm"] == arm]
        if not of_arm:
            continue
        episodes = smooth(of_arm[0]["curve"])[0]
        successes, shares = [smooth(run["curve"])[1] for run in of_arm], [run["informative_shares"] for run in of_arm]
        for axes, at, values in ((success, episodes, successes), (informative, episodes[1:], shares)):
            axes.plot(at, np.mean(values, axis=0), color=color, label=arm)
            axes.fill_between(at, np.min(values, axis=0), np.max(values, axis=0), color=color, alpha=0.2, linewidth=0)
    success.axhline(HALVING, color="black", linestyle=":", linewidth=1, label="halving")
    success.set(xlabel="episodes", ylabel="success, mean of the ranges")
    informative.set(xlabel="episodes", ylabel="share of groups with an advantage", ylim=(0, None))
    success.legend(loc="lower right", frameon=False)
    return figure


def load() -> list[Run]:
    """Return the saved runs whose settings are those of this file."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.is_file() else []
    return [
        run
        for run in map(json.loads, lines)
        if run["arm"] in PARTS[run["part"]][1] and run["settings"] == settings(run["part"], run["arm"])
    ]


def main() -> int:
    """Run what is missing, and summarize."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2, 3, 4], help="none: only write the table")
    options = parser.parse_args()
    disable_progress_bars()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    wanted = [(seed, part, arm) for seed in options.seeds for part in options.parts for arm in PARTS[part][1]]
    for seed, part, arm in wanted:
        if any((run["seed"], run["part"], run["arm"]) == (seed, part, arm) for run in load()):
            continue
        started = time.process_time()
        run = {"part": part, "arm": arm, "seed": seed, "settings": settings(part, arm), **PARTS[part][0](seed, arm)}
        run["cpu_seconds"] = round(time.process_time() - started, 1)
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(run, separators=(",", ":")) + "\n")
        print(json.dumps(run), flush=True)
    found = summarize(load())
    print(json.dumps(found, indent=1))
    if set(found) != set(PARTS):
        return 1  # a part has no runs yet
    page = PAGE.read_text(encoding="utf-8")
    before, after = page[: page.index(BEGIN) + len(BEGIN)], page[page.index(END, page.index(BEGIN)) :]
    PAGE.write_text(f"{before}\n\n{tables(found)}\n\n{after}", encoding="utf-8")
    picture(load()).savefig(PICTURE, dpi=130)
    saved = [of["compared"]["needed"]["ratio"] for of in found["mixed"].values() if of["compared"]["needed"]]
    factor = max(of["compared"]["informative"]["ratio"] for of in found["demo"].values())
    return 0 if saved and min(saved) <= TARGET_RATIO and factor >= TARGET_FACTOR else 1


if __name__ == "__main__":
    sys.exit(main())
