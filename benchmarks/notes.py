"""Trains a courier to write notes, with and without credit for them, and draws what it learns.

The game ``agile:courier`` forgets everything but the model's note once the conversation has more than 32 tokens. The model
starts from games of a courier that reads its notes and writes useless ones. Both sides train on the same settings and seeds;
on one, the advantage of every note is 0. The results go to ``benchmarks/results/notes.json`` and the picture to
``docs/images/notes.png``. The exit code is 1 if a run with credit ends below .9 or one without it above .25.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from transformers import PrinterCallback

from agile_environments.courier import WORDS, demonstrations
from agile_trainers.embedded import make_embedded_model, sft_trainer, words_of
from agile_trainers.envs import make_environment_factory
from agile_trainers.step.credit import Credit, CreditInputs
from agile_trainers.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results" / "notes.json"
PICTURE = ROOT.parent / "docs" / "images" / "notes.png"
SEEDS = (0, 1, 2)
STEPS, EVERY = 120, 5
LEARNED, CHANCE = 0.9, 0.25
"""Success that a run with credit for the notes reaches, and one without it stays below. One word in eight is chance."""


class WithoutNotes(MultiTurnGRPOTrainer):
    """GRPO that gives notes no credit. Every other turn of a game is one."""

    def assign_credit(self, turns: CreditInputs) -> Credit:
        """Assign GRPO's credit to all turns but the notes."""
        credit = super().assign_credit(turns)
        credit.advantages[:, 1::2] = 0.0
        return credit


def train(seed: int, credited: bool, steps: int = STEPS) -> dict[str, Any]:
    """Teach the model a courier's manners and train it.

    Args:
        seed: Of model, order and episodes.
        credited: Whether notes get credit.
        steps: Optimizer steps of 128 episodes.

    Returns:
        ``seed``, ``credited``; ``before`` and ``after``, the success of 512 sampled games; ``curve``, a pair of step and
        mean success for each few steps; ``notes``, by word, what the model wrote in four games before and after; ``seconds``
        of CPU.
    """
    torch.set_num_threads(1)
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        rows = demonstrations(1000)
        model = make_embedded_model(f"{folder}/model", words=words_of(rows, "over"), seed=seed)
        sft = sft_trainer(model, rows, f"{folder}/sft", max_steps=100, seed=seed)
        sft.train()
        sft.save_model()
        trainer = (MultiTurnGRPOTrainer if credited else WithoutNotes)(
            model=f"{folder}/sft",
            environment=make_environment_factory("agile:courier", level="easy"),
            args=MultiTurnGRPOConfig(
                output_dir=folder, seed=seed, max_steps=steps, num_iterations=1, max_turns=3, max_new_tokens=1,
                per_device_train_batch_size=128, num_generations=16, learning_rate=1e-3, beta=0.1,
                num_eval_episodes=512, logging_steps=EVERY, save_strategy="no", report_to="none", log_rollouts=False,
                use_cpu=True, bf16=False, disable_tqdm=True,
            ),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        before, notes_before = trainer.evaluate()["eval_success"], _notes(trainer)
        trainer.train()
        after, notes_after = trainer.evaluate()["eval_success"], _notes(trainer)
    return {
        "seed": seed,
        "credited": credited,
        "before": before,
        "after": after,
        "curve": [(entry["step"], entry["success"]) for entry in trainer.state.log_history if "success" in entry],
        "notes": {"before": notes_before, "after": notes_after},
        "seconds": round(time.process_time() - started, 1),
    }


def _notes(trainer: MultiTurnGRPOTrainer) -> dict[str, str]:
    """Return what the model writes down in four games of each word."""
    games = trainer.rollout([{"word": word} for word in WORDS])
    members = len(games) // len(WORDS)
    said = [game.turns[1].text for game in games]
    return {word: " ".join(said[place * members :][:4]) for place, word in enumerate(WORDS)}


def load() -> list[dict[str, Any]]:
    """Return the saved runs."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else []


def misses(run: dict[str, Any]) -> bool:
    """Return whether a run with credit did not learn, or one without it did."""
    after: float = run["after"]
    return after < LEARNED if run["credited"] else after > CHANCE


def picture(runs: list[dict[str, Any]]) -> Figure:
    """Draw success over episodes, a line for each run."""
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    panel = figure.subplots()
    for run in runs:
        steps, success = zip(*run["curve"])
        name = "notes get credit" if run["credited"] else "notes get none"
        panel.plot(
            [step * 128 / 1000 for step in steps], success, color="#0072B2" if run["credited"] else "#D55E00",
            linewidth=1.6, label=name if run["seed"] == SEEDS[0] else None,
        )  # fmt: skip
    panel.axhline(1 / len(WORDS), color="0.5", linestyle=":", linewidth=1, label="chance")
    panel.set(xlabel="thousand episodes", ylabel="success", ylim=(0, 1.03))
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, loc="center right")
    return figure


def main() -> int:
    """Train what is missing, write results and picture. Return 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="train nothing; draw the saved runs")
    parser.add_argument("--fresh", action="store_true", help="repeat saved runs")
    options = parser.parse_args()
    runs = [] if options.fresh else load()
    done = {(run["seed"], run["credited"]) for run in runs}
    for seed, credited in [(seed, credited) for seed in SEEDS for credited in (True, False)]:
        if options.report or (seed, credited) in done:
            continue
        run = train(seed, credited)
        runs.append(run)
        RESULTS.write_text(json.dumps(runs, indent=1) + "\n")
        print(
            f"seed {seed} credited {credited}: {run['before']:.3f} to {run['after']:.3f}, {run['seconds']} s",
            flush=True,
        )
    picture(runs).savefig(PICTURE, dpi=130)
    return 1 if any(map(misses, runs)) else 0


if __name__ == "__main__":
    sys.exit(main())
