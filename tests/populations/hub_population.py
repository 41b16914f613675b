"""Trains a population with PPO, pushes its best member to the Hub, and loads it by its id.

Usage: HF_ENDPOINT=... python hub_population.py push MODEL OUTPUT
"""

import sys
from pathlib import Path

import torch
from peft import PeftModel
from populated import Talk, arguments, population
from transformers import AutoModelForCausalLM, AutoTokenizer

from agile_trainers.trainers import MultiTurnPPOTrainer

TOKEN, KEY = "hf_" + "secret" * 6, "a key without a form"
IDS = torch.arange(5, 25)[None]


def push(model: Path, output: Path) -> None:
    options = {"hub_token": TOKEN, "chat_template_kwargs": {"api_key": KEY}}
    made = population(model, output / "population", "ppo", max_steps=1, rounds=1, **options)
    made.run()
    try:
        made.push_to_hub("winner", token="hf_wrong")
    except ValueError as error:
        refused = str(error)
    commit = made.push_to_hub("winner", private=True)

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, "tester/winner").eval()
    args = arguments("ppo", output / "continued")
    pushed, member = (
        MultiTurnPPOTrainer(source, environment=Talk, args=args)
        for source in ("tester/winner", str(made.output_dir / "best"))
    )
    member.model.eval()
    result = {
        "refused": refused,
        "commit": commit.oid,
        "parent": pushed.checkpoints.record()["parent"],
        "logits": [one(IDS).logits for one in (loaded, member.model)],
        "weights": [dict(one.model.state_dict()) for one in (pushed, member)],
        "vocabulary": len(AutoTokenizer.from_pretrained("tester/winner")),
    }
    torch.save(result, output / "result.pt")


if __name__ == "__main__":
    {"push": push}[sys.argv[1]](*map(Path, sys.argv[2:]))
