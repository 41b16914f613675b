"""Train a model to call a calculator: SFT on scripted episodes teaches the format, then multi-turn GRPO.

    python examples/tool_calculator.py                                        # a tiny model made in code, on CPU
    python examples/tool_calculator.py --model Qwen/Qwen2.5-0.5B-Instruct     # any chat model, without the SFT stage

Training plays expressions of the split `train`; success is measured on expressions of `test`, which are not trained on.
Writes the adapter, the episodes and `success.png` to --output_dir.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # on tiny tensors a second thread costs more than it saves

import matplotlib
from peft import LoraConfig

from agile_environments.calculator import Calculator, demonstrations
from agile_trainers.embedded import make_embedded_model, sft_trainer, words_of
from agile_trainers.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RANK = os.environ.get("RANK", "0")
"""Rank of this process under `accelerate launch`."""


def tiny_model(folder: Path, seed: int, steps: int, batch: int) -> Path:
    """Make a model that knows the words of the task, and teach it the format from a policy that seldom calls the tool."""
    episodes = demonstrations(steps * batch, seed=seed * steps * batch)
    untrained = make_embedded_model(folder / f"untrained-{RANK}", words=words_of(episodes, "system"), seed=seed)
    length = {"max_steps": steps, "per_device_train_batch_size": batch}
    trainer = sft_trainer(
        untrained, episodes, folder / "sft", seed=seed, logging_steps=50, disable_tqdm=False, **length
    )
    trainer.train()
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()  # the first process saves
    return folder / "sft"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a chat model (default: a tiny one that this script makes)")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/tool_calculator"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sft_steps", type=int, default=400)
    parser.add_argument("--rl_steps", type=int, default=120)
    options = parser.parse_args()
    tiny = options.model is None
    model = str(tiny_model(options.output_dir, options.seed, options.sft_steps, 32)) if tiny else options.model

    trainer = MultiTurnGRPOTrainer(
        model=model,
        environment="agile:calculator",
        args=MultiTurnGRPOConfig(
            output_dir=str(options.output_dir),
            max_turns=3,
            max_new_tokens=16 if tiny else 256,
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
        eval_dataset=Calculator().dataset("test", 400),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    trainer.save_model()
    trainer.accelerator.end_training()
    if not trainer.accelerator.is_main_process:
        return

    history = [(log["step"], log["success"]) for log in trainer.state.log_history if "success" in log]
    plt.plot(*zip(*history))
    plt.xlabel("update")
    plt.ylabel("success of the training episodes")
    plt.title("agile:calculator")
    plt.savefig(options.output_dir / "success.png", dpi=120)
    for name, metrics in (("before", before), ("after", after)):
        print(
            f"{name:>6}: success on held-out expressions {metrics['eval_success']:.3f}, "
            f"return {metrics['eval_return']:.3f} +- {metrics['eval_return_sem']:.3f}"
        )


if __name__ == "__main__":
    main()
