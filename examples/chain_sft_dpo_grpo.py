"""Train one LoRA adapter on guess-the-number in three stages: SFT, DPO and multi-turn GRPO.

    python examples/chain_sft_dpo_grpo.py --seed 0

The script makes a tiny model that knows the game's words but plays at random. SFT trains on games of a policy that guesses
any number the hints still allow, DPO on pairs of a good and a bad guess, and GRPO on the model's own games. The stages are
written to `<output_dir>/pipeline.yaml`; `agile-trainers chain <output_dir>/pipeline.yaml` runs the same stages. Both
commands resume an interrupted run. At the end plain PEFT loads every folder in a new process. The logits of a folder must
equal those of the stage's trainer, and the logits of a stage's reference must equal those of the policy before it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # on tiny tensors a second thread costs more than it saves
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import yaml
from datasets import disable_progress_bars
from peft import PeftModel
from rich.console import Console
from transformers.utils import logging

from agile_environments.guess_number import (
    LEVELS,
    GuessNumber,
    demonstrations,
    halving_policy,
    random_legal_policy,
    random_policy,
)
from agile_trainers.cli.chain.command import results, run_pipeline
from agile_trainers.cli.chain.stages import Stage, read_pipeline
from agile_trainers.embedded import END_OF_TURN, START_OF_TURN, make_embedded_model, sft_trainer, words_of
from agile_trainers.envs.scripted_policies import ScriptedPolicy, compare
from agile_trainers.types import Message

HIGH, GUESSES = LEVELS["normal"]
ON_CPU: dict[str, Any] = {"bf16": False, "use_cpu": True, "gradient_checkpointing": False}
QUIET: dict[str, Any] = {"report_to": "none", "disable_tqdm": True, "logging_steps": 10}

LOAD = """
import json, sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
base, *folders = sys.argv[1:]
assert "agile_trainers" not in sys.modules
for folder in folders:
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).eval()
    with torch.no_grad():
        print(json.dumps(model(input_ids=torch.arange(3, 23)[None]).logits.tolist()))
"""
"""Loads the folders with plain PEFT, without this package."""


def tiring(turns: int) -> ScriptedPolicy:
    """A policy that halves for some turns and then ignores all hints."""

    def policy(messages: list[Message], rng: random.Random) -> str:
        return (halving_policy if len(messages) // 2 < turns else random_policy)(messages, rng)

    return policy


def preferences(games: int, first: int) -> list[dict[str, str]]:
    """Pairs of a good and a bad guess, equally many for the first, second and third turn of a game.

    Rows are text: the chat template ends an answer with a newline, which no earlier stage trains and no rollout samples.
    """
    seeds = [range(first + turns * games, first + (turns + 1) * games) for turns in range(GUESSES - 1)]
    pairs = [compare(GuessNumber(), halving_policy, tiring(turns), seeds[turns]) for turns in range(GUESSES - 1)]
    rows = [pair for turn in pairs for pair in turn[: min(map(len, pairs))]]
    return [{name: text(row[name]) for name in row} for row in rows]


def text(messages: list[Message]) -> str:
    """A conversation up to the next answer, or an answer, which TRL ends with the end-of-turn token."""
    if messages[0]["role"] == "assistant":
        return messages[0]["content"]
    turns = [f"{START_OF_TURN}{message['role']}\n{message['content']}{END_OF_TURN}\n" for message in messages]
    return "".join([*turns, f"{START_OF_TURN}assistant\n"])


def make_base(folder: Path, seed: int, steps: int) -> Path:
    """A model trained on games of a policy that follows the hints and of one that ignores them, half each."""
    base = folder / "base"
    if (base / "done").is_file():
        return base
    words = words_of(demonstrations(100), "invalid", "correct")
    untrained = make_embedded_model(folder / "untrained", words=words, seed=seed)
    rows = [
        game
        for policy, first in ((random_policy, seed * 100_000), (random_legal_policy, seed * 100_000 + 50_000))
        for game in demonstrations(16 * steps, seed=first, policy=policy)
    ]
    trainer = sft_trainer(untrained, rows, base, seed=seed, max_steps=steps)
    trainer.train()
    trainer.save_model()
    (base / "done").touch()
    return base


def write_pipeline(output: Path, seed: int, scale: float, episodes: int) -> Path:
    """Write the rows of every stage, and the pipeline file."""
    games, first = round(32 * 150 * scale), seed * 100_000
    rows = {
        "games": demonstrations(games, seed=first),
        "pairs": preferences(games, first),
        "secrets": [{"secret": secret} for secret in range(1, HIGH + 1)],
    }
    for name, content in rows.items():
        lines = [json.dumps(row) + "\n" for row in content]
        (output / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    pipeline = {
        "output_dir": str(output),
        "model": str(make_base(output, seed, round(200 * scale))),
        "environment": "agile:guess_number",
        "lora": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
        "options": {
            **ON_CPU,
            **QUIET,
            "seed": seed,
            "lr_scheduler_type": "constant",
            "save_steps": 50,
            "save_total_limit": 1,
        },
        "evaluation": {"num_eval_episodes": episodes},
        "stages": [
            {
                "algorithm": "sft",
                "dataset": str(output / "games.jsonl"),
                "learning_rate": 3e-3,
                "max_steps": round(150 * scale),
                "per_device_train_batch_size": 32,
                "assistant_only_loss": True,
            },
            {
                "algorithm": "dpo",
                "dataset": str(output / "pairs.jsonl"),
                "learning_rate": 1e-3,
                "max_steps": round(60 * scale),
                "per_device_train_batch_size": 32,
                "beta": 0.1,
                # DPO's loss alone also makes the end of an answer less likely.
                "loss_type": ["sigmoid", "sft"],
            },
            {
                "algorithm": "grpo",
                "dataset": str(output / "secrets.jsonl"),
                "learning_rate": 3e-3,
                "max_steps": round(150 * scale),
                "num_iterations": 1,  # four of each of half as many batches end at .86, .72 and .68
                "max_turns": GUESSES,
                "max_new_tokens": 2,
                "advantage_granularity": "trajectory",
                "num_generations": 8,
                "per_device_train_batch_size": 8 * HIGH,
                "beta": 0.005,
                "entropy_coef": 0.02,  # without it the policy gets certain early and misses one or two secrets
            },
        ],
    }
    path = output / "pipeline.yaml"
    path.write_text(yaml.safe_dump(pipeline, sort_keys=False), encoding="utf-8")
    return path


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=torch.arange(3, 23)[None]).logits


def remember(stage: Stage, trainer: Any) -> None:
    """Save the logits of the trainer's model, and check that weights and logs are finite."""
    assert isinstance(trainer.model, PeftModel) and all(p.isfinite().all() for p in trainer.model.parameters())
    numbers = [value for entry in trainer.state.log_history for value in entry.values() if isinstance(value, float)]
    assert numbers and all(map(math.isfinite, numbers))
    path = Path(trainer.args.output_dir) / "logits.pt"
    torch.save(logits_of(trainer.model), path)


