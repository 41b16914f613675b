"""Compares a population with a single tuned run on the demo's game, from the demo's SFT model (``make bench-populations``).

For each seed: the demo's run with the learning rates 3e-3 and 5e-3, cut to ``--steps`` updates, of which the better one
counts as tuned; a population of 8 members whose learning
rates are drawn over a factor of 100, by successive halving, with twice the run's episodes, evaluations included; and the
member with the lowest learning rate as a run of its own. The result goes to ``benchmarks/results/populations.json``, part by
part; what is there is not repeated.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from datasets import disable_progress_bars
from population_side import sizes
from transformers import PrinterCallback

from agile_environments.guess_number import demonstrations
from agile_trainers.cli.demo import (
    ENVIRONMENT,
    GROUP,
    HIGH,
    Budget,
    lora,
    make_arguments,
    make_sft_trainer,
    make_trainer,
    secrets,
)
from agile_trainers.embedded import make_embedded_model, words_of
from agile_trainers.evaluation import EpisodeOptions, evaluate_policy
from agile_trainers.populations import HyperparameterConfig, Population, Range, Round

RESULTS = Path(__file__).resolve().parent / "results" / "populations.json"
MEMBERS, LOW, HIGH_RATE = 8, 1e-4, 1e-2
TUNED = (3e-3, 5e-3)
"""Learning rates of the single runs; the better one counts."""
BATCH = GROUP * HIGH
RECORDED: dict[str, Any] = {"num_iterations": 1, "entropy_coef": 0.08}
"""The demo's options when the results were recorded."""
FINAL_EPISODES = 1200
ENDS = tuple(fifteenths / 15 for fifteenths in (1, 2, 4, 8, 10, 12, 14))
"""Ends of the rounds but the last, in shares of a run: after the third one member is left, whose best policy counts."""


def base_model(output: Path) -> Path:
    """Make the demo's SFT model, once."""
    folder = output / "sft"
    if not (folder / "done").is_file():
        words = words_of(demonstrations(100), "invalid", "correct")
        untrained = make_embedded_model(output / "untrained", words=words, seed=0)
        trainer = make_sft_trainer(untrained, folder, 0, Budget())
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        trainer.save_model()
        (folder / "done").touch()
    return folder


def success_of(policy: Path, options: EpisodeOptions) -> float:
    """Return the success of a saved policy over the same games for all."""
    results = evaluate_policy(
        str(policy), None, ENVIRONMENT, FINAL_EPISODES, rows=secrets(), seed=1234, options=options, device="cpu"
    )
    return results.metrics["success"]


def single_run(base: Path, folder: Path, seed: int, steps: int, rate: float) -> dict[str, float]:
    """Train the demo's run with this learning rate."""
    started = time.perf_counter()
    trainer = make_trainer(str(base), folder, seed, Budget(rl_steps=steps), lora(), learning_rate=rate, **RECORDED)
    trainer.train()
    trainer.save_model(str(folder / "policy"))
    success = success_of(folder / "policy", EpisodeOptions.of_args(trainer.args))
    return {
        "success": success,
        "learning_rate": rate,
        "episodes": steps * BATCH,
        "seconds": time.perf_counter() - started,
    }


def search(base: Path, folder: Path, seed: int, steps: int) -> dict[str, Any]:
    """Run a population with twice the episodes of a single run, evaluations included."""
    ends = [round(steps * share) for share in ENDS]
    living = [max(1, MEMBERS >> number) for number in range(len(ends) + 1)]
    trained = sum(
        members * (end - start) for members, start, end in zip(living, [0, *ends], [*ends, steps], strict=True)
    )
    evaluations = sum(living)
    args = make_arguments(folder, seed, Budget(rl_steps=steps), **RECORDED)
    args.num_eval_episodes = (2 * steps - trained) * BATCH // evaluations // HIGH * HIGH
    rates = HyperparameterConfig(learning_rate=Range(LOW, HIGH_RATE, log=True))
    population = Population(
        "grpo", str(base), args, ENVIRONMENT, rates, members=MEMBERS, rounds=ends, strategy="halving", seed=seed,
        train_dataset=secrets(), eval_dataset=secrets(), peft_config=lora(),
        on_trainer=lambda trainer, _: trainer.remove_callback(PrinterCallback),
    )  # fmt: skip
    digest = population.base.digest()

    def show(done: Round) -> None:
        best = done.trained[0]
        print(f"  round {done.number}: member {best.member} {best.hyperparameters} {best.fitness:.3f}", flush=True)

    lineage = population.run(show)
    best = lineage.winner
    assert best is not None
    winner = population.export(folder / "winner")
    played = evaluations * args.num_eval_episodes
    return {
        "success": success_of(winner, EpisodeOptions.of_args(args)),
        "learning_rate": best.hyperparameters["learning_rate"],
        "steps": best.steps,
        "drawn": [event.hyperparameters["learning_rate"] for event in lineage.events if event.event == "born"],
        "training_episodes": trained * BATCH,
        "evaluation_episodes": played,
        "base_is_identical": population.base.digest() == digest,
        "bytes": sizes(base, population),
        "seconds": sum(event.seconds for event in lineage.events),
        "events": [{**asdict(event), "seconds": round(event.seconds, 1)} for event in lineage.events if event.round],
    }


def measure(base: Path, folder: Path, seed: int, steps: int, found: dict[str, Any]) -> Iterator[None]:
    """Add the parts of a seed that are missing to what was found, and yield after each."""
    parts: dict[str, Callable[[], Any]] = {
        "tuned": lambda: [single_run(base, folder / f"tuned-{rate}", seed, steps, rate) for rate in TUNED],
        "population": lambda: search(base, folder / "population", seed, steps),
        "worst": lambda: single_run(base, folder / "worst", seed, steps, min(found["population"]["drawn"])),
    }
    for name in [name for name in parts if name not in found]:
        found[name] = parts[name]()
        yield


def told(found: dict[str, Any]) -> str:
    """Say what was found for a seed."""
    tuned, best = max(found["tuned"], key=lambda one: one["success"]), found["population"]
    return (
        f"tuned run {tuned['success']:.3f} at {tuned['learning_rate']}, population {best['success']:.3f} "
        f"({best['success'] / tuned['success']:.2f} of it) at {best['learning_rate']:.2g} after {best['steps']} updates, "
        f"worst member alone {found['worst']['success']:.3f}; base {best['bytes']['base']} bytes, identical: "
        f"{best['base_is_identical']}, a member {best['bytes']['member']}"
    )


def main() -> None:
    """Parse the options and run what is missing."""
    parser = argparse.ArgumentParser(description="Compares a population with a single tuned run on the demo's game.")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/populations"), help="folder to write")
    parser.add_argument("--steps", type=int, default=300, help="updates of the single run (default: 300, the demo's)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds (default: 0 1 2)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file to write, seed by seed")
    options = parser.parse_args()
    disable_progress_bars()
    logging.disable(logging.WARNING)
    base = base_model(options.output_dir)
    results = json.loads(options.results.read_text()) if options.results.is_file() else {}
    for seed in options.seeds:
        found = results.setdefault(str(seed), {"steps": options.steps})
        if found["steps"] != options.steps:
            raise SystemExit(
                f"{options.results} has runs of {found['steps']} updates. Use another file with --results."
            )
        for _ in measure(base, options.output_dir / f"seed-{seed}", seed, options.steps, found):
            options.results.write_text(json.dumps(results) + "\n")
        print(f"seed {seed}: {told(found)}", flush=True)


if __name__ == "__main__":
    main()
