"""Trains with failures planted on purpose, and without any, and records what the diagnosis reads (``make planted``).

The model is that of ``agile-trainers demo`` after its supervised stage, or an untrained one on a probe. Each run of
:data:`RUNS` is an entry of ``tests/evaluation/recorded_runs.json``, on which
``tests/evaluation/test_recorded_runs.py`` plays the diagnosis again. A run that is recorded is not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from probes import RECIPE
from transformers import PrinterCallback

from agile_environments.guess_number import GuessNumber, demonstrations
from agile_environments.probes import PROBE_WORDS, PROBES
from agile_trainers.cli.demo import GROUP, GUESSES, HIGH, Budget, lora, make_sft_trainer, secrets
from agile_trainers.embedded import make_embedded_model, words_of
from agile_trainers.evaluation.diagnosis import METRICS
from agile_trainers.trainers import find_algorithm

RECORDED = Path(__file__).resolve().parents[1] / "tests" / "evaluation" / "recorded_runs.json"

Result = tuple[str, float, bool, bool, dict[str, Any]]
Logs = Sequence[Mapping[str, Any]]


class PaysLength(GuessNumber):
    """Pays for the words of an answer, whatever they say."""

    def step(self, action: str) -> Result:
        observation, _, *rest = super().step(action)
        return observation, 0.1 * len(action.split()), *rest


class FlippedSign(GuessNumber):
    """Pays the negative of the reward."""

    def step(self, action: str) -> Result:
        observation, reward, *rest = super().step(action)
        return observation, -reward, *rest


class RandomReward(GuessNumber):
    """Pays at random for each guess."""

    def step(self, action: str) -> Result:
        observation, _, *rest = super().step(action)
        return observation, random.random(), *rest


class Dies(GuessNumber):
    """Fails in every guess after the first batch."""

    games = 0

    def reset(self, *args: Any, **kwargs: Any) -> Any:
        type(self).games += 1
        return super().reset(*args, **kwargs)

    def step(self, action: str) -> Result:
        if type(self).games > 1.5 * GROUP * HIGH:
            raise RuntimeError("the simulator is gone")
        return super().step(action)


class GivingUpPays(GuessNumber):
    """Ends with the guess 12, which costs nothing; every other guess costs more than success pays."""

    def step(self, action: str) -> Result:
        observation, reward, terminated, *rest = super().step(action)
        given_up = action.strip() == "12"
        return observation, 0.0 if given_up else 0.5 * reward - 0.3, terminated or given_up, *rest


class NaNReward(GuessNumber):
    """Pays NaN for the answer 7."""

    def step(self, action: str) -> Result:
        observation, reward, *rest = super().step(action)
        return observation, math.nan if action.strip() == "7" else reward, *rest


def nan_for_seven(completions: Sequence[Any], trajectories: Sequence[Any], **_: Any) -> list[float]:
    """Return NaN where an answer was 7."""
    return [math.nan if any(turn.text.strip() == "7" for turn in one.turns) else 0.0 for one in trajectories]


def random_reward(completions: Sequence[Any], **_: Any) -> list[float]:
    """Pay at random, ten times as much as the game."""
    return [random.uniform(-10, 10) for _ in completions]


class SaysNothing(GuessNumber):
    """Answers no guess."""

    def step(self, action: str) -> Result:
        return "", *super().step(action)[1:]


class OneSecret(GuessNumber):
    """Plays the same secret whatever the seed is."""

    def reset(self, *args: Any, **kwargs: Any) -> Any:
        return super().reset(seed=6)


@dataclass(frozen=True)
class Run:
    """A run: by default that of the demo, with its options."""

    environment: Any = "agile:guess_number"
    steps: int = 24
    options: dict[str, Any] = field(default_factory=dict)
    """Options that differ from the demo's, or from a probe's."""
    algorithm: str = "grpo"
    reward_funcs: Callable[..., Any] | None = None
    rows: Sequence[dict[str, Any]] | None = None
    """Default: each secret once. Empty: no data set."""
    seed: int = 0
    probe: str = ""
    """Name of a probe to train on instead."""
    reads_prompt: bool = True
    """False takes the outputs of attention away, so that an answer depends on no earlier token."""


RUNS: dict[str, Run] = {
    "length": Run(PaysLength, options={"max_new_tokens": 8}),
    "flipped sign": Run(FlippedSign),
    "learning rate times 100": Run(options={"learning_rate": 0.3}),
    "learning rate .3, 64 episodes": Run(steps=20, options={"learning_rate": 0.3, "per_device_train_batch_size": 64}),
    "learning rate .05": Run(steps=30, options={"learning_rate": 0.05}),
    "learning rate .05, 64 episodes": Run(
        steps=30, options={"learning_rate": 0.05, "per_device_train_batch_size": 64}, seed=1
    ),
    "giving up pays": Run(GivingUpPays, steps=60, options={"per_device_train_batch_size": 64}),
    "one turn of four": Run(steps=30, options={"max_turns": 1}),
    "two turns of four": Run(steps=30, options={"max_turns": 2}),
    "prompts unread": Run(steps=105, reads_prompt=False, options={"diagnosis_interval": 10}),
    "random reward": Run(RandomReward),
    "random reward function": Run(reward_funcs=random_reward),
    "beta=10": Run(options={"beta": 10.0}),
    "environment dies": Run(Dies),
    "NaN for one answer": Run(NaNReward),
    "NaN for one answer, reward function": Run(reward_funcs=nan_for_seven),
    "one task": Run(rows=[{"secret": 7}] * HIGH, steps=14),
    "entropy bonus": Run(options={"entropy_coef": 2.0, "max_new_tokens": 8}),
    "temperature .01": Run(options={"temperature": 0.01}, steps=12),
    "gamma=0": Run(probe="delayed", algorithm="reinforce", steps=8, options={"gamma": 0.0, "num_generations": 1}),
    "empty observations": Run(SaysNothing, steps=12),
    "one secret, no rows": Run(OneSecret, rows=()),
    "healthy, grpo": Run(steps=45),
    "healthy, reinforce": Run(steps=25, algorithm="reinforce", seed=1),
    "healthy, ppo": Run(steps=25, algorithm="ppo", seed=2, options={"learning_rate": 1e-3}),
    "healthy, slow": Run(steps=40, options={"learning_rate": 3e-4}, seed=1),
    "healthy, kl": Run(steps=25, options={"beta": 0.04}, seed=2),
    "healthy, 64 episodes": Run(steps=100, options={"per_device_train_batch_size": 64}, seed=3),
    "healthy, probe conditional": Run(steps=40, probe="conditional"),
    "healthy, probe memory": Run(steps=60, probe="memory"),
    "healthy, probe two inputs": Run(steps=60, probe="two_inputs"),
}
LAPTOP: dict[str, Any] = {
    "num_iterations": 1,
    "bf16": False, "use_cpu": True, "gradient_checkpointing": False, "save_strategy": "no", "report_to": "none",
    "logging_steps": 1, "disable_tqdm": True, "log_rollouts": False, "lr_scheduler_type": "constant",
}  # fmt: skip
DEMO: dict[str, Any] = {
    "max_turns": GUESSES, "max_new_tokens": 2, "num_generations": GROUP, "per_device_train_batch_size": GROUP * HIGH,
    "learning_rate": 3e-3, "entropy_coef": 0.08, "entropy_coef_schedule": "linear",
}  # fmt: skip
GUESSING: dict[str, dict[str, Any]] = {
    "grpo": {"advantage_granularity": "trajectory"}, "reinforce": {"num_generations": 1}, "ppo": {"num_generations": 1},
}  # fmt: skip
"""Options of an algorithm that differ from the demo's."""


