"""AgileRL's side of the benchmarks beside it: a process in ``.venv-agilerl`` that ``other_side.OtherSide`` calls.

One switch of AgileRL is set. It puts Liger's Triton kernels into every model, and without a GPU they raise "0 active
drivers". ``HAS_LIGER_KERNEL = False`` is its own value where Liger is not installed; its extra ``cpu-llm`` requires Liger on
Linux. The constructors, ``learn()``, ``train_llm_rollout`` and the classes of ``agilerl.hpo`` run as they are.
"""

# ruff: noqa: E402

from __future__ import annotations

import gc
import json
import random
import resource
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import agilerl
import numpy as np
import torch

agilerl.HAS_LIGER_KERNEL = False

from agilerl.algorithms import GRPO, LLMPPO, LLMREINFORCE
from agilerl.algorithms.core.registry import HyperparameterConfig, RLParameter
from agilerl.hpo.mutation import Mutations
from agilerl.hpo.tournament import TournamentSelection
from agilerl.llm_envs import RolloutHarness
from agilerl.training.llm.rollout import train_llm_rollout
from counting import SavedBytes, reading_gradients
from other_side import serve
from peft import LoraConfig, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

PACKAGES = ("agilerl", "torch", "transformers", "peft")
LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
"""``make_lora`` of the other side."""
MICRO_BATCH = 4
"""Episodes of a forward pass of ``learn()``: the fastest of 1, 2, 4 and 16 on the ragged batch."""
COMMON = {
    "model_config": {"dtype": torch.float32},
    "beta": 0.0,
    "temperature": 1.0,
    "gradient_checkpointing": False,  # off on the other side too
    "use_liger_loss": False,  # a GPU's kernel
    "use_separate_reference_adapter": False,
    "wrap": False,
}
ALGORITHMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "GRPO": (
        GRPO,
        {
            "lr": 1e-4,
            "advantage_granularity": "trajectory",
            # The cheapest source: without it, every update has another forward pass, for the same numbers.
            "old_logprobs_source": "trainer",
            # On one on-policy step these masks change nothing.
            "off_policy_token_mask_bounds": None,
            "off_policy_sequence_mask_threshold": None,
        },
    ),
    "REINFORCE": (LLMREINFORCE, {"lr": 1e-4}),
    "PPO": (LLMPPO, {"lr_actor": 1e-4, "lr_critic": 1e-4}),
}


