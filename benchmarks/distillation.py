"""Distills the adapter of the demo into a fresh one on the same base, and counts the episodes to success .9.

The base is the model of the demo's supervised stage, which has learned the form of an answer from random play. The teacher
is the adapter after the demo's 300 updates by GRPO with seed 0. A student is a fresh adapter that is trained without any
reward, at the demo's learning rate and with its 96 episodes in an update, until three rollouts in a row have a mean success
of .9; seeds differ in the student's weights, its episodes and its sampling.

Another teacher is good on early turns only: it was taught games whose first two guesses halve the range and whose others
are any numbers. It is added to GRPO, with the same weight on every turn and with one that falls from turn to turn.

Each finished training is a line of ``results/distillation.jsonl`` and is not repeated. The table is in ``docs/teacher.md``;
``--report`` writes it from what is done.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from datasets import concatenate_datasets
from transformers import PrinterCallback, TrainerCallback
from transformers.utils import logging
from update_vs_trl import ROOT, with_tables

from agile_environments.guess_number import halving_policy, random_policy
from agile_trainers import MultiTurnDistillationConfig, MultiTurnDistillationTrainer
from agile_trainers.cli import demo as demo
from agile_trainers.embedded import make_embedded_model, sft_trainer, words_of
from agile_trainers.types import Message

RESULTS = ROOT / "benchmarks/results/distillation.jsonl"
PAGE = ROOT / "docs/teacher.md"
RUNS = ROOT / "runs/distillation"
GOAL, WINDOW, EPISODES, UPDATES = 0.9, 3, demo.GROUP * demo.HIGH, 100
GRADIENTS = ("immediate", "return_to_go", "distribution_reverse", "distribution_forward")
RATE = 3e-3
"""The demo's."""
EARLY = {"every turn": 1.0, "teacher_turn_decay=0.2": 0.2}
"""Decays of the weight of the teacher that is good on early turns only."""
SEEDS = (0, 1, 2)
NAMES = {
    "GRPO": "GRPO",
    **{one: f"`{one}`" for one in GRADIENTS},
    **{one: f"GRPO, early teacher, {one}" for one in EARLY},
}
"""The sides, and how the table calls them."""
Run = dict[str, Any]


def successes(trainer: Any) -> list[float]:
    """Return the success of each rollout."""
    return [entry["success"] for entry in trainer.state.log_history if "success" in entry]


def arrival(curve: list[float]) -> int | None:
    """Return the number of rollouts after which the mean of the last ones reaches the goal; None if it does not."""
    ends = range(WINDOW, len(curve) + 1)
    return next((end for end in ends if fmean(curve[end - WINDOW : end]) >= GOAL), None)


class Stop(TrainerCallback):
    """Ends a training that has arrived."""

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= (
            arrival([one["success"] for one in state.log_history if "success" in one]) is not None
        )


def start() -> Path:
    """Return the folder of the model that all trainings start from, which is made once."""
    folder = RUNS / "0"
    if not (folder / "done").is_file():
        words = words_of(demo.demonstrations(100), "invalid", "correct")
        untrained = make_embedded_model(folder / "untrained", words=words)
        trainer = demo.make_sft_trainer(untrained, folder / "sft", 0, demo.Budget())
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        trainer.save_model()
        (folder / "done").touch()
    return folder / "sft"


def early(messages: list[Message], rng: random.Random) -> str:
    """Halve the range in the first two guesses, then guess any number."""
    guesses = sum(message["role"] == "assistant" for message in messages)
    return (halving_policy if guesses < 2 else random_policy)(messages, rng)


def early_teacher() -> Path:
    """Return the folder of the model that is good on early turns only, which is made once."""
    folder = RUNS / "0" / "early"
    if not (folder / "done").is_file():
        rows = demo.demonstrations(8000, policy=early)
        trainer = sft_trainer(start().parent / "untrained", rows, folder, max_steps=250)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        trainer.save_model()
        (folder / "done").touch()
    return folder


def run(side: str, seed: int) -> Run:
    """Train once; the adapter of GRPO with seed 0 is kept, and trained for all updates."""
    model, teacher, begun = str(start()), str(RUNS / "0" / "teacher"), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        if side == "GRPO" or side in EARLY:
            added = {} if side == "GRPO" else {"teacher": str(early_teacher()), "teacher_turn_decay": EARLY[side]}
            trainer: Any = demo.make_trainer(model, Path(folder), seed, demo.Budget(), demo.lora(), **added)
            if side != "GRPO" or seed:
                trainer.add_callback(Stop())
        else:
            trainer = MultiTurnDistillationTrainer(
                model=model,
                environment=demo.ENVIRONMENT,
                args=MultiTurnDistillationConfig(
                    output_dir=folder, teacher=teacher, teacher_gradient=side, learning_rate=RATE, seed=seed,
                    max_turns=demo.GUESSES, max_new_tokens=2, per_device_train_batch_size=EPISODES, max_steps=UPDATES,
                    gradient_accumulation_steps=1, lr_scheduler_type="constant", gradient_checkpointing=False, bf16=False,
                    use_cpu=True, save_strategy="no", report_to="none", logging_steps=1, disable_tqdm=True,
                ),
                train_dataset=concatenate_datasets([demo.secrets()] * demo.GROUP),
                peft_config=demo.lora(),
                callbacks=[Stop()],
            )  # fmt: skip
            trainer.remove_callback(PrinterCallback)
        trainer.train()
        if (side, seed) == ("GRPO", 0):
            trainer.save_model(teacher)
    curve, cpu = successes(trainer), round(time.process_time() - begun, 1)
    return {"side": side, "seed": seed, "arrived": arrival(curve), "cpu": cpu, "curve": curve}


def saved() -> list[Run]:
    """Return every finished training."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def done(side: str, seed: int) -> Run:
    """Train unless that is done."""
    wanted = {"side": side, "seed": seed}
    result = next((one for one in saved() if wanted.items() <= one.items()), None)
    if result is None:
        result = run(side, seed)
        with RESULTS.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print({name: value for name, value in result.items() if name != "curve"}, result["curve"][-3:], flush=True)
    return result


def table() -> str:
    """Write the table of what is done: episodes to the goal, with and without all of the teacher's own."""
    lines = [
        "| trained with | arrived | episodes to .9 | with the teacher's own | CPU seconds |",
        "|---|---|---|---|---|",
    ]
    grpo, *_ = (one for one in saved() if (one["side"], one["seed"]) == ("GRPO", 0))
    for side, named in NAMES.items():
        of = [one for one in saved() if one["side"] == side]
        episodes = [EPISODES * (one["arrived"] or len(one["curve"])) for one in of]
        shown = f"{fmean(episodes):,.0f}" + (f" ({min(episodes):,} to {max(episodes):,})" if len(of) > 1 else "")
        both = f"{fmean(episodes) + EPISODES * len(grpo['curve']):,.0f}" if side in GRADIENTS else ""
        arrived, cpu = sum(one["arrived"] is not None for one in of), fmean(one["cpu"] for one in of)
        lines.append(f"| {named} | {arrived}/{len(of)} | {shown} | {both} | {cpu:.0f} |")
    return "\n".join(lines)


def main() -> int:
    """Train what is not done yet, and write the table."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for seed in SEEDS if "--report" not in sys.argv else ():
        for side in NAMES:
            done(side, seed)
    found = table()
    print(found)
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), {"distillation": found}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
