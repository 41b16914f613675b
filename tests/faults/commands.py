"""Commands that are killed: what they are started as, and what must be equal when they have ended."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from chain_files import pipeline_in
from huggingface_hub import ModelCard
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agile_trainers.cli.main import main

QUIET = {
    "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none", "disable_tqdm": True,
}  # fmt: skip
FINISHED = "finished"


def weights(folder: Path) -> dict[str, str]:
    """Digest of the weights of each file below a folder."""
    found = {}
    for file in sorted(folder.rglob("*.safetensors")):
        sha = hashlib.sha256()
        for name, value in sorted(load_file(file).items()):
            sha.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
        found[str(file.relative_to(folder))] = sha.hexdigest()[:12]
    return found


@dataclass(frozen=True)
class Command:
    """One command, in environments of one kind."""

    command: str
    environments: str
    ranks: int = 1

    @property
    def name(self) -> str:
        return f"{self.command}, {self.environments}"

    def play(self, model: Path, run: Path) -> None:
        """Run the command; what an earlier one left is taken up."""
        stop = main(COMMANDS[self.command][0](self, model, run))
        if stop:
            raise SystemExit(stop)
        (run.parent / FINISHED).touch()

    def finished(self, run: Path) -> bool:
        return (run.parent / FINISHED).is_file()

    def result(self, run: Path) -> Any:
        """What must be equal, killed or not."""
        return COMMANDS[self.command][1](run)

    @property
    def environment(self) -> str:
        """In processes, one that leaves a process of its own."""
        return "chain_files:TalkBesideProcess" if self.environments == "processes" else "chain_files:Talk"

    @property
    def options(self) -> dict[str, Any]:
        return {**QUIET, **({"environment_processes": 2} if self.environments == "processes" else {})}


def _evolve(command: Command, model: Path, run: Path) -> list[str]:
    episodes = {
        "num_generations": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_turns": 1,
        "max_new_tokens": 3, "num_eval_episodes": 4, "max_steps": 2,
    }  # fmt: skip
    file = run.parent / "population.yaml"
    contents = {
        "output_dir": str(run), "model": str(model), "environment": command.environment,
        "environment_args": {"level": "easy"},
        "lora": {"r": 2, "target_modules": r".*q_proj"}, "options": {**command.options, **episodes}, "algorithm": "grpo",
        "members": 3, "rounds": 2, "fitness": "return",
        "hyperparameters": {"learning_rate": {"low": "1e-3", "high": 1.0, "log": True}},
    }  # fmt: skip
    file.write_text(yaml.safe_dump(contents))
    return ["evolve", str(file)]


def _evolved(run: Path) -> Any:
    events = json.loads((run / "lineage.json").read_text())["events"]
    return weights(run), [{**event, "seconds": None} for event in events]


def _chain(command: Command, model: Path, run: Path) -> list[str]:
    pipeline = pipeline_in(run.parent, model)
    pipeline["output_dir"] = str(run)
    pipeline["options"] |= command.options
    pipeline["environment"] = command.environment
    if command.environments == "processes":  # of multi-turn stages alone
        del pipeline["options"]["environment_processes"]
        for stage in pipeline["stages"][2:]:
            stage["environment_processes"] = 2
    file = run.parent / "chain.yaml"
    file.write_text(yaml.safe_dump(pipeline))
    return ["chain", str(file)]


def _chained(run: Path) -> Any:
    return weights(run)


def _eval(command: Command, model: Path, run: Path) -> list[str]:
    adapter = run.parent / "adapter"
    if not adapter.is_dir():
        torch.manual_seed(0)
        config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        made = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
        made.save_pretrained(run.parent / "adapter.part")
        (run.parent / "adapter.part").rename(adapter)
    played = ["--environment", "agile:guess_number", "--max_turns", "2", "--max_new_tokens", "2", "--episodes", "24"]
    return ["eval", str(adapter), "--against", str(model), *played, "--output_dir", str(run)]


def _evaluated(run: Path) -> Any:
    adapter = run.parent / "adapter"
    card = ModelCard.load(adapter / "README.md")
    rows = card.data.eval_results or []
    newest = max(run.glob("eval-*/results.json"), key=lambda path: path.stat().st_mtime_ns)
    (environment,) = json.loads(newest.read_text())["environments"]
    figures = [{key: each[key] for key in ("success", "episode_return")} for each in environment["policies"]]
    return weights(adapter), [(row.metric_name, row.metric_value) for row in rows], figures


COMMANDS: dict[str, tuple[Callable[[Command, Path, Path], list[str]], Callable[[Path], Any]]] = {
    "evolve": (_evolve, _evolved),
    "chain": (_chain, _chained),
    "eval": (_eval, _evaluated),
}
"""The command line of each, which also writes its file, and what must be equal when it has ended."""