def make_agent(algorithm: str, model: str, **options: Any) -> Any:
    """Make one of AgileRL's algorithms on a model's folder, on CPU, in fp32, with the benchmark's LoRA."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    kind, own = ALGORITHMS[algorithm]
    return kind(
        model_name=model,
        pad_token_id=tokenizer.pad_token_id,
        pad_token=tokenizer.pad_token,
        device="cpu",
        **{**COMMON, **own, "lora_config": LoraConfig(**LORA, task_type="CAUSAL_LM"), **options},
    )


class Side:
    """The agent of one part and its batch."""

    def make(self, algorithm: str, model: str, batch: str, group: int, options: dict[str, Any]) -> None:
        """Make an agent and read its batch, as ``train_llm_rollout`` would pass it to ``learn()``."""
        episodes = json.loads(Path(batch).read_text())
        size = len(episodes)
        if algorithm == "GRPO":
            options = {"group_size": group, "batch_size": size // group, **options}
        else:
            options = {"batch_size": size, **options}
        self.agent = make_agent(
            algorithm,
            model,
            max_model_len=4096,
            micro_batch_size_per_gpu=MICRO_BATCH,
            mini_batch_size=size,  # one optimizer step
            **options,
        )
        self.batch = _experiences(episodes, self.agent.pad_token_id)

    def measure(self, adapter: str, gradient: str) -> int:
        """Warm up, start from an adapter and train once; write the gradient and return the bytes kept."""
        self.update()
        model = self.agent.actor
        set_peft_model_state_dict(model, load_file(adapter), adapter_name="actor")
        saved = SavedBytes([*model.parameters(), *model.buffers()])
        with saved.counting(), reading_gradients(model) as gradients:
            self.update()
        save_file({name: value.contiguous() for name, value in gradients.items()}, gradient)
        return saved.peak

    def update(self) -> float:
        """Train once; return the CPU seconds."""
        experiences, turn_ids = self.batch
        gc.collect()
        started = time.process_time()
        self.agent.learn(experiences, turn_ids=turn_ids)
        return time.process_time() - started

    def try_packing(self, model: str, batch: str, group: int) -> str:
        """Train once on packed rows, with the attention that AgileRL packs on; return its warnings."""
        said = []
        for attention in ("sdpa", "flex_attention"):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                config = {"dtype": torch.float32, "attn_implementation": attention}
                try:
                    self.make("GRPO", model, batch, group, {"use_sequence_packing": True, "model_config": config})
                    took = f"trained in {self.update():.1f} s"
                except Exception as error:
                    took = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            about = [str(w.message) for w in caught if "use_sequence_packing" in str(w.message)]
            said.append(f"{attention}: {took}" + "".join(f" ({text})" for text in about))
        return "; ".join(said)


def _experiences(
    episodes: list[dict[str, Any]], pad: int
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Token ids (B, T), action masks (B, T-1), rewards (B, turns); and turn indices (B, T-1), -1 outside of actions."""
    longest = max(len(e["prompt"]) + len(e["completion"]) for e in episodes)
    turns = max(len(e["turns"]) for e in episodes)
    ids = torch.full((len(episodes), longest), pad)
    indices = torch.full((len(episodes), longest - 1), -1)
    rewards = torch.zeros(len(episodes), turns)
    for row, e in enumerate(episodes):
        tokens = e["prompt"] + e["completion"]
        ids[row, : len(tokens)] = torch.tensor(tokens)
        for turn, (start, end) in enumerate(e["turns"]):
            indices[row, len(e["prompt"]) + start - 1 : len(e["prompt"]) + end - 1] = turn
            rewards[row, turn] = e["rewards"][turn]
    return (ids, indices >= 0, rewards), indices


# ------------------------------------------------------------------------------------------------------ evolution


class ConstantTarget:
    """The probe ``constant`` of ``agile_trainers.envs.probes``: the right answer is always 4."""

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


def _rates(agent: Any) -> dict[str, Any]:
    """The agent's learning rate and those that its optimizer steps with."""
    optimizer = getattr(agent.optimizer, "optimizer", agent.optimizer)
    return {"lr": float(agent.lr), "optimizer": sorted({float(group["lr"]) for group in optimizer.param_groups})}


def _chance_of_success(prompt: torch.Tensor, answer: int) -> Callable[[Any], float]:
    def chance(agent: Any) -> float:
        with torch.no_grad(), agent.select_adapter("actor"):
            agent.actor.eval()
            logits = agent.actor(input_ids=prompt).logits[0, -1]
        return float(logits.softmax(-1)[answer])

    return chance


def _bytes(agents: list[Any]) -> dict[str, int]:
    """Bytes of all weights and of optimizer state, shared storage counted once."""
    weights = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for a in agents for p in a.actor.parameters()
    }
    state = 0
    for agent in agents:
        optimizer = getattr(agent.optimizer, "optimizer", agent.optimizer)
        state += sum(t.nbytes for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor))
    return {"weights": sum(weights.values()), "optimizer": state}


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


def versions() -> dict[str, str]:
    """Versions of AgileRL and of the libraries below it."""
    return {name: version(name) for name in PACKAGES}


if __name__ == "__main__":
    torch.set_num_threads(1)
    side = Side()
    serve(
        {
            "versions": versions,
            "make": side.make,
            "measure": side.measure,
            "update": side.update,
            "try_packing": side.try_packing,
            "evolve": evolve,
        }
    )
