"""Pushes runs that hold secrets of 60 kinds wherever a user can put one: two runs, a population and a chain.

Usage: HF_ENDPOINT=... python hub_secrets.py MODEL OUTPUT
"""

import os
import sys
from pathlib import Path
from typing import Any

import yaml
from checkpointed_runs import SAVING
from datasets import Dataset
from games import make_trainer
from planted import SECRETS, arguments, rows
from rich.console import Console
from transformers import AutoTokenizer, TrainerCallback

from agile_trainers.cli.chain.command import run_pipeline
from agile_trainers.cli.chain.stages import read_pipeline
from agile_trainers.cli.evolve.command import run_plan
from agile_trainers.cli.evolve.plan import read_population
from agile_trainers.envs.registry import make_environment_factory

WORDS = SECRETS["words"]
OPTIONS: dict[str, Any] = {
    "bf16": False, "use_cpu": True, "gradient_checkpointing": False, "max_turns": 2, "max_new_tokens": 3,
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "num_generations": 2, "max_steps": 2,
    "logging_steps": 1, "report_to": "none", "disable_tqdm": True, "run_name": WORDS, "project": SECRETS["otp"],
    "system_prompt": f"Be brief. {SECRETS['dsn']}", "stop_strings": [SECRETS["pin_code"]],
    "hub_token": SECRETS["hugging_face"],
    "chat_template_kwargs": {"license": SECRETS["license"]}, "trackio_space_id": SECRETS["session"],
    "model_init_kwargs": {"token": SECRETS["hugging_face"]}, "learning_rate": 1e-2,
}  # fmt: skip


class Notes(TrainerCallback):
    """Writes secrets beside a checkpoint, into the state and into the logs, as a user's callback might."""

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.log_history[-1]["note"] = WORDS

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.trial_name = WORDS
        (Path(args.output_dir) / "notes.json").write_text(WORDS)


def run(model: Path, output: Path, **changes: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model, seed_phrase=SECRETS["seed_phrase"])
    trainer = make_trainer(
        model, output, environment=make_environment_factory("planted:Keeper", **arguments()), callbacks=[Notes()],
        train_dataset=Dataset.from_list(rows(8)), push_to_hub=True, hub_always_push=True,
        **{**OPTIONS, **SAVING, "max_steps": 2, "steps_per_generation": 2, "shuffle_dataset": False, **changes},
    )  # fmt: skip
    trainer.processing_class.init_kwargs |= tokenizer.init_kwargs
    trainer.train()
    trainer.push_to_hub()


def files(model: Path, output: Path) -> None:
    """A population and a chain, from YAML files."""
    shared = {"environment": "planted:Keeper", "environment_args": arguments()}
    episodes = {**OPTIONS, "hub_token": None}
    (output / "rows.jsonl").write_text("")
    Dataset.from_list(rows(8)).to_json(output / "rows.jsonl")
    lora = {"r": 2, "lora_alpha": 4, "target_modules": "all-linear"}
    own = {**episodes, "num_eval_episodes": 4, "model_init_kwargs": None}
    plan = {
        **shared, "output_dir": str(output / "evolved"), "model": str(model), "algorithm": "grpo", "lora": lora,
        "members": 2, "rounds": 2, "hyperparameters": {"learning_rate": {"low": 1e-3, "high": 1e-1}},
        "dataset": str(output / "rows.jsonl"), "options": {name: value for name, value in own.items() if value is not None},
    }  # fmt: skip
    (output / "evolve.yaml").write_text(yaml.safe_dump(plan, allow_unicode=True))
    read = read_population(output / "evolve.yaml")
    _, population = run_plan(read.plan, read.model, read.environment, read.plan.lora, Console(quiet=True), table=False)
    population.push_to_hub("evolved", token=SECRETS["hugging_face"])

    supervised = {
        name: OPTIONS[name] for name in ("bf16", "use_cpu", "max_steps", "report_to", "disable_tqdm", "run_name")
    }
    pushes = {"push_to_hub": True, "hub_always_push": True, "hub_token": SECRETS["hugging_face"], **SAVING}
    demonstrations = [{"messages": [{"role": "user", "content": "say"}, {"role": "assistant", "content": WORDS}]}] * 4
    Dataset.from_list(demonstrations).to_json(output / "said.jsonl")
    chain = {
        **shared, "output_dir": str(output / "chain"), "model": str(model), "lora": lora,
        "evaluation": {"num_eval_episodes": 2},
        "stages": [
            {"algorithm": "sft", "dataset": str(output / "said.jsonl"), "hub_model_id": "chain-sft", **supervised, **pushes,
             "per_device_train_batch_size": 2},
            {"algorithm": "grpo", "hub_model_id": "chain-grpo", "dataset": str(output / "rows.jsonl"), **episodes, **pushes,
             "num_eval_episodes": 2},
        ],
    }  # fmt: skip
    (output / "chain.yaml").write_text(yaml.safe_dump(chain, allow_unicode=True))
    run_pipeline(read_pipeline(output / "chain.yaml"), Console(quiet=True), progress="dicts")


if __name__ == "__main__":
    model, output = map(Path, sys.argv[1:])
    os.environ.update({name.upper(): value for name, value in SECRETS.items()})
    parts = os.environ.get("PARTS", "plain files").split()
    if "plain" in parts:
        run(model, output / "plain", hub_strategy="all_checkpoints")
    if "files" in parts:
        files(model, output)
