"""Trains on locks with demonstrations and teachers, good and bad, and reports where a policy ends with each.

A lock shows a digit and asks for three digits that follow from it, a turn each. The hard lock pays 1 for all three and
closes at the first wrong one. The easy lock pays a third for each. The bad expert is right in half of its turns; the bad
teacher has learned a lock of other digits, and its coefficient falls to 0 over the first quarter of a long training. Seeds
differ in the untrained weights, the episodes and the sampling.

Each finished training is a line of ``results/demonstrations.jsonl`` and is not repeated. The tables are in
``docs/demonstrations.md``; ``--report`` writes them from what is done.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback
from transformers.utils import logging
from update_vs_trl import ROOT, with_tables

from agile_trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer
from agile_trainers.embedded import make_embedded_model
from agile_trainers.envs.scripted_policies import ScriptedPolicy
from agile_trainers.types import Message

RESULTS = ROOT / "benchmarks/results/demonstrations.jsonl"
PAGE = ROOT / "docs/demonstrations.md"
RUNS = ROOT / "runs/demonstrations"
WORDS = (*"0123456", "dial", "next", "open", "closed")
TURNS, LAST, SEEDS = 3, 10, (0, 1, 2, 3, 4)
UPDATES = {"hard": 200, "easy": 100, "long": 300}
RATE = 2e-3
TREATMENTS = ("weighted", "advantage_sft", "sft")
Run = dict[str, Any]


class Lock:
    """Asks for digits that follow from the one shown first.

    Args:
        easy: Pay for each right digit, and go on after a wrong one.
        shift: Distance from one digit to the next.
    """

    def __init__(self, easy: bool = False, shift: int = 1) -> None:
        self.easy, self.shift = easy, shift

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.digit, self.turn, self.right = (seed or 0) % 7, 0, 0
        return f"dial {self.digit}", {}

    @property
    def wanted(self) -> str:
        return str((self.digit + self.shift * (self.turn + 1)) % 7)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        right = action.strip() == self.wanted
        self.right, self.turn = self.right + right, self.turn + 1
        over = self.turn == TURNS or not (right or self.easy)
        success = self.right == TURNS
        reward = right / TURNS if self.easy else float(success)
        return ("open" if success else "closed") if over else "next", reward, over, False, {"success": success}

    def scripted_policies(self) -> dict[str, ScriptedPolicy]:
        """The best answers, and those of the bad expert."""

        def bad(messages: list[Message], rng: random.Random) -> str:
            return self.wanted if rng.random() < 0.5 else str((int(self.wanted) + 3) % 7)

        return {"expert": lambda messages, rng: self.wanted, "bad": bad}


def with_expert(**options: Any) -> dict[str, Any]:
    return {"demonstrations": "expert", **options}


TASKS: dict[str, dict[str, dict[str, Any]]] = {
    "hard": {
        "GRPO": {},
        **{name: with_expert(demonstration_loss=name) for name in TREATMENTS},
        "weighted, demonstration_coef=32": with_expert(demonstration_loss="weighted", demonstration_coef=32.0),
        "teacher": {"teacher": str(RUNS / "teacher")},
    },
    "easy": {
        "GRPO": {},
        **{f"bad expert, {name}": with_expert(demonstrations="bad", demonstration_loss=name) for name in TREATMENTS},
        "bad expert, weighted, demonstration_coef=32": with_expert(
            demonstrations="bad", demonstration_loss="weighted", demonstration_coef=32.0
        ),
    },
    "long": {
        "GRPO": {},
        "bad teacher": {"teacher": str(RUNS / "bad_teacher"), "teacher_steps": 0.25},
    },
}


class Stop(TrainerCallback):
    """Ends a training that has arrived."""

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= (
            arrival([one["success"] for one in state.log_history if "success" in one]) is not None
        )


def train(
    environment: Any, seed: int, updates: int, save: Path | None = None, *, to_goal: bool = False, **options: Any
) -> list[float]:
    """Train once, to success .9 or for all updates; return the success of each rollout."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        base = make_embedded_model(Path(folder) / "base", words=WORDS, max_position_embeddings=256, seed=seed)
        trainer = MultiTurnGRPOTrainer(
            model=str(base),
            environment=environment,
            args=MultiTurnGRPOConfig(
                output_dir=folder, seed=seed, learning_rate=RATE,
                lr_scheduler_type="constant", max_steps=updates,
                max_turns=TURNS, max_new_tokens=2, num_generations=8, per_device_train_batch_size=64,
                gradient_accumulation_steps=1, gradient_checkpointing=False, bf16=False, use_cpu=True, save_strategy="no",
                report_to="none", log_rollouts=0, logging_steps=1, disable_tqdm=True, diagnosis_interval=0, num_iterations=1,
                **options,
            ),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        if to_goal:
            trainer.add_callback(Stop())
        trainer.train()
        if save is not None:
            trainer.save_model(str(save))
    return [entry["success"] for entry in trainer.state.log_history if "success" in entry]


def run(task: str, side: str, seed: int) -> Run:
    """Train once, and make its teacher before."""
    for name, shift in (("teacher", 1), ("bad_teacher", 3)):
        if TASKS[task][side].get("teacher") == str(RUNS / name) and not (RUNS / name / "config.json").is_file():
            print(
                name,
                train(partial(Lock, shift=shift), 100, 100, RUNS / name, **with_expert(demonstration_loss="sft"))[-3:],
            )
    begun = time.process_time()
    lock, options = partial(Lock, easy=task != "hard"), TASKS[task][side]
    curve = train(lock, seed, UPDATES[task], to_goal=task == "hard", **options)
    cpu = round(time.process_time() - begun, 1)
    return {"task": task, "side": side, "seed": seed, "end": fmean(curve[-LAST:]), "cpu": cpu, "curve": curve}


def saved() -> list[Run]:
    """Return every finished training."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def done(task: str, side: str, seed: int) -> None:
    """Train unless that is done."""
    wanted = {"task": task, "side": side, "seed": seed}
    if any(wanted.items() <= one.items() for one in saved()):
        return
    result = run(task, side, seed)
    with RESULTS.open("a") as file:
        file.write(json.dumps(result) + "\n")
    print({name: value for name, value in result.items() if name != "curve"}, flush=True)


def arrival(curve: list[float]) -> int | None:
    """Return the number of updates after which three rollouts in a row have a mean success of .9; None if never."""
    return next((end for end in range(3, len(curve) + 1) if fmean(curve[end - 3 : end]) >= 0.9), None)


def spread(values: Sequence[float], form: str) -> str:
    """Write the mean, the lowest and the highest."""
    return f"{fmean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def table(task: str) -> str:
    """Write the table of what is done of a task: updates to .9, or success at the end beside GRPO's on the same seeds."""
    found = [one for one in saved() if one["task"] == task]
    alone = {one["seed"]: one["end"] for one in found if one["side"] == "GRPO"}
    head = ["solved", "updates to .9"] if task == "hard" else ["seeds", "success at the end", "beside GRPO alone"]
    lines = [f"| trained with | {' | '.join(head)} |", "|---" * (1 + len(head)) + "|"]
    for side in TASKS[task]:
        of = [one for one in found if one["side"] == side]
        arrived = [end for one in of if (end := arrival(one["curve"]))]
        if task == "hard":
            cells = [f"{len(arrived)}/{len(of)}", spread(arrived, ".0f") if arrived else "never"]
        else:
            beside = [one["end"] - alone[one["seed"]] for one in of if one["seed"] in alone]
            cells = [
                str(len(of)),
                *((spread([one["end"] for one in of], ".3f"), spread(beside, "+.3f")) if beside else ("", "")),
            ]
        lines.append(f"| {side} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Train what is not done yet, and write the tables."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for task, sides in TASKS.items() if "--report" not in sys.argv else ():
        for seed in SEEDS:
            for side in sides:
                done(task, side, seed)
    tables = {f"demonstrations, {task}": table(task) for task in TASKS}
    print(*tables.values(), sep="\n\n")
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), tables), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
