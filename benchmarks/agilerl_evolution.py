"""AgileRL's side of ``evolution_vs_agilerl.py``: its ``train_llm_rollout``, ``TournamentSelection`` and ``Mutations``."""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from agilerl_side import ALGORITHMS, make_agent, versions  # first: it sets a switch of AgileRL

# isort: split
from agilerl.algorithms.core.registry import HyperparameterConfig, RLParameter
from agilerl.hpo.mutation import Mutations
from agilerl.hpo.tournament import TournamentSelection
from agilerl.llm_envs import RolloutHarness
from agilerl.training.llm.rollout import train_llm_rollout
from other_side import serve
from peft import LoraConfig
from transformers import AutoTokenizer


class ConstantTarget:
    """The probe ``constant`` of ``agile_environments.probes``: the right answer is always 4."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Return the question."""
        return "go", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take the answer."""
        return "end", float(action.strip() == "4"), True, False, {}


class Recorder:
    """AgileRL's tournament, with a record of what the members reached.

    Args:
        tournament: Its ``TournamentSelection``.
        clock: CPU seconds since the start of training.
        chance: The exact probability that an agent answers right.
    """

    def __init__(
        self, tournament: TournamentSelection, clock: Callable[[], float], chance: Callable[[Any], float]
    ) -> None:
        self._tournament, self._clock, self._chance = tournament, clock, chance
        self.rounds: list[dict[str, Any]] = []

    def select(self, population: list[Any]) -> Any:
        """Record the members, then select as the tournament does."""
        self.rounds.append(
            {
                "fitness": [float(agent.fitness[-1]) for agent in population],
                "chance": [self._chance(agent) for agent in population],
                "rates": [_rates(agent) for agent in population],
                "seconds": self._clock(),
            }
        )
        return self._tournament.select(population)


class RecordedMutations(Mutations):
    """AgileRL's mutation, with a record of learning rates, those of agents and those of their optimizers."""

    def __init__(self, recorder: Recorder, **options: Any) -> None:
        super().__init__(**options)
        self._recorder = recorder

    def mutation(self, population: list[Any], *args: Any, **options: Any) -> list[Any]:
        """Mutate and record."""
        mutated = super().mutation(population, *args, **options)
        self._recorder.rounds[-1]["mutated"] = [{"option": agent.mut, **_rates(agent)} for agent in mutated]
        return mutated


def _rates(agent: Any, option: str = "lr") -> dict[str, Any]:
    """The agent's learning rate and those that its optimizer steps with."""
    optimizer = getattr(agent.optimizer, "optimizer", agent.optimizer)
    return {
        "lr": float(getattr(agent, option)),
        "optimizer": sorted({float(group["lr"]) for group in optimizer.param_groups}),
    }


def _chance_of_success(prompt: torch.Tensor, answer: int) -> Callable[[Any], float]:
    def chance(agent: Any) -> float:
        with torch.no_grad(), agent.select_adapter("actor"):
            agent.actor.eval()
            logits = agent.actor(input_ids=prompt).logits[0, -1]
        return float(logits.softmax(-1)[answer])

    return chance


def _bytes(agents: list[Any]) -> dict[str, int]:
    """Bytes of frozen weights of all agents, shared storage counted once; of adapters and optimizer state of one."""
    frozen: dict[int, int] = {}
    own = []
    for agent in agents:
        optimizer = getattr(agent.optimizer, "optimizer", agent.optimizer)
        state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        weights = dict(agent.actor.named_parameters())
        frozen |= {
            w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for n, w in weights.items() if "lora_" not in n
        }
        own.append(sum(t.nbytes for t in [*state, *(w for n, w in weights.items() if "lora_" in n)]))
    return {"base": sum(frozen.values()), "member": max(own)}


def evolve(
    model: str, rates: list[float], range: tuple[float, float], factors: tuple[float, float], seed: int,
    group: int, episodes: int, updates: int, rounds: int, evaluation: int, lora: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Run AgileRL's evolution on the constant target.

    Args:
        model: Its folder.
        rates: First learning rate of each member.
        range: Lowest and highest learning rate.
        factors: Shrink and grow factor.
        seed: Of sampling, selection and mutation.
        group: Episodes of a group.
        episodes: Of one update of one member.
        updates: Of each member, in all.
        rounds: Number of evaluations; selection follows each but the last.
        evaluation: Episodes of an evaluation.
        lora: Arguments of ``LoraConfig``.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    before = _resident()
    low, high = range
    agents = [
        make_agent(
            "GRPO",
            model,
            lr=rate,
            index=index,
            seed=seed + index,
            hp_config=HyperparameterConfig(lr=RLParameter(low, high, shrink_factor=factors[0], grow_factor=factors[1])),
            lora_config=LoraConfig(**lora, task_type="CAUSAL_LM"),
            batch_size=episodes // group,
            group_size=group,
            micro_batch_size_per_gpu=episodes,
            mini_batch_size=episodes,
            max_output_tokens=1,
            max_model_len=512,
            max_grad_norm=1.0,
            top_k=0,
        )
        for index, rate in enumerate(rates)
    ]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "go"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    chance = _chance_of_success(prompt, tokenizer.convert_tokens_to_ids("4"))
    first = [chance(agent) for agent in agents]
    started = time.process_time()
    recorder = Recorder(
        TournamentSelection(tournament_size=2, elitism=True, population_size=len(agents)),
        lambda: time.process_time() - started,
        chance,
    )
    mutations = RecordedMutations(
        recorder, no_mutation=0.5, architecture=0, new_layer_prob=0, parameters=0, activation=0, rl_hp=0.5,
        mutate_elite=False, rand_seed=seed,
    )  # fmt: skip
    agents, _ = train_llm_rollout(
        pop=agents,
        max_turns=1,
        env_factory=lambda: RolloutHarness.local(
            env=ConstantTarget(), tokenizer=tokenizer, max_turns=1, max_model_len=512
        ),
        max_steps=len(rates) * episodes * updates,
        evaluation_interval=updates // rounds,
        evo_steps=updates // rounds,
        eval_loop=evaluation,
        selection_strategy=recorder,
        mutation=mutations,
        verbose=False,
    )
    return {
        "first": first,
        "rounds": recorder.rounds,
        "bytes": _bytes(agents),
        "resident": {"before": before, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024},
    }


def _resident() -> int:
    """Bytes of memory that the process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def mutate(model: str) -> dict[str, dict[str, Any]]:
    """Mutate the learning rates of each algorithm to a tenth; return the agent's and the optimizer's rates afterwards.

    Also the integers that mutations reach from 4, in a range from 1 to 16 with AgileRL's own factors.
    """
    found: dict[str, dict[str, Any]] = {}
    for algorithm, (_, own) in ALGORITHMS.items():
        for option in [name for name in own if name.startswith("lr")]:
            tenth = RLParameter(1e-6, 1.0, shrink_factor=0.1, grow_factor=0.1)
            agent = make_agent(
                algorithm, model, hp_config=HyperparameterConfig(**{option: tenth}), batch_size=8, max_model_len=512
            )
            before = _rates(agent, option)
            mutations = Mutations(
                no_mutation=0, architecture=0, new_layer_prob=0, parameters=0, activation=0, rl_hp=1, rand_seed=0
            )
            (mutated,) = mutations.mutation([agent])
            found[f"{algorithm} {option}"] = {"before": before, "after": _rates(mutated, option)}
    whole = RLParameter(1, 16, dtype=int)
    whole.value = 4
    found["integers"] = {"reached": sorted({int(whole.mutate()) for _ in range(1000)})}
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve({"versions": versions, "evolve": evolve, "mutate": mutate})
