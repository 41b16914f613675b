"""Trains ``guess_number`` to success .9 with GRPO, and distills the adapter that this gives into a fresh one.

All trainings of a seed start from the same tiny model, which has learned the form of an answer from random play, and train
the same adapter with 96 episodes in an update. GRPO ends, and its adapter becomes the teacher, when the mean success of three
rollouts in a row reaches .9; a distillation without any reward ends there too. The learning rate of each gradient is the one
of two that arrived after the fewest episodes with a seed of its own.

Each finished training is a line of ``results/distillation.jsonl`` and is not repeated. The table goes to ``docs/teacher.md``.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from datasets import Dataset
from learning import BASES, LORA, base
from learning_side import GROUP, Progress, Scored, _arguments, _stopping
from learning_tasks import EVERY
from peft import LoraConfig
from transformers.utils import logging
from update_vs_trl import ROOT, with_tables

from agile_trainers import (
    MultiTurnDistillationConfig,
    MultiTurnDistillationTrainer,
    MultiTurnGRPOConfig,
    MultiTurnGRPOTrainer,
)

RESULTS = ROOT / "benchmarks/results/distillation.jsonl"
PAGE = ROOT / "docs/teacher.md"
TASK, GOAL, EPISODES, BUDGET = "guess_number", 0.9, 96, 9600
GRADIENTS = ("immediate", "return_to_go", "distribution_reverse", "distribution_forward")
SIDES = ("GRPO", *GRADIENTS)
RATES = (1e-2, 3e-3)
TUNING = 3
"""The seed by which a learning rate is chosen."""
SEEDS = (0, 1, 2)
Run = dict[str, Any]


def teacher(seed: int) -> Path:
    """Return the folder of the adapter that GRPO trained with a seed."""
    return BASES / f"{TASK}-{seed}" / "grpo"


def run(side: str, rate: float, seed: int) -> Run:
    """Train once; the adapter of GRPO is kept."""
    game, progress, begun = EVERY[TASK], Progress(EPISODES, GOAL, BUDGET), time.process_time()
    model = str(base(TASK, seed))
    limits = {"max_turns": game.turns, "max_new_tokens": game.new_tokens}
    with tempfile.TemporaryDirectory() as folder:
        given = _arguments(folder, EPISODES, BUDGET, rate, seed) | limits | {"num_generations": GROUP}
        kind, args = MultiTurnGRPOTrainer, MultiTurnGRPOConfig
        if side != "GRPO":
            kind, args = MultiTurnDistillationTrainer, MultiTurnDistillationConfig
            given |= {"num_generations": 1, "teacher": str(teacher(seed)), "teacher_gradient": side}
        trainer = kind(
            model=model,
            environment=lambda: Scored(TASK, progress.outcomes, progress.begun),
            args=args(**given, log_rollouts=False),
            train_dataset=Dataset.from_list(list(game.rows)),
            peft_config=LoraConfig(**LORA),
            callbacks=[_stopping(progress)],
        )
        trainer.train()
        if side == "GRPO":
            trainer.save_model(str(teacher(seed)))
    return {
        "side": side, "rate": rate, "seed": seed, "arrived": progress.arrived(), "episodes": len(progress.outcomes),
        "cpu": round(time.process_time() - begun, 1), "curve": [round(one, 3) for one in progress.curve()],
    }  # fmt: skip


def saved() -> list[Run]:
    """Return every finished training."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def find(side: str, rate: float, seed: int) -> Run | None:
    """Return a finished training."""
    wanted = {"side": side, "rate": rate, "seed": seed}
    return next((one for one in saved() if wanted.items() <= one.items()), None)


def done(side: str, rate: float, seed: int) -> Run:
    """Train unless that is done."""
    result = find(side, rate, seed)
    if result is None:
        result = run(side, rate, seed)
        with RESULTS.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print({name: value for name, value in result.items() if name != "curve"}, result["curve"][-3:], flush=True)
    return result


def _worth(one: Run) -> tuple[bool, int, float]:
    return not one["arrived"], one["episodes"], -fmean(one["curve"][-3:])


def table() -> str:
    """Write the table: episodes of each side to the goal, with and without those of its teacher."""
    lines = ["| trained with | rate | arrived | episodes to .9 | with the teacher's own | CPU seconds |", "|---|---|---|---|---|---|"]
    rates = {side: min((done(side, rate, TUNING) for rate in RATES), key=_worth)["rate"] for side in SIDES}
    grpo = [done("GRPO", rates["GRPO"], seed) for seed in SEEDS]
    for side in SIDES:
        of = [done(side, rates[side], seed) for seed in SEEDS]
        own = [one["episodes"] for one in of]
        both = own if side == "GRPO" else [n + first["episodes"] for n, first in zip(own, grpo, strict=True)]
        shown = [f"{fmean(values):,.0f} ({min(values):,} to {max(values):,})" for values in (own, both)]
        name = side if side == "GRPO" else f"`{side}`"
        cells = [name, f"{rates[side]:g}", f"{sum(one['arrived'] for one in of)}/{len(of)}", shown[0]]
        cells += ["" if side == "GRPO" else shown[1], f"{fmean(one['cpu'] for one in of):.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Train what is not done yet, and write the table."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    found = table()
    print(found)
    if PAGE.exists():
        PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), {"distillation": found}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
