"""Measures what task sampling saves: adaptive beside uniform draws, and replaced groups without signal, over seeds.

``mixed`` plays guess-the-number with ranges of 4 to 64 numbers in 4 guesses from a model that saw games of all ranges, once
with each ``task_sampling``. ``demo`` is the RL stage of ``agile-trainers demo`` with and without ``resample_silent_groups``.
Each finished run is a line of ``benchmarks/results/task_sampling.jsonl`` and is not repeated. The table goes to
``docs/task_sampling.md``. The exit code is 1 if a target is missed.
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
from transformers import PrinterCallback, TrainerCallback
from transformers.utils import logging

from agile_environments.guess_number import GuessNumber, demonstrations, random_legal_player
from agile_trainers import embedded
from agile_trainers.cli.demo import command as demo
from agile_trainers.embedded import make_embedded_model, words_of
from agile_trainers.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results" / "task_sampling.jsonl"
PAGE = ROOT.parent / "docs" / "task_sampling.md"
BEGIN, END = "<!-- begin: written by benchmarks/task_sampling.py -->", "<!-- end -->"
BASES = Path("runs/task_sampling")
"""Folder of the models that runs start from; they are made once."""
RANGES, GUESSES, GROUP, GROUPS = (4, 8, 16, 32, 64), 4, 8, 16
SFT_STEPS, UPDATES, EVERY, EVALUATED = 400, 100, 10, 500
"""Updates of the two stages of ``mixed``, updates between two evaluations, and episodes of one."""
DEMO_UPDATES, RESAMPLED = 300, 2
SHARE_OF_BEST, TARGET_RATIO, TARGET_FACTOR = 0.9, 0.7, 2.0
Run = dict[str, Any]


class _Evaluate(TrainerCallback):
    """Evaluates every few updates, and keeps the success and the episodes played so far."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.curve: list[tuple[int, float]] = []

    def note(self) -> None:
        episodes = self.trainer.state.global_step * GROUP * GROUPS
        self.curve.append((episodes, self.trainer.evaluate()["eval_success"]))

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
        for game in demonstrations(count, 0, random_legal_player, GuessNumber(high=high, max_turns=GUESSES))
    ]
    untrained = make_embedded_model(folder / "untrained", words=words_of(games, "invalid", "correct"), seed=0)
    return _saved(embedded.sft_trainer(untrained, games, folder / "sft", seed=0, max_steps=SFT_STEPS))


def _saved(trainer: Any) -> Path:
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_model()
    return Path(trainer.args.output_dir)


