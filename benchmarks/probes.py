"""Trains every algorithm on every probe environment and reports which ones it solves (``make probes``).

A run is one (algorithm, probe, seed). It trains an untrained model of the probe's words for the probe's budget of episodes,
then plays greedily from every start state. Each finished run is a line of ``benchmarks/results/probes.jsonl``; a run whose
line holds the same settings is not repeated. The table goes to ``results/probes.md``. The exit code is 1 if a run left its
probe unsolved and scored below AgileRL on the same budget, or if a run's diagnosis found anything but ``solved``.
"""

from __future__ import annotations

import argparse
import fcntl
import inspect
import json
import math
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import PrinterCallback, TrainerCallback
from transformers.utils import logging

from agile_environments.probes import PROBE_WORDS, PROBES, ProbeSpec
from agile_trainers.embedded import make_embedded_model
from agile_trainers.trainers import MultiTurnTrainer, find_algorithm

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results" / "probes.jsonl"
PAGE = ROOT / "results" / "probes.md"
MEANINGS = ROOT.parent / "docs" / "probes.md"
PICTURE = MEANINGS.parent / "images" / "probes.png"
BEGIN, END = "<!-- begin: written by benchmarks/probes.py -->", "<!-- end -->"

SEEDS = (0, 1, 2)
EVALUATIONS = 16
"""Number of evaluations of a run, spread evenly over its budget. The last one, at its end, decides."""
PATIENCE = 4
"""Number of consecutive solved evaluations that end a run early. Lengths are measured over the whole budget."""
PEER_SCORE = {"two_inputs": 0.836}
"""Greedy success of AgileRL 2.9.1 on the probes that it did not solve on the same budget."""
COLORS = ("#0072B2", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#000000", "#E69F00", "#7F7F7F", "#8C510A")
"""A colour per algorithm that colour-blind readers can tell apart (Okabe and Ito)."""
LENGTH_EPISODES = 2048
"""Number of sampled episodes in a mean length."""

Run = dict[str, Any]
"""A finished run, as :func:`run` returns it."""


@dataclass(frozen=True)
class Algorithm:
    """An algorithm of the table, with the options in which it differs from the others."""

    name: str
    """Name by which ``find_algorithm`` finds its trainer."""
    options: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] | None = None
    """Keyword arguments of a ``LoraConfig``; None trains all weights."""
    probes: tuple[str, ...] = tuple(PROBES)


OWN_REWARD = {"eight_turns": {"gamma": 0.1}}
"""Options of algorithms that credit turns, for probes where a turn's reward does not depend on the turns before it."""

