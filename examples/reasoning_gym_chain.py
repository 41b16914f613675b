"""Train on a reasoning-gym data set: SFT on answered questions, then GRPO; success is measured on held-out questions.

    pip install 'agile-trainers[envs]'
    python examples/reasoning_gym_chain.py                                        # a tiny model made in code, on CPU
    python examples/reasoning_gym_chain.py --model Qwen/Qwen2.5-0.5B-Instruct     # any chat model, without the SFT stage

The task is `reasoning_gym:syllogism`: does a conclusion follow from two premises? Always answering Yes is
right 7 times in 10; distinguishing the kinds of statement is right 9 times in 10. The script writes the model, the episodes
and `summary.json` to --output_dir.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # on tiny tensors a second thread costs more than it saves


from agile_trainers.embedded import make_embedded_model, sft_trainer, words_of
from agile_trainers.envs.libraries.reasoning_gym import ReasoningGymEnvironment
from agile_trainers.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer

RANK = os.environ.get("RANK", "0")
"""Rank of this process under `accelerate launch`."""
HELD_OUT = 1000
ON_CPU: dict[str, Any] = {"bf16": False, "use_cpu": True, "gradient_checkpointing": False, "disable_tqdm": True}


def make_environment() -> ReasoningGymEnvironment:
    """The task, a fifth of whose questions is held out."""
    return ReasoningGymEnvironment("syllogism")


def tiny_model(folder: Path, seed: int, rows: int) -> Path:
    """Make a model that knows the words of the task, and show it some answered questions of the training split, twice."""
    environment = make_environment()
    words = words_of(environment.demonstrations(2000))
    untrained = make_embedded_model(folder / f"untrained-{RANK}", words=words, seed=seed)
    shown = environment.demonstrations(rows, seed=seed * rows)
    trainer = sft_trainer(untrained, shown, folder / "sft", seed=seed, num_train_epochs=2)
    trainer.train()
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()  # the first process saves
    return folder / "sft"


def make_trainer(model: str, tiny: bool, output_dir: Path, seed: int, rl_steps: int) -> MultiTurnGRPOTrainer:
    """GRPO on the training split, evaluated on the held-out questions."""
    return MultiTurnGRPOTrainer(
        model=model,
        environment=make_environment,
        eval_dataset=make_environment().dataset("test", HELD_OUT),
        args=MultiTurnGRPOConfig(
            output_dir=str(output_dir),
            max_turns=1,
            max_new_tokens=2 if tiny else 256,
            num_generations=4,  # small groups, since many questions help more than many answers to each
            per_device_train_batch_size=256 if tiny else 16,
            max_steps=rl_steps,
            learning_rate=1e-3 if tiny else 1e-6,
            entropy_coef=0.01,  # keeps the policy from repeating one answer
            beta=0.0,
            num_eval_episodes=HELD_OUT,
            seed=seed,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            **(ON_CPU if tiny else {}),
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a chat model (default: a tiny one that this script makes)")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/reasoning_gym_chain"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sft_rows", type=int, default=1000, help="answered questions shown to the tiny model")
    parser.add_argument("--rl_steps", type=int, default=320)
    options = parser.parse_args()
    started, tiny = time.perf_counter(), options.model is None
    model = str(tiny_model(options.output_dir, options.seed, options.sft_rows)) if tiny else options.model

    trainer = make_trainer(model, tiny, options.output_dir, options.seed, options.rl_steps)
    before = trainer.evaluate()["eval_success"]
    trainer.train()
    after = trainer.evaluate()["eval_success"]
    trainer.save_model()
    trainer.accelerator.end_training()
    if not trainer.accelerator.is_main_process:
        return

    seconds = round(time.perf_counter() - started)
    summary = {"seed": options.seed, "before": before, "after": after, "seconds": seconds}
    (options.output_dir / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    print(f"success on {HELD_OUT} held-out questions: {before:.3f} before GRPO, {after:.3f} after; {seconds} seconds")


if __name__ == "__main__":
    main()
