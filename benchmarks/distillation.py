"""Trains the demo's ``guess_number`` with GRPO, and distills the adapter that this gives into a fresh one.

All trainings of a seed start from the model of the demo's supervised stage, which has learned the form of an answer from
random play, and train the demo's adapter with 96 episodes in an update. GRPO is the demo's: 300 updates, after which its
adapter is the teacher. A distillation, without any reward, ends when the mean success of three rollouts in a row is .9. The
learning rate of each gradient is the one of two that arrived after the fewest episodes with a seed of its own.

Each finished training is a line of ``results/distillation.jsonl`` and is not repeated. The table is in ``docs/teacher.md``.
"""

from __future__ import annotations

import json
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

from agile_trainers import MultiTurnDistillationConfig, MultiTurnDistillationTrainer
from agile_trainers.cli.demo import command as demo
from agile_trainers.embedded import make_embedded_model, words_of

RESULTS = ROOT / "benchmarks/results/distillation.jsonl"
PAGE = ROOT / "docs/teacher.md"
RUNS = ROOT / "runs/distillation"
GOAL, WINDOW, EPISODES, UPDATES = 0.9, 3, demo.GROUP * demo.HIGH, 300
GRADIENTS = ("immediate", "return_to_go", "distribution_reverse", "distribution_forward")
RATES = (1e-2, 3e-3)
TUNING = 3
"""The seed by which a learning rate is chosen."""
SEEDS = (0, 1, 2)
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


def start(seed: int) -> Path:
    """Return the folder of the model that the trainings of a seed start from, which is made once."""
    folder = RUNS / str(seed)
    if not (folder / "done").is_file():
        words = words_of(demo.demonstrations(100), "invalid", "correct")
        trainer = demo.make_sft_trainer(
            make_embedded_model(folder / "untrained", words=words, seed=seed), folder / "sft", seed, demo.Budget()
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        trainer.save_model()
        (folder / "done").touch()
    return folder / "sft"


def run(side: str, rate: float, seed: int) -> Run:
    """Train once; the adapter of GRPO is kept."""
    model, teacher, begun = str(start(seed)), str(RUNS / str(seed) / "teacher"), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        if side == "GRPO":
            trainer: Any = demo.make_trainer(model, Path(folder), seed, demo.Budget(), demo.lora())
        else:
            trainer = MultiTurnDistillationTrainer(
                model=model,
                environment=demo.ENVIRONMENT,
                args=MultiTurnDistillationConfig(
                    output_dir=folder, teacher=teacher, teacher_gradient=side, learning_rate=rate, seed=seed,
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
        if side == "GRPO":
            trainer.save_model(teacher)
    curve, cpu = successes(trainer), round(time.process_time() - begun, 1)
    return {"side": side, "rate": rate, "seed": seed, "arrived": arrival(curve), "cpu": cpu, "curve": curve}


def saved() -> list[Run]:
    """Return every finished training."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def done(side: str, rate: float, seed: int) -> Run:
    """Train unless that is done."""
    wanted = {"side": side, "rate": rate, "seed": seed}
    result = next((one for one in saved() if wanted.items() <= one.items()), None)
    if result is None:
        result = run(side, rate, seed)
        with RESULTS.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print({name: value for name, value in result.items() if name != "curve"}, result["curve"][-3:], flush=True)
    return result


def _episodes(one: Run) -> int:
    return EPISODES * (one["arrived"] or len(one["curve"]))


def _cells(of: list[Run], extra: int) -> list[str]:
    own = [_episodes(one) for one in of]
    shown = f"{fmean(own):,.0f} ({min(own):,} to {max(own):,})"
    arrived = sum(one["arrived"] is not None for one in of)
    return [f"{arrived}/{len(of)}", shown, f"{fmean(own) + extra:,.0f}", f"{fmean(one['cpu'] for one in of):.0f}"]


def table() -> str:
    """Write the table: episodes of each side to the goal, with and without those of its teacher."""
    lines = [
        "| trained with | rate | arrived | episodes to .9 | with the teacher's own | CPU seconds |",
        "|---|---|---|---|---|---|",
    ]
    grpo = [done("GRPO", 3e-3, seed) for seed in (*SEEDS, TUNING)][:-1]
    lines.append(f"| GRPO, the demo's 300 updates | 0.003 | {' | '.join(_cells(grpo, 0))} |")
    for side in GRADIENTS:
        tried = [done(side, rate, TUNING) for rate in RATES]
        rate = min(tried, key=lambda one: (one["arrived"] is None, _episodes(one)))["rate"]
        cells = _cells([done(side, rate, seed) for seed in SEEDS], EPISODES * UPDATES)
        lines.append(f"| `{side}` | {rate:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Train what is not done yet, and write the table."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    found = table()
    print(found)
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), {"distillation": found}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
