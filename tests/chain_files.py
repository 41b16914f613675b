"""A pipeline of a chain, its rows and environment, and what it leaves."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
from pathlib import Path
from typing import Any

from agile_environments.guess_number import GuessNumber, demonstrations, halving_policy, random_legal_policy
from agile_trainers.envs.scripted_policies import compare


def pairs(count: int) -> list[dict[str, Any]]:
    """Found by its path: ``chain_files:pairs``."""
    return compare(GuessNumber(level="easy"), halving_policy, random_legal_policy, range(count))


class Talk(GuessNumber):
    """The same game, but any answer earns something, even an untrained model's."""

    def step(self, action: str) -> Any:
        observation, _, terminated, truncated, info = super().step(action)
        return observation, sum(map(ord, action)) % 5 / 4, terminated, truncated, info


def start_process() -> None:
    """Start a process with a session of its own, which goes on until it is killed; nothing in the training process."""
    null = subprocess.DEVNULL
    if multiprocessing.parent_process() is not None:  # a chain also plays inline, for evaluations
        subprocess.Popen(["sleep", "1000"], start_new_session=True, stdin=null, stdout=null, stderr=null)


class TalkBesideProcess(Talk):
    """The same in a process of its own; what it starts must end with it."""

    def __init__(self, level: str = "easy") -> None:
        super().__init__(level=level)
        start_process()


def lineage(folder: Path) -> list[str]:
    """The algorithms that a folder's record names, the latest first."""
    found, stage = [], json.loads((folder / "agile_trainers.json").read_text())
    while stage is not None:
        found.append(stage["algorithm"])
        stage = stage["parent"]
    return found


def pipeline_in(folder: Path, model: Path) -> dict[str, Any]:
    """SFT on a file, DPO on a function's rows, and two multi-turn stages; two small steps each. Writes the file."""
    rows = demonstrations(8, environment=GuessNumber(level="easy"))
    (folder / "games.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = {"max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": "1e-2"}
    episodes = {**steps, "max_turns": 2, "max_new_tokens": 3, "per_device_train_batch_size": 4, "beta": 0.1}
    episodes["gradient_accumulation_steps"] = 1
    return {
        "output_dir": str(folder / "chain"),
        "model": str(model),
        "environment": "chain_files:Talk",
        "environment_args": {"level": "easy"},
        "lora": {"r": 4, "lora_alpha": 8, "target_modules": r".*_proj"},
        "options": {
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "report_to": "none",
            "disable_tqdm": True,
            "save_strategy": "steps",
            "save_steps": 1,
            "lr_scheduler_type": "constant",
        },
        # Without a multi-turn stage, answers would have the default length: ten times the work of the training.
        "evaluation": {"num_eval_episodes": 3, "max_turns": 2, "max_new_tokens": 3},
        "stages": [
            {"algorithm": "sft", "dataset": str(folder / "games.jsonl"), "assistant_only_loss": True, **steps},
            {"algorithm": "dpo", "dataset": "chain_files:pairs", "dataset_args": {"count": 30}, **steps},
            {"algorithm": "grpo", "num_generations": 2, **episodes},
            {
                "algorithm": "ppo",
                "name": "ppo-after",
                "lora": {"r": 8, "lora_alpha": 16, "target_modules": r".*_proj"},
                "merge_lora_configs": True,
                **episodes,
            },
        ],
    }