def settings(run: Run) -> dict[str, Any]:
    """Return the options of a run."""
    if run.probe:
        spec = PROBES[run.probe]
        own = {**RECIPE, "max_turns": spec.factory.max_turns, "max_new_tokens": spec.max_new_tokens}
    else:
        own = {**DEMO, **GUESSING.get(run.algorithm, {})}
    return {**LAPTOP, **own, "max_steps": run.steps, "seed": run.seed, **run.options}


def base_of(run: Run, folder: Path) -> Path:
    """Return the folder of the model that a run begins with."""
    base = folder / (f"probe-{run.seed}" if run.probe else "sft")
    if not base.exists():
        words = PROBE_WORDS if run.probe else words_of(demonstrations(100), "invalid", "correct")
        positions: dict[str, Any] = {"max_position_embeddings": 512} if run.probe else {}
        untrained = make_embedded_model(
            base if run.probe else folder / "untrained", words=words, seed=run.seed, **positions
        )
        if not run.probe:
            supervised = make_sft_trainer(untrained, base, 0, Budget())
            supervised.remove_callback(PrinterCallback)
            supervised.train()
            supervised.save_model()
    return base


def train(run: Run, folder: Path) -> Logs:
    """Train, and return the log of each update."""
    random.seed(run.seed)
    Dies.games = 0
    base, trainer_class, chosen = base_of(run, folder), find_algorithm(run.algorithm), settings(run)
    repeats, rows = 1 if chosen["num_generations"] > 1 else GROUP, secrets() if run.rows is None else run.rows
    trainer = trainer_class(
        model=str(base),
        environment=f"agile:probe/{run.probe}" if run.probe else run.environment,
        args=trainer_class.config_class(output_dir=str(folder / "run"), **chosen),
        train_dataset=None if run.probe or not rows else Dataset.from_list([*rows] * repeats),
        peft_config=None if run.probe and run.algorithm != "ppo" else lora(),
        reward_funcs=run.reward_funcs,
    )
    if not run.reads_prompt:
        with torch.no_grad():
            for name, weight in trainer.model.named_parameters():
                if "o_proj" in name:
                    weight.zero_().requires_grad_(False)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [log for log in trainer.state.log_history if "loss" in log]