def check_folders(base: str, folders: list[Path]) -> dict[str, float]:
    """Largest differences of logits: each folder from its trainer, each reference from the policy before it."""
    references = {folder: before for before, folder in pairwise(folders)}
    load = [*folders, *(folder / "ref" for folder in references)]
    done = subprocess.run(
        [sys.executable, "-c", LOAD, base, *map(str, load)], capture_output=True, text=True, check=True
    )
    logits = dict(zip(load, (torch.tensor(json.loads(line)) for line in done.stdout.splitlines())))
    found = {f"{f.name}: folder - trainer": logits[f] - torch.load(f / "logits.pt") for f in folders}
    found |= {f"{f.name}: reference - policy of {b.name}": logits[f / "ref"] - logits[b] for f, b in references.items()}
    return {name: float(difference.abs().max()) for name, difference in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/chain_sft_dpo_grpo"))
    parser.add_argument("--scale", type=float, default=1.0, help="share of the updates, for a quick trial")
    parser.add_argument("--eval_episodes", type=int, default=1000)
    options = parser.parse_args()
    started, output = time.perf_counter(), options.output_dir
    output.mkdir(parents=True, exist_ok=True)
    disable_progress_bars()
    logging.disable_progress_bar()
    console = Console()
    pipeline = read_pipeline(write_pipeline(output, options.seed, options.scale, options.eval_episodes))
    rows = run_pipeline(pipeline, console, after_stage=remember)
    differences = check_folders(pipeline.model, [output / stage.name for stage in pipeline.stages])

    console.print(results(rows))
    for name, difference in differences.items():
        console.print(f"largest difference of logits, {name}: {difference:.1e}")
    returns = {row["name"]: row["evaluation"]["return"] for row in rows}
    seconds = round(time.perf_counter() - started)
    summary = {"seed": options.seed, "returns": returns, "differences": differences, "seconds": seconds}
    (output / "summary.json").write_text(json.dumps(summary, indent=2), encoding="utf-8")
    console.print(f"{seconds} seconds")
    if max(differences.values()) > 1e-6:
        raise SystemExit("A folder's logits differ from those of its trainer.")


if __name__ == "__main__":
    main()