def mixed(seed: int, arm: str) -> Run:
    """Train on all ranges with one way of drawing them; return success over episodes."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Dataset.from_list([{"high": high} for high in RANGES for _ in range(GROUPS)])
        # The same number of games of each range, with secrets spread over it.
        number = EVALUATED // len(RANGES)
        secrets = [{"high": high, "secret": 1 + n * high // number} for high in RANGES for n in range(number)]
        watch = _Evaluate()
        watch.trainer = trainer = MultiTurnGRPOTrainer(
            model=str(mixed_base()),
            environment=lambda: GuessNumber(max_turns=GUESSES),
            args=MultiTurnGRPOConfig(
                output_dir=f"{folder}/rl",
                task_sampling=arm,
                task_column="high",
                max_turns=GUESSES,
                max_new_tokens=2,
                num_generations=GROUP,
                per_device_train_batch_size=GROUP * GROUPS,
                max_steps=UPDATES,
                num_eval_episodes=EVALUATED,
                learning_rate=3e-3,
                lr_scheduler_type="constant",
                entropy_coef=0.02,
                advantage_granularity="trajectory",
                beta=0.0,
                seed=seed,
                **_QUIET,
            ),
            train_dataset=rows,
            eval_dataset=Dataset.from_list(secrets),
            peft_config=demo.lora(),
            callbacks=[watch],
        )
        trainer.remove_callback(PrinterCallback)
        watch.note()
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "groups_without_signal" in entry]
    shares = {high: round(fmean(log.get(f"tasks/{high}/share", 0.0) for log in logs), 3) for high in RANGES}
    signal = round(1 - fmean(log["groups_without_signal"] for log in logs), 3)
    return {"curve": [[n, round(success, 4)] for n, success in watch.curve], "shares": shares, "signal": signal}


_QUIET: dict[str, Any] = {
    "gradient_checkpointing": False, "bf16": False, "use_cpu": True, "save_strategy": "no", "report_to": "none",
    "logging_steps": 1, "disable_tqdm": True, "log_rollouts": 0, "diagnosis_interval": 0,
}  # fmt: skip


def demo_stage(seed: int, arm: str) -> Run:
    """Train as the demo does; return the share of groups with a signal over its last third, and episodes played."""
    budget = replace(demo.Budget(), rl_steps=DEMO_UPDATES, eval_episodes=600)
    base = BASES / f"demo-{seed}" / "sft"
    if not (base / "model.safetensors").is_file():
        words = words_of(demonstrations(100), "invalid", "correct")
        _saved(
            demo.sft_trainer(make_embedded_model(base.parent / "untrained", words=words, seed=seed), base, seed, budget)
        )
    with tempfile.TemporaryDirectory() as folder:
        args = demo.make_arguments(Path(folder), seed, budget)
        args.log_rollouts, args.diagnosis_interval = 0, 0
        args.resample_silent_groups = RESAMPLED if arm == "resampled" else 0
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
    logs = [entry for entry in trainer.state.log_history if "groups_without_signal" in entry]
    last = logs[len(logs) * 2 // 3 :]
    updates, batch = len(logs), GROUP * demo.HIGH
    return {
        "signal": round(1 - fmean(log["groups_without_signal"] for log in last), 4),
        "episodes": int(logs[-1].get("episodes_played", updates * batch)),
        "episodes_per_update": round(batch + GROUP * fmean(log.get("resampling/groups", 0.0) for log in last), 1),
        "success": round(success, 4),
    }


PARTS = {"mixed": (mixed, ("uniform", "adaptive")), "demo": (demo_stage, ("plain", "resampled"))}


def settings(part: str) -> dict[str, Any]:
    """Return what a run of a part depends on, except the code."""
    if part == "demo":
        return {"updates": DEMO_UPDATES, "resample_silent_groups": RESAMPLED}
    return {"ranges": list(RANGES), "sft": SFT_STEPS, "updates": UPDATES, "every": EVERY, "episodes": EVALUATED}


# --------------------------------------------------------------------------------------------------------------- summary


def smooth(curve: list[list[float]]) -> tuple[np.ndarray, np.ndarray]:
    """Return episodes, and the mean of each success with its neighbours."""
    episodes, success = np.array(curve, dtype=float).T
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


def summarize(runs: list[Run]) -> dict[str, Any]:
    """Compare the arms of each part, seed by seed; means and intervals of ratios are geometric over seeds."""
    found: dict[str, Any] = {}
    for part, (_, (base, other)) in PARTS.items():
        by = {(run["seed"], run["arm"]): run for run in runs if run["part"] == part}
        pairs = [(by[seed, base], by[seed, other]) for seed, arm in sorted(by) if arm == base and (seed, other) in by]
        if pairs:
            found[part] = (_mixed_summary if part == "mixed" else _demo_summary)(pairs)
            found[part]["seeds"] = [plain["seed"] for plain, _ in pairs]
    return found


def _compared(ratios: list[float]) -> dict[str, Any]:
    return {"ratio": float(np.exp(np.log(ratios).mean())), "interval": interval(ratios)}


def _columns(pairs: list[tuple[Run, Run]], value: Callable[[Run], float]) -> list[float]:
    """Return the mean of a value over seeds, of both arms."""
    return [fmean(value(pair[arm]) for pair in pairs) for arm in (0, 1)]


def _mixed_summary(pairs: list[tuple[Run, Run]]) -> dict[str, Any]:
    """Compare the episodes to .9 of the best smoothed success of either run of a seed, and to .9 of its gain.

    The gain is over the first evaluation, which both runs of a seed share. A run that does not reach it counts with all its
    episodes. There is no ratio of the first if a run begins there.
    """
    best = [max(smooth(run["curve"])[1].max() for run in pair) for pair in pairs]
    first = [pair[0]["curve"][0][1] for pair in pairs]
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
        "start": _columns(pairs, lambda run: run["curve"][0][1]),
        "success": _columns(pairs, lambda run: float(smooth(run["curve"])[1][-1])),
        "signal": _columns(pairs, lambda run: run["signal"]),
    }


def _demo_summary(pairs: list[tuple[Run, Run]]) -> dict[str, Any]:
    return {
        "compared": {"signal": _compared([other["signal"] / base["signal"] for base, other in pairs])},
        **{name: _columns(pairs, lambda run: run[name]) for name in ("signal", "episodes", "success")},  # noqa: B023
    }


def table(found: dict[str, Any]) -> str:
    """Write the summary as a table."""
    rows = ["| | seeds | without | with | ratio (95 % interval) |", "|---|---|---|---|---|"]

    def row(label: str, of: dict[str, Any], name: str, form: str) -> None:
        ratio, shown = of["compared"].get(name, ""), ""
        if ratio is None:
            shown = "none: a run begins there"
        elif ratio:
            shown = f"{ratio['ratio']:.2f} ({ratio['interval'][0]:.2f} to {ratio['interval'][1]:.2f})"
        columns = " | ".join(format(value, form) for value in of[name])
        rows.append(f"| {label} | {len(of['seeds'])} | {columns} | {shown} |")

    if of := found.get("mixed"):
        row("adaptive draws: episodes to .9 of the best success", of, "needed", ",.0f")
        row("adaptive draws: episodes to .9 of the gain in success", of, "gained", ",.0f")
        row("adaptive draws: success before training", of, "start", ".3f")
        row("adaptive draws: success after training", of, "success", ".3f")
        row("adaptive draws: share of groups with a signal", of, "signal", ".2f")
    if of := found.get("demo"):
        row("replacing: share of groups with a signal, last third", of, "signal", ".3f")
        row("replacing: episodes of the run", of, "episodes", ",.0f")
        row("replacing: success after training", of, "success", ".3f")
    return "\n".join(rows)


def load() -> list[Run]:
    """Return the saved runs whose settings are those of this file."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.is_file() else []
    return [run for run in map(json.loads, lines) if run["settings"] == settings(run["part"])]


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
        run = {"part": part, "arm": arm, "seed": seed, "settings": settings(part), **PARTS[part][0](seed, arm)}
        run["cpu_seconds"] = round(time.process_time() - started, 1)
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(run, separators=(",", ":")) + "\n")
        print(json.dumps(run), flush=True)
    found = summarize(load())
    print(json.dumps(found, indent=1))
    page = PAGE.read_text(encoding="utf-8")
    before, after = page[: page.index(BEGIN) + len(BEGIN)], page[page.index(END, page.index(BEGIN)) :]
    PAGE.write_text(f"{before}\n\n{table(found)}\n\n{after}", encoding="utf-8")
    saved, factor = (found[part]["compared"][name] for part, name in (("mixed", "needed"), ("demo", "signal")))
    return 0 if saved and saved["ratio"] <= TARGET_RATIO and factor["ratio"] >= TARGET_FACTOR else 1


if __name__ == "__main__":
    sys.exit(main())