def recorded(run: Run, logs: Logs) -> dict[str, Any]:
    """Return what the diagnosis reads of a run as JSON can hold it, to three digits: lists, a number where all are equal."""
    metrics: dict[str, Any] = {}
    for name in sorted(METRICS & {name for log in logs for name in log}):
        values = [_short(log.get(name)) for log in logs]
        metrics[name] = values[0] if len(set(values)) == 1 else values
    chosen = settings(run)
    options = {
        "has_critic": run.algorithm == "ppo",
        "max_new_tokens": chosen["max_new_tokens"],
        "beta": chosen.get("beta", 0.0),
        "entropy_coef": chosen.get("entropy_coef", 0.0),
        "temperature": chosen.get("temperature", 1.0),
        "gamma": chosen.get("gamma", 1.0),
        "max_turns": chosen["max_turns"],
        "num_generations": chosen["num_generations"],
        "generation_batch_size": chosen["per_device_train_batch_size"],
    }
    return {"options": options, "logs": len(logs), "metrics": metrics}


def _short(value: float | None) -> float | None:
    return float(f"{value:.3g}") if value is not None and isfinite(value) else None


def main() -> None:
    """Train what is not recorded, and write the records."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "names", nargs="*", help="runs to train, also if they are recorded (default: those that are not)"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    known = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for name in given.names or [name for name in RUNS if name not in known]:
            known[name] = recorded(RUNS[name], train(RUNS[name], Path(folder)))
            lines = [f"{json.dumps(one)}: {json.dumps(known[one])}" for one in RUNS if one in known]
            RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
            print(f"{name}: {known[name]['logs']} updates", flush=True)


if __name__ == "__main__":
    main()
