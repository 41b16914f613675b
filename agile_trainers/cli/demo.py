"""``agile-trainers demo``: trains an agent from an untrained model, in minutes on a CPU.

A tiny model is made in code, learns the format of guess-the-number from scripted games (TRL's ``SFTTrainer``), and then
learns to play it well by multi-turn GRPO with LoRA. All output is under ``--output_dir``.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Set before torch is imported: on tiny tensors, a second thread makes training slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from datasets import Dataset, disable_progress_bars
from peft import LoraConfig, PeftModel
from rich.console import Console
from rich.table import Table
from transformers import PrinterCallback
from transformers.utils import logging
from trl import SFTTrainer

from agile_environments.guess_number import LEVELS, demonstrations, halving_policy, random_policy
from agile_trainers import embedded
from agile_trainers.algorithms.grpo import MultiTurnGRPOConfig
from agile_trainers.checkpoints.disclosure import CURVE
from agile_trainers.checkpoints.model_card import write_card_of_rows
from agile_trainers.checkpoints.record import record_without_environment
from agile_trainers.cli.parser import check_output, seed_number
from agile_trainers.embedded import make_embedded_model, words_of
from agile_trainers.envs.base import EnvironmentFactory
from agile_trainers.envs.registry import make_environment_factory
from agile_trainers.envs.scripted_policies import ScriptedPolicy
from agile_trainers.evaluation.scripted_policies import play_scripted
from agile_trainers.monitor.progress import showing
from agile_trainers.records.reader import open_records, read_records
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.episode_options import EpisodeOptions, build_engine
from agile_trainers.rollout.spec import EpisodeSpec
from agile_trainers.trainers.algorithms import MultiTurnGRPOTrainer

ENVIRONMENT = "agile:guess_number"
HIGH, GUESSES = LEVELS["normal"]
GROUP = 8
"""Number of games with the same secret in one update, whose returns are compared."""
ROWS = 8
"""Rows of the table of each stage."""


@dataclass(frozen=True)
class Budget:
    """Numbers of updates and games."""

    sft_steps: int = 250
    sft_batch: int = 32
    rl_steps: int = 300
    eval_episodes: int = 1000


QUICK = Budget(sft_steps=20, rl_steps=4, eval_episodes=60)


def make_sft_trainer(model: Path, output: Path, seed: int, budget: Budget) -> SFTTrainer:
    """Make the trainer of the supervised stage, which teaches the format of the game with random legal play.

    Args:
        model: Folder of the untrained model.
        output: Folder to write the trained model to.
        seed: Chooses the games and their order.
        budget: Number of updates and of games in each; no game is repeated.
    """
    count = budget.sft_steps * budget.sft_batch
    games = demonstrations(count, seed=seed * count)
    length = {"max_steps": budget.sft_steps, "per_device_train_batch_size": budget.sft_batch}
    return embedded.sft_trainer(model, games, output, seed=seed, **length)


def make_trainer(
    model: str | PeftModel,
    output: Path,
    seed: int,
    budget: Budget,
    peft_config: LoraConfig | None = None,
    **changes: Any,
) -> MultiTurnGRPOTrainer:
    """Make the multi-turn GRPO trainer of the demo; ``changes`` are options that differ."""
    trainer = MultiTurnGRPOTrainer(
        model=model,
        environment=ENVIRONMENT,
        args=make_arguments(output, seed, budget, **changes),
        train_dataset=secrets(),
        eval_dataset=secrets(),
        peft_config=peft_config,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def secrets() -> Dataset:
    """Return the rows of the game: each secret once."""
    return Dataset.from_dict({"secret": list(range(1, HIGH + 1))})


def make_arguments(output: Path, seed: int, budget: Budget, **changes: Any) -> MultiTurnGRPOConfig:
    """Make the configuration of the demo's trainer, which plays each secret ``GROUP`` times in every batch.

    Args:
        output: Folder of the run.
        seed: Its seed.
        budget: Numbers of updates and games.
        changes: Options that differ.
    """
    options: dict[str, Any] = {
        "output_dir": str(output), "max_turns": GUESSES, "max_new_tokens": 2, "advantage_granularity": "trajectory",
        "num_generations": GROUP, "per_device_train_batch_size": GROUP * HIGH, "max_steps": budget.rl_steps,
        "num_iterations": 2,  # half of the games of one update each
        "num_eval_episodes": budget.eval_episodes, "learning_rate": 3e-3, "lr_scheduler_type": "constant",
        "entropy_coef": 0.03,  # without it, the policy becomes deterministic early and misses one or two secrets
        "entropy_coef_schedule": "linear", "beta": 0.0, "gradient_checkpointing": False, "bf16": False, "use_cpu": True,
        "seed": seed, "save_strategy": "no", "report_to": "none", "logging_steps": 1, "disable_tqdm": True,
    }  # fmt: skip
    return MultiTurnGRPOConfig(**{**options, **changes})


def lora() -> LoraConfig:
    """Return the adapter of the demo."""
    return LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")


def scripted_scores(policy: ScriptedPolicy, tokenizer: Any, args: Any, episodes: int) -> dict[str, float]:
    """Let a scripted policy answer in place of the model, within the limits of training; return metrics of an evaluation."""
    options = EpisodeOptions.of_args(args)

    def engine(factory: EnvironmentFactory) -> RolloutEngine:
        return build_engine(options, options.make_pool(factory), tokenizer)

    specs = [EpisodeSpec(index, (index,), {"secret": index % HIGH + 1}) for index in range(episodes)]
    games = play_scripted(engine, make_environment_factory(ENVIRONMENT), lambda _: policy, specs, tokenizer)
    return {
        "eval_success": sum(bool(game.success) for game in games) / episodes,
        "eval_return": sum(game.episode_return for game in games) / episodes,
        "eval_episodes": episodes,
    }


def run(output: Path, seed: int, budget: Budget, console: Console) -> Mapping[str, Mapping[str, float]]:
    """Run the demo.

    Args:
        output: Folder for all output.
        seed: Seed of the model, the games and the sampling.
        budget: Number of updates and of evaluation episodes.
        console: Console for the output.

    Returns:
        The metrics of evaluations by name: random play, the model after SFT and after RL, and optimal play.
    """
    started = time.perf_counter()
    disable_progress_bars()
    logging.disable_progress_bar()
    console.rule(f"Guess the number between 1 and {HIGH} in {GUESSES} guesses")
    # A vocabulary of the game's words alone: an entropy bonus over hundreds of unused tokens would reduce success.
    words = words_of(demonstrations(100), "invalid", "correct")
    untrained = make_embedded_model(output / "untrained", words=words, seed=seed)
    base = output / "sft"
    supervised = make_sft_trainer(untrained, base, seed, budget)
    with showing(supervised.callback_handler, console, "learning the format", rows=ROWS):
        supervised.train()
    supervised.save_model()
    learned = record_without_environment("SFT", supervised.model, supervised.state.global_step)
    log, rows = supervised.state.log_history, "agile_environments.guess_number:demonstrations"
    write_card_of_rows(base, base.name, learned, supervised.args, log, rows)

    trainer = make_trainer(str(base), output / "rl", seed, budget, lora())
    episodes, tokenizer = budget.eval_episodes, trainer.processing_class
    random, sft = scripted_scores(random_policy, tokenizer, trainer.args, episodes), trainer.evaluate()
    with showing(trainer.callback_handler, console, "multi-turn GRPO", rows=ROWS):
        trainer.train()
    optimal = scripted_scores(halving_policy, tokenizer, trainer.args, episodes)
    scores = {"random play": random, "after SFT": sft, "after RL": trainer.evaluate(), "optimal play": optimal}

    trainer.cards.baselines |= {"random play": random, "optimal play": optimal}
    adapter = output / "adapter"
    trainer.save_model(str(adapter))
    games, table = some_games(output / "rl" / "rollouts"), results_table(scores, episodes)
    _show(console, games, table, base, adapter, time.perf_counter() - started)
    return scores


def results_table(scores: Mapping[str, Mapping[str, float]], episodes: int) -> Table:
    """Make the table of scores, one row each."""
    table = Table("", "games won", "return", title=f"{episodes:,} sampled games each")
    for name, score in scores.items():
        table.add_row(name, f"{score['eval_success']:.1%}", f"{score['eval_return']:+.3f}")
    return table


def some_games(rollouts: Path, count: int = 3) -> str:
    """Format games of the last evaluation as plain text, those with the most turns first; each secret once.

    Args:
        rollouts: The folder of the trainer's rollout log.
        count: Number of games.
    """
    files = [path for run in open_records(rollouts) for path in run.files if path.name.startswith("eval-")]
    episodes = read_records(max(files, key=lambda path: path.name))  # the name begins with the step
    by_secret = {episode["reset_info"]["secret"]: episode for episode in episodes}
    longest = sorted(by_secret.values(), key=lambda episode: -len(episode["turns"]))
    return "\n\n".join(_game(episode) for episode in longest[:count])


def _game(episode: dict[str, Any]) -> str:
    lines = [f"environment: {episode['prompt'][-1]['content']}"]
    for turn in episode["turns"]:
        lines += [f"      model: {turn['text']}", f"environment: {turn['observation']}"]
    return "\n".join([*lines, f"(the number was {episode['reset_info']['secret']}; return {episode['return']:+.1f})"])


def _show(console: Console, games: str, table: object, base: Path, adapter: Path, seconds: float) -> None:
    console.rule("Some games of the trained model")
    console.print(games, highlight=False, soft_wrap=True)
    console.rule("Result")
    console.print(table)
    console.print(
        f"agile-trainers view {base.parent} --open shows the episodes in a browser.", highlight=False, soft_wrap=True
    )
    console.print(
        f"{seconds:.0f} seconds. Learning curve: {adapter / CURVE}. The adapter is in {adapter} and loads with\n\n"
        f'    base = AutoModelForCausalLM.from_pretrained("{base}")\n'
        f'    model = PeftModel.from_pretrained(base, "{adapter}")\n'
        f'    tokenizer = AutoTokenizer.from_pretrained("{adapter}")\n',
        highlight=False,
        soft_wrap=True,
    )


def main(argv: Sequence[str]) -> None:
    """Parse the options and run the demo."""
    parser = argparse.ArgumentParser(
        prog="agile-trainers demo",
        description="Trains a tiny untrained model, in minutes on a CPU: it learns the format of guess-the-number from "
        "scripted games, and then learns to play by multi-turn GRPO with LoRA.",
    )
    parser.add_argument(
        "--seed", type=seed_number, default=0, help="seed of the model, the games and the sampling (default: 0)"
    )
    parser.add_argument(
        "--output_dir", type=Path, default=Path("runs/demo"), help="folder to write (default: runs/demo)"
    )
    parser.add_argument("--quick", action="store_true", help="a few updates only, to test the installation")
    options = parser.parse_args(argv)
    check_output(options.output_dir)
    # Absolute, since the adapter's record names its base by this path.
    run(options.output_dir.resolve(), options.seed, QUICK if options.quick else Budget(), Console())
