"""Trains PPO for two steps, pushing every checkpoint, and at the end; a second process loads what was pushed by its id.

Usage: HF_ENDPOINT=... python hub_push.py push|load MODEL OUTPUT
"""

import sys
from pathlib import Path

import torch
from checkpointed_runs import SAVING
from games import make_trainer
from peft import PeftModel
from ppo_games import make_ppo
from transformers import AutoModelForCausalLM, AutoTokenizer

TOKEN = "hf_" + "secret" * 6
IDS = torch.arange(5, 25)[None]


def push(model: Path, output: Path) -> None:
    trainer = make_ppo(
        model, output / "run", max_steps=2, beta=0.1, reference_adapter=True, num_eval_episodes=4, eval_strategy="steps",
        eval_steps=1, push_to_hub=True, hub_strategy="checkpoint", hub_always_push=True, hub_token=TOKEN,
        save_total_limit=1, learning_rate=0.1, steps_per_generation=2, **SAVING,
    )  # fmt: skip
    trainer.train()
    trainer.push_to_hub()
    trainer.model.eval()
    torch.save(trainer.model(IDS).logits, output / "logits.pt")


def load(model: Path, output: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, "tester/run").eval()
    tokenizer = AutoTokenizer.from_pretrained("tester/run")
    continued = make_trainer("tester/run", output / "continued", lora=False)
    continued.model.eval()
    torch.save(
        {
            "logits": loaded(IDS).logits,
            "continued": continued.model(IDS).logits,
            "vocabulary": len(tokenizer),
            "parent": continued.checkpoints.record()["parent"],
        },
        output / "loaded.pt",
    )


if __name__ == "__main__":
    {"push": push, "load": load}[sys.argv[1]](*map(Path, sys.argv[2:]))
