"""Find the learning rate and the entropy bonus of multi-turn GRPO on guess-the-number with a population.

    python examples/population_guess_number.py --seed 0

The script makes the demo's tiny model, which knows the format of the game. Eight adapters on it draw their learning rates
over a factor of 100. After each round a tournament of two fills each place of the next one, and the hyperparameters of
copies are moved. Run again, it goes on where it was left. It prints a table after each round.
`<output_dir>/population` holds the lineage and the members, `<output_dir>/winner` the best policy of all rounds.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # on tiny tensors a second thread costs more than it saves
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from datasets import disable_progress_bars
from rich.console import Console
from transformers import PrinterCallback
from transformers.utils import logging as transformers_logging

from agile_environments.guess_number import demonstrations
from agile_trainers.cli.demo import ENVIRONMENT, Budget, lora, make_arguments, make_sft_trainer, secrets
from agile_trainers.cli.evolve.command import MemberProgress
from agile_trainers.embedded import make_embedded_model, words_of
from agile_trainers.populations import HyperparameterConfig, Population, Range


def make_base(output: Path, budget: Budget) -> Path:
    """The model that members start from: the demo's, after SFT."""
    base = output / "sft"
    if not (base / "done").is_file():
        words = words_of(demonstrations(100), "invalid", "correct")
        untrained = make_embedded_model(output / "untrained", words=words, seed=0)
        trainer = make_sft_trainer(untrained, base, 0, budget)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        trainer.save_model()
        (base / "done").touch()
    return base


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/population_guess_number"))
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=60, help="updates of one member")
    parser.add_argument("--sft_steps", type=int, default=Budget.sft_steps)
    parser.add_argument("--eval_episodes", type=int, default=240, help="games after each round")
    options = parser.parse_args()
    disable_progress_bars()
    transformers_logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    console = Console()
    budget = Budget(sft_steps=options.sft_steps, rl_steps=options.steps, eval_episodes=options.eval_episodes)
    base = make_base(options.output_dir, budget)
    progress = MemberProgress(console, "success")
    population = Population(
        "grpo",
        str(base),
        make_arguments(options.output_dir / "population", options.seed, budget, num_iterations=1),
        ENVIRONMENT,
        HyperparameterConfig(learning_rate=Range(1e-4, 1e-2, log=True), entropy_coef=Range(0.01, 0.2, log=True)),
        members=options.members,
        rounds=options.rounds,
        strategy="tournament",
        fitness="success",
        seed=options.seed,
        train_dataset=secrets(),
        eval_dataset=secrets(),
        peft_config=lora(),
        on_trainer=progress.watch,
    )

    with progress.bar:
        lineage = population.run(progress.show)
    shutil.rmtree(options.output_dir / "winner", ignore_errors=True)
    winner = population.export(options.output_dir / "winner")
    best = lineage.winner
    assert best is not None
    console.print(f"Member {best.member} wins {best.fitness:.1%} of its games, with {best.hyperparameters}: {winner}")


if __name__ == "__main__":
    main()
