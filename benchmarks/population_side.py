"""Our side of the evolution benchmark: a process that ``other_side.OtherSide`` calls, so that its memory is its own."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

import torch
from other_side import serve
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from agile_trainers.populations import HyperparameterConfig, Population, Range, Round
from agile_trainers.populations.selection import Tournament
from agile_trainers.trainers import MultiTurnGRPOConfig


def _resident() -> int:
    """Bytes of memory that the process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def sizes(base: Path, population: Population) -> dict[str, int]:
    """Bytes of a population's base, which is there once, and of its best member: adapters and optimizer state."""
    checkpoint = population.checkpoint(population.best)
    weights = [one for file in checkpoint.rglob("*.safetensors") for one in load_file(file).values()]
    states = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"].values()
    weights += [one for state in states for one in state.values() if isinstance(one, torch.Tensor)]
    whole = [one for file in base.glob("*.safetensors") for one in load_file(file).values()]
    return {"base": sum(one.nbytes for one in whole), "member": sum(one.nbytes for one in weights)}


class Rounds:
    """Records the rounds of a population.

    Args:
        model: Folder of the base.
    """

    def __init__(self, model: str):
        self.rounds: list[dict[str, Any]] = []
        tokenizer = AutoTokenizer.from_pretrained(model)
        self._prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": "go"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        self._answer = tokenizer.convert_tokens_to_ids("4")
        self._model = model
        self._uncounted = 0.0
        self._started = time.process_time()

    def chance(self, folder: Path) -> float:
        """The exact probability that a member's policy answers right; its time does not count."""
        started = time.process_time()
        policy = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(self._model, dtype=torch.float32), folder
        )
        with torch.no_grad():
            logits = policy.eval()(input_ids=self._prompt).logits[0, -1]
        self._uncounted += time.process_time() - started
        return float(logits.softmax(-1)[self._answer])

    def note(self, population: Population, finished: Round) -> None:
        """Record a round."""
        seconds = time.process_time() - self._started - self._uncounted
        self.rounds.append(
            {
                "fitness": [event.fitness for event in finished.trained],
                "chance": [self.chance(population.folder(event.member)) for event in finished.trained],
                "rates": [event.hyperparameters["learning_rate"] for event in finished.trained],
                "seconds": seconds,
            }
        )


def evolve(
    model: str, folder: str, members: int, range: tuple[float, float], factors: tuple[float, float], seed: int,
    group: int, episodes: int, updates: int, rounds: int, evaluation: int, lora: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Run a population on the constant target; the arguments are those of AgileRL's side.

    Returns:
        ``first`` (learning rates that were drawn), ``rounds``, ``bytes`` and ``resident``.
    """
    low, high = range
    before = _resident()
    population = Population(
        "grpo",
        model,
        MultiTurnGRPOConfig(
            output_dir=folder,
            max_steps=updates,
            num_iterations=1,
            per_device_train_batch_size=episodes,
            gradient_accumulation_steps=1,
            num_generations=group,
            lr_scheduler_type="constant",
            scale_rewards="none",
            max_turns=1,
            max_new_tokens=1,
            num_eval_episodes=evaluation,
            seed=seed,
            logging_steps=updates,
            log_rollouts=0,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            report_to="none",
            disable_tqdm=True,
        ),
        "agile:probe/constant",
        HyperparameterConfig(learning_rate=Range(low, high, log=True, shrink=factors[0], grow=factors[1])),
        members=members,
        rounds=rounds,
        strategy=Tournament(size=2, elitism=True, mutation_probability=0.5),
        seed=seed,
        peft_config=LoraConfig(**lora, task_type="CAUSAL_LM"),
    )
    record = Rounds(model)
    lineage = population.run(lambda finished: record.note(population, finished))
    born = [event for event in lineage.events if event.event == "born" and event.parent is None]
    return {
        "first": [event.hyperparameters["learning_rate"] for event in sorted(born, key=lambda event: event.member)],
        "rounds": record.rounds,
        "bytes": sizes(Path(model), population),
        "resident": {"before": before, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024},
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    serve({"evolve": evolve})
