"""Train on a GEM game, GuessTheNumber: SFT on scripted games teaches the format, multi-turn GRPO the play.

    pip install 'agile-trainers[envs]'
    python examples/gem_guess_number.py                                        # a tiny model made in code, on CPU
    python examples/gem_guess_number.py --model Qwen/Qwen2.5-0.5B-Instruct     # any chat model, without the SFT stage

Writes the adapter, the episodes and `return.png` to --output_dir, and prints the return before and after training.
"""

from __future__ import annotations

import argparse
import os
import random
import re
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # on tiny tensors a second thread costs more than it saves

import matplotlib
from peft import LoraConfig

from agile_trainers.embedded import make_embedded_model, sft_trainer
from agile_trainers.envs import make_environment_factory
from agile_trainers.envs.scripted_policies import demonstrate
from agile_trainers.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer
from agile_trainers.types import Message

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RANK = os.environ.get("RANK", "0")
"""Rank of this process under `accelerate launch`."""
GAME = "gem:game:GuessTheNumber-v0-easy"


def still_possible(messages: list[Message], rng: random.Random) -> str:
    """A policy that guesses any number that the hints still allow."""
    low, high = map(int, re.findall(r"between (\d+) and (\d+)", messages[0]["content"])[0])
    for message in messages[1:]:
        if hint := re.search(r"guessed (\d+), and the target number is (higher|lower)", message["content"]):
            guess = int(hint[1])
            low, high = (max(low, guess + 1), high) if hint[2] == "higher" else (low, min(high, guess - 1))
    return rf"\boxed{{{rng.randint(low, high)}}}"


def tiny_model(folder: Path, seed: int, steps: int, batch: int) -> Path:
    """Make a model that knows the words of the game, and teach it the format by supervised fine-tuning."""
    games = demonstrate(make_environment_factory(GAME)(), still_possible, range(steps * batch))
    texts = [message["content"] for game in games[:200] for message in game["messages"]]
    untrained = make_embedded_model(folder / f"untrained-{RANK}", texts=texts, seed=seed)
    length = {"max_steps": steps, "per_device_train_batch_size": batch}
    trainer = sft_trainer(untrained, games, folder / "sft", seed=seed, logging_steps=50, disable_tqdm=False, **length)
    trainer.train()
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()  # the first process saves
    return folder / "sft"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a chat model (default: a tiny one that this script makes)")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/gem_guess_number"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sft_steps", type=int, default=250)
    parser.add_argument("--rl_steps", type=int, default=160)
    options = parser.parse_args()
    tiny = options.model is None
    model = str(tiny_model(options.output_dir, options.seed, options.sft_steps, 32)) if tiny else options.model

    trainer = MultiTurnGRPOTrainer(
        model=model,
        environment=GAME,
        args=MultiTurnGRPOConfig(
            output_dir=str(options.output_dir),
            max_turns=4,
            max_new_tokens=8 if tiny else 64,
            advantage_granularity="trajectory",
            num_generations=8,
            per_device_train_batch_size=96 if tiny else 16,
            max_steps=options.rl_steps,
            learning_rate=3e-3 if tiny else 1e-5,
            lr_scheduler_type="constant",
            entropy_coef=0.005 if tiny else 0.0,
            num_eval_episodes=400,
            bf16=False if tiny else None,
            use_cpu=tiny,
            gradient_checkpointing=not tiny,
            seed=options.seed,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    trainer.save_model()
    trainer.accelerator.end_training()
    if not trainer.accelerator.is_main_process:
        return

    history = [(log["step"], log["return/mean"]) for log in trainer.state.log_history if "return/mean" in log]
    plt.plot(*zip(*history))
    plt.xlabel("update")
    plt.ylabel("mean return of the training episodes")
    plt.title(GAME)
    plt.savefig(options.output_dir / "return.png", dpi=120)
    for name, metrics in (("before", before), ("after", after)):
        print(
            f"{name:>6}: return {metrics['eval_return']:.3f} +- {metrics['eval_return_sem']:.3f}, "
            f"success {metrics['eval_success']:.3f}, turns {metrics['eval_turns/mean']:.2f}"
        )


if __name__ == "__main__":
    main()