ALGORITHMS = {
    "grpo": Algorithm("grpo", {"advantage_granularity": "turn"}),
    "grpo-trajectory": Algorithm("grpo", {"advantage_granularity": "trajectory"}, probes=("eight_turns",)),
    # At twice the rate, a seed of three repeatedly forgot and relearned a start state of `grid`.
    "gspo": Algorithm("gspo", {"learning_rate": 1e-3}),
    "cispo": Algorithm("cispo"),
    "reinforce": Algorithm("reinforce", {"num_generations": 1, "entropy_coef": 0.15}),
    "ppo": Algorithm(
        "ppo",
        # At 3e-3, one seed of five solved `grid` and then lost it: where all episodes succeed, whitening makes a rare
        # failure the largest advantage of its batch.
        {
            "num_generations": 1,
            "per_device_train_batch_size": 64,
            "learning_rate": 1e-3,
            "whiten_advantages": True,
            "bootstrap_at_limits": True,
        },
        {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"},
    ),
}
ALGORITHMS["ppo, critic_layers=1"] = replace(
    ALGORITHMS["ppo"], options=ALGORITHMS["ppo"].options | {"critic_layers": 1}, probes=("delayed",)
)
ALGORITHMS["ppo, defaults"] = replace(
    ALGORITHMS["ppo"],
    options={"num_generations": 1, "per_device_train_batch_size": 64, "learning_rate": 3e-3, "num_iterations": 4},
)
ALGORITHMS["gspo, defaults"] = Algorithm("gspo")
TURN_LEVEL = ("grpo", "reinforce", "ppo", "ppo, critic_layers=1", "ppo, defaults")

RECIPE: dict[str, Any] = {
    "per_device_train_batch_size": 128,
    "num_generations": 8,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "constant",
    "entropy_coef": 0.2,
}
"""Hyperparameters of every probe and algorithm, unless the algorithm overrides them: one on-policy step per batch."""


def settings(algorithm: str, probe: str, seed: int) -> dict[str, Any]:
    """Everything that a run depends on except the code, as JSON. A saved run with other settings is repeated."""
    spec = PROBES[probe]
    row = ALGORITHMS[algorithm]
    options = {**RECIPE, **row.options, **(OWN_REWARD.get(probe, {}) if algorithm in TURN_LEVEL else {})}
    if spec.criterion == "length":
        del options["entropy_coef"]  # entropy may prefer some length
    budget = {**asdict(spec), "factory": spec.factory.__name__}
    chosen = {"algorithm": algorithm, "probe": probe, "seed": seed, "options": options, "budget": budget}
    return chosen if row.lora is None else {**chosen, "lora": row.lora}


def run(algorithm: str, probe: str, seed: int) -> Run:
    """Train once with the settings of the table; see :func:`run_settings`."""
    return run_settings(settings(algorithm, probe, seed))


def run_settings(chosen: dict[str, Any]) -> Run:
    """Train once, from an untrained model, for the probe's budget or until it has stayed solved for a quarter of it.

    Args:
        chosen: What :func:`settings` returns, whose ``options`` may differ from the table's.

    Returns:
        A dict that JSON can hold: ``settings``; ``curve``, a list per column with a value for each evaluation: ``episodes``
        (trained on so far), ``return`` (sampled mean since the last evaluation; None before training) and ``score``;
        ``score``, the last one (greedy success over all start states, or the mean length as a multiple of that before
        training); ``solved``;
        ``episodes_to_solve`` (the first evaluation from which the probe stayed solved, None if it did not);
        ``length_before``, in tokens per answer; ``findings``, the names of what the run's diagnosis said; ``seconds`` of
        training and evaluation.
    """
    spec = PROBES[chosen["probe"]]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = _make_trainer(chosen, folder)
        started = time.perf_counter()
        before = trainer.evaluate()
        trainer.train()
        seconds = time.perf_counter() - started
    length_before = before["eval_tokens_per_turn"]
    curve = _curve([before, *trainer.state.log_history], _episodes_of_a_step(chosen["options"]), spec)
    scores = curve["score"]
    unsolved = [i for i, score in enumerate(scores) if not _solves(score, spec)]
    first_solved = unsolved[-1] + 1 if unsolved else 0
    return {
        "settings": chosen,
        "solved": first_solved < len(scores),
        "score": scores[-1],
        "episodes_to_solve": curve["episodes"][first_solved] if first_solved < len(scores) else None,
        "length_before": length_before,
        "findings": [finding.name for finding in trainer.health.findings],
        "seconds": round(seconds, 1),
        "curve": curve,
    }


def _make_trainer(chosen: dict[str, Any], folder: str) -> MultiTurnTrainer:
    algorithm, spec, seed = ALGORITHMS[chosen["algorithm"]], PROBES[chosen["probe"]], chosen["seed"]
    steps = round(spec.episodes / _episodes_of_a_step(chosen["options"]))
    by_length = spec.criterion == "length"
    trainer_class = find_algorithm(algorithm.name)
    args = trainer_class.config_class(
        output_dir=folder,
        seed=seed,
        max_steps=steps,
        max_turns=spec.factory.max_turns,
        max_new_tokens=spec.max_new_tokens,
        eval_strategy="steps",
        eval_steps=steps // EVALUATIONS,
        logging_steps=steps // EVALUATIONS,
        eval_greedy=not by_length,
        num_eval_episodes=LENGTH_EPISODES if by_length else spec.factory.starts,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        log_rollouts=False,
        disable_tqdm=True,
        # One update of a batch where a row says nothing, as AgileRL.
        **{"num_iterations": 1, **chosen["options"]},
    )
    model = make_embedded_model(f"{folder}/model", words=PROBE_WORDS, max_position_embeddings=512, seed=seed)
    starts = Dataset.from_list([{"start": start} for start in range(spec.factory.starts)])
    trainer = trainer_class(
        model=str(model),
        environment=f"agile:probe/{chosen['probe']}",
        args=args,
        eval_dataset=starts,
        peft_config=None if algorithm.lora is None else LoraConfig(**algorithm.lora),
        callbacks=[] if by_length else [StopWhenSolved(spec)],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


class StopWhenSolved(TrainerCallback):
    """Ends a run after ``PATIENCE`` evaluations in a row that solve its probe."""

    def __init__(self, spec: ProbeSpec):
        self._spec, self._in_a_row = spec, 0

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
        self._in_a_row = self._in_a_row + 1 if _solves(metrics["eval_success"], self._spec) else 0
        if self._in_a_row >= PATIENCE:
            control.should_training_stop = True


def _episodes_of_a_step(options: dict[str, Any]) -> float:
    return options["per_device_train_batch_size"] / options.get("num_iterations", 1)


def _curve(history: Sequence[dict[str, Any]], of_a_step: float, spec: ProbeSpec) -> dict[str, list[Any]]:
    """Columns with a value per evaluation of a trainer's log; the first evaluation is from before training."""
    evaluations = [entry for entry in history if "eval_return" in entry]
    returns = {entry["step"]: entry["return/mean"] for entry in history if "return/mean" in entry}
    metric = "eval_tokens_per_turn" if spec.criterion == "length" else "eval_success"
    unit = evaluations[0][metric] if spec.criterion == "length" else 1.0
    steps = [entry.get("step", 0) for entry in evaluations]
    return {
        "episodes": [round(step * of_a_step) for step in steps],
        "return": [returns.get(step) for step in steps],
        "score": [entry[metric] / unit for entry in evaluations],
    }


def _solves(score: float, spec: ProbeSpec) -> bool:
    return abs(score - 1) <= spec.threshold if spec.criterion == "length" else score >= spec.threshold


# ------------------------------------------------------------------------------------------------------- saved runs


def saved_runs() -> list[Run]:
    """Every saved run, in the order of the table: by algorithm, probe and seed."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def load(chosen: dict[str, Any]) -> Run | None:
    """The saved run with exactly these settings, if there is one."""
    return next((result for result in saved_runs() if result["settings"] == chosen), None)


def save(result: Run) -> None:
    """Write a run to its line, in place of an older run of the same algorithm, probe and seed.

    The whole file is replaced, so that an interrupted program leaves no partial line. A lock lets two programs that run at
    the same time keep each other's runs.
    """
    with open(__file__) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        runs = {_key(saved): saved for saved in saved_runs()} | {_key(result): result}
        partial = RESULTS.with_suffix(".tmp")
        partial.write_text("".join(f"{json.dumps(runs[key])}\n" for key in sorted(runs, key=_place)))
        partial.replace(RESULTS)


def _key(result: Run) -> tuple[str, str, int]:
    chosen = result["settings"]
    return chosen["algorithm"], chosen["probe"], chosen["seed"]


def _place(key: tuple[str, str, int]) -> tuple[int, int, int]:
    algorithm, probe, seed = key
    return [*ALGORITHMS].index(algorithm), [*PROBES].index(probe), seed


def _start_worker() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    logging.get_logger("agile_trainers.monitor.health_checks").setLevel("ERROR")  # a run's line names its findings


def run_all(wanted: Sequence[tuple[str, str, int]], jobs: int, fresh: bool) -> list[Run]:
    """Run what is not saved, ``jobs`` at a time, and print each run as it ends.

    Args:
        wanted: (algorithm, probe, seed) of every run.
        jobs: Processes, one thread each.
        fresh: Repeat saved runs too.

    Returns:
        The runs in the order of ``wanted``.
    """
    done = {} if fresh else {key: saved for key in wanted if (saved := load(settings(*key)))}
    missing = [key for key in wanted if key not in done]
    print(f"{len(wanted)} runs: {len(done)} saved before, {len(missing)} to do, {jobs} at a time", flush=True)
    os.environ["OMP_NUM_THREADS"] = "1"  # for the workers
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=_start_worker) as pool:
        futures = {pool.submit(run, *key): key for key in missing}
        for future in as_completed(futures):
            key, result = futures[future], future.result()
            save(result)
            done[key] = result
            print(f"[{len(done):>{len(str(len(wanted)))}}/{len(wanted)}] {_line(result)}", flush=True)
    return [done[key] for key in wanted]


# ------------------------------------------------------------------------------------------------------------- report


def _line(result: Run) -> str:
    chosen = result["settings"]
    after = f"after {result['episodes_to_solve']} episodes" if result["solved"] else "UNSOLVED"
    name = f"{chosen['algorithm']:<16} {chosen['probe']:<13} seed {chosen['seed']}"
    told = f", {' '.join(result.get('findings') or ['nothing'])} found"
    return f"{name}  {_score_name(PROBES[chosen['probe']])} {result['score']:.2f}, {after}, {result['seconds']:.0f} s{told}"


def _score_name(spec: ProbeSpec) -> str:
    return "length x" if spec.criterion == "length" else "greedy"


def table(results: Sequence[Run]) -> str:
    """A markdown table: a row per (algorithm, probe)."""
    rows: dict[tuple[str, str], list[Run]] = {}
    for result in results:
        rows.setdefault((result["settings"]["algorithm"], result["settings"]["probe"]), []).append(result)
    lines = [
        "| algorithm | probe | solved | score: mean (lowest to highest) | episodes to solve: median (most) | budget | "
        "seconds: mean |",
        "|---|---|---|---|---|---|---|",
    ]
    for (algorithm, probe), runs in rows.items():
        scores = [result["score"] for result in runs]
        needed = sorted(math.inf if (n := result["episodes_to_solve"]) is None else n for result in runs)
        middle, most = (f"{n:.0f}" if n < math.inf else "not solved" for n in (needed[len(needed) // 2], needed[-1]))
        lines.append(
            f"| {algorithm} | {probe} | {sum(result['solved'] for result in runs)}/{len(runs)} "
            f"| {_score_name(PROBES[probe])} {fmean(scores):.3f} ({min(scores):.3f} to {max(scores):.3f}) "
            f"| {middle if middle == 'not solved' else f'{middle} ({most})'} | {PROBES[probe].episodes} "
            f"| {fmean(result['seconds'] for result in runs):.0f} |"
        )
    return "\n".join(lines)


def meanings() -> str:
    """The meaning of failing each probe, from the probes' docstrings."""
    lines = []
    for name, spec in PROBES.items():
        paragraphs = (inspect.getdoc(spec.factory) or "").split("\n\n")
        failing = " ".join(" ".join(paragraphs).split())
        match = re.search(r"(Failure\b.*?\.)( |$)", failing)
        lines.append(f"- `{name}`: {match.group(1) if match else failing}")
    return "\n".join(lines)


def plot(results: Sequence[Run]) -> None:
    """Plot the learning curves of all saved runs: a row per algorithm, a column per probe."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    probes = [name for name, spec in PROBES.items() if spec.criterion == "success"]
    figure, panels = plt.subplots(
        len(ALGORITHMS), len(probes), figsize=(14, 9), sharex="col", sharey=True, layout="constrained", squeeze=False
    )
    for row, algorithm, color in zip(panels, ALGORITHMS, COLORS, strict=True):
        for panel, probe in zip(row, probes, strict=True):
            _draw(panel, [r for r in results if _key(r)[:2] == (algorithm, probe)], probe, color)
        name = algorithm.replace(", ", ",\n").replace("-", "-\n")
        row[0].annotate(name, (-0.3, 0.5), xycoords="axes fraction", ha="right", va="center", fontsize=10)
    for panel, probe in zip(panels[0], probes, strict=True):
        panel.set_title(f"{probe}\n{PROBES[probe].episodes} episodes", fontsize=10)
    figure.supxlabel("episodes, in thousands", fontsize=11)
    figure.supylabel("greedy success over all start states: mean of the seeds, their range shaded", fontsize=11)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110, facecolor="white")
    plt.close(figure)


def _draw(panel: Any, runs: Sequence[Run], probe: str, color: str) -> None:
    """Draw one algorithm on one probe; an empty panel if it has no run."""
    if not runs:
        panel.axis("off")
        return
    budget = PROBES[probe].episodes
    steps = [budget * i // EVALUATIONS for i in range(EVALUATIONS + 1)]
    thousands = [step / 1000 for step in steps]
    scores = list(zip(*([_score_at(run["curve"], step) for step in steps] for run in runs)))
    panel.axhline(PROBES[probe].threshold, color="0.6", linewidth=0.8, linestyle=":")
    panel.fill_between(thousands, *zip(*((min(at), max(at)) for at in scores)), color=color, alpha=0.25, linewidth=0)
    panel.plot(thousands, [fmean(at) for at in scores], color=color, linewidth=1.8)
    panel.set(ylim=(-0.05, 1.08), yticks=(0, 0.5, 1), xlim=(0, budget / 1000))
    panel.spines[["top", "right"]].set_visible(False)


def _score_at(curve: dict[str, list[Any]], episodes: int) -> float:
    """The score of the last evaluation up to some episode; a run that ended early keeps its last score."""
    return [score for at, score in zip(curve["episodes"], curve["score"], strict=True) if at <= episodes][-1]


def write_pages(results: Sequence[Run]) -> None:
    """Write table and picture of ``results/probes.md``, and the meanings in ``docs/probes.md``, between their markers."""
    image = f"![Learning curves: a row per algorithm, a column per probe](../../docs/images/{PICTURE.name})"
    for page, written in ((PAGE, f"{table(results)}\n\n{image}"), (MEANINGS, meanings())):
        head, _, rest = page.read_text().partition(BEGIN)
        page.write_text(f"{head}{BEGIN}\n\n{written}\n\n{END}{rest.partition(END)[2]}")


def main() -> int:
    """Run and report. Return 1 if a run left its probe unsolved and scored below AgileRL, or is said to have a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--probes", nargs="+", choices=PROBES, default=list(PROBES))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="runs at the same time")
    parser.add_argument("--fresh", action="store_true", help="repeat saved runs too")
    parser.add_argument("--report", action="store_true", help="run nothing; write the pages from the saved runs")
    options = parser.parse_args()
    wanted = [
        (a, p, s)
        for a in options.algorithms
        for p in options.probes
        if p in ALGORITHMS[a].probes
        for s in options.seeds
    ]
    if options.report:
        results = [saved for key in wanted if (saved := load(settings(*key))) is not None]
    else:
        results = run_all(wanted, options.jobs, options.fresh)
    print(f"\n{table(results)}")
    everything = (
        {*options.probes} >= {*PROBES} and {*options.seeds} >= {*SEEDS} and {*options.algorithms} >= {*ALGORITHMS}
    )
    if everything:
        plot(results)
        write_pages(results)
        print(f"\nWritten to {PAGE.relative_to(ROOT.parent)}.")
    return 0 if all(_meets_bar(result) for result in results) else 1


def _meets_bar(result: Run) -> bool:
    """Return True if a run solved its probe, or scored at least as high as AgileRL on a probe that AgileRL did not solve.

    Its diagnosis must not have found anything but ``solved``.
    """
    if {*result.get("findings", ())} - {"solved"}:
        return False
    return result["solved"] or result["score"] >= PEER_SCORE.get(result["settings"]["probe"], math.inf)


if __name__ == "__main__":
    sys.exit(main())
