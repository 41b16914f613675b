"""Times the update beside TRL's ``GRPOTrainer`` on the same episodes (``make bench``), and beside the bare model.

Five batches of episodes are trained on, without playing them: `trainer.update` takes them here, and a ``rollout_func`` that
returns them on TRL's side. The sides alternate in one process with one thread, and a ratio is taken within each pair, of the
CPU seconds of the process. The first pair warms up; in it, bytes of saved tensors and tokens of the LM head are counted. The
physical limit is the bare model with its adapter: forward and backward over the distinct tokens of the informative
groups, the head on action tokens, in the fastest of several micro-batchings. On a GPU (``--shape 0.5B``, run by `make
bench-gpu`) times are seconds of the clock, in bf16. The results are kept in
``results/update_vs_trl.json``, a workload at a time, and the tables of ``results/performance.md`` are written from them.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from counting import SavedBytes
from datasets import Dataset
from gpu import SHAPES
from gpu import make_model as make_shape
from peft import get_peft_model
from rollout_vs_trl import WORKLOADS as ROLLOUTS
from rollout_vs_trl import Chatter, make_lora, make_model, turn_counts
from transformers import AutoModelForCausalLM, DynamicCache, PrinterCallback, TrainerCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer
from trl.kernels import ChunkedLogProbFunction

from agile_trainers.adapters.fused import fuse
from agile_trainers.trainers import (
    MultiTurnGRPOConfig,
    MultiTurnGRPOTrainer,
    MultiTurnPPOConfig,
    MultiTurnPPOTrainer,
    MultiTurnREINFORCEConfig,
    MultiTurnREINFORCETrainer,
)
from agile_trainers.types import StopReason, Trajectory, Turn

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/update_vs_trl.json"
PAGE = ROOT / "benchmarks/results/performance.md"
PICTURE = ROOT / "docs/images/update_cost.png"
EPISODES, GROUP, TURNS = 16, 8, 8
PROMPT, ACTION, OBSERVATION = 70, 32, 70
"""Tokens of a first prompt, of an answer, and of an observation in its turn delimiters."""
LONG_PROMPT, LONG_ANSWER = 1024, 256
DEVICE = "cpu"
"""Device of all sides; ``cuda`` with ``--shape``, if there is one."""
CHECKPOINTS = False
"""Gradient checkpointing of both trainers; the bare model has none."""
LIMIT_BAR = 1.25
"""Largest ratio of an update to its physical limit."""
PPO_BARS = {"PPO": 2.1, "PPO, critic_layers=1": 1.75}
"""Largest ratios of PPO's update to GRPO's on the whole workload."""
GROWTH = (1024, 2048, 4096, 8192, 16384)
"""Tokens of a batch in the plot."""


@dataclass(frozen=True)
class Episode:
    """The token ids of an episode and the reward of each turn."""

    prompt: list[int]
    completion: list[int]
    turns: list[tuple[int, int]]
    """Start and end of each answer, in completion coordinates."""
    rewards: list[float]

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.completion

    @property
    def action_positions(self) -> list[int]:
        """Positions of the whole sequence that predict an action token."""
        return [len(self.prompt) + t - 1 for start, end in self.turns for t in range(start, end)]

    def trajectory(self, seed: int) -> Trajectory:
        """The episode as ``trainer.update`` takes it."""
        turns = [
            Turn(start, end, "answer", "length", reward, "observation")
            for (start, end), reward in zip(self.turns, self.rewards, strict=True)
        ]
        zeros = [0.0] * len(self.completion)
        return Trajectory(self.prompt, self.completion, zeros, turns, StopReason.TERMINATED, seed=seed)


@dataclass(frozen=True)
class Workload:
    """A batch of episodes, the bar of its update time over TRL's, and the micro-batchings of its physical limit."""

    name: str
    bar: float
    make: Callable[[random.Random, int], list[Episode]]
    """Takes a source of chance and the number of ids; returns whole groups."""
    limits: tuple[tuple[bool, int], ...]
    """(whether the members' common start is read once, rows of a forward pass)"""
    zero_advantage_groups: int = 0
    """Groups at the end whose episodes have equal rewards."""


def _ids(chance: random.Random, count: int, vocabulary: int) -> list[int]:
    return [chance.randrange(10, vocabulary - 10) for _ in range(count)]


def _episode(
    chance: random.Random,
    vocabulary: int,
    turns: int,
    prompt: list[int],
    common: Sequence[int] = (),
    scale: float = 1.0,
) -> Episode:
    """An episode of some turns with random ids, that starts with ``common``, the completion of another one."""
    completion: list[int] = []
    spans = []
    action, observation = max(1, round(ACTION * scale)), max(1, round(OBSERVATION * scale))
    for turn in range(turns):
        spans.append((len(completion), len(completion) + action))
        completion += _ids(chance, action + (observation if turn + 1 < turns else 0), vocabulary)
    completion[: len(common)] = common
    return Episode(prompt, completion, spans, [chance.random() for _ in spans])


def _groups(make: Callable[..., list[Episode]]) -> Callable[[random.Random, int], list[Episode]]:
    def batch(chance: random.Random, vocabulary: int) -> list[Episode]:
        return [e for _ in range(EPISODES // GROUP) for e in make(chance, vocabulary, _ids(chance, PROMPT, vocabulary))]

    return batch


def _whole(chance: random.Random, vocabulary: int, prompt: list[int]) -> list[Episode]:
    return [_episode(chance, vocabulary, TURNS, prompt) for _ in range(GROUP)]


def _ragged(chance: random.Random, vocabulary: int, prompt: list[int]) -> list[Episode]:
    return [_episode(chance, vocabulary, 1 + member % TURNS, prompt) for member in range(GROUP)]


def _sure(chance: random.Random, vocabulary: int, prompt: list[int]) -> list[Episode]:
    first = _episode(chance, vocabulary, TURNS, prompt)
    common = first.completion[: first.turns[TURNS // 2][0]]
    return [first, *(_episode(chance, vocabulary, TURNS, prompt, common) for _ in range(GROUP - 1))]


def _long(chance: random.Random, vocabulary: int) -> list[Episode]:
    episodes = []
    for _ in range(EPISODES // GROUP):
        prompt = _ids(chance, LONG_PROMPT, vocabulary)
        answers = [_ids(chance, LONG_ANSWER, vocabulary) for _ in range(GROUP)]
        episodes += [Episode(prompt, answer, [(0, LONG_ANSWER)], [chance.random()]) for answer in answers]
    return episodes


def _half_equal(make: Callable[..., list[Episode]]) -> Callable[[random.Random, int], list[Episode]]:
    def batch(chance: random.Random, vocabulary: int) -> list[Episode]:
        episodes = make(chance, vocabulary)
        return [
            Episode(e.prompt, e.completion, e.turns, e.rewards if index < GROUP else [0.5] * len(e.turns))
            for index, e in enumerate(episodes)
        ]

    return batch


ROWS = ((False, 1), (False, 2))
WORKLOADS = {
    "whole": Workload("whole", 0.75, _groups(_whole), ROWS),
    "ragged": Workload("ragged", 0.5, _groups(_ragged), ROWS),
    "long": Workload("long prompt", 0.35, _long, ((True, 1), (True, 4), (True, 8))),
    "sure": Workload("sure policy", 0.65, _groups(_sure), ((True, 1), (True, 4))),
    "zero_advantage": Workload(
        "half zero-advantage", 0.45, _half_equal(_groups(_whole)), ROWS, zero_advantage_groups=1
    ),
}


def sized(tokens: int, chance: random.Random, vocabulary: int) -> list[Episode]:
    """Whole episodes of 8 turns with about so many tokens in all, for the plot."""
    row = PROMPT + TURNS * ACTION + (TURNS - 1) * OBSERVATION
    scale = tokens / EPISODES / row
    episodes = []
    for _ in range(EPISODES // GROUP):
        prompt = _ids(chance, max(1, round(PROMPT * scale)), vocabulary)
        episodes += [_episode(chance, vocabulary, TURNS, prompt, scale=scale) for _ in range(GROUP)]
    return episodes


# ------------------------------------------------------------------------------------------------- what is counted


@contextmanager
def counting_head() -> Iterator[list[int]]:
    """Fill a list with the number of tokens of every call of the fused LM head."""
    tokens: list[int] = []
    original = ChunkedLogProbFunction.apply

    def apply(hidden: torch.Tensor, *args: Any) -> Any:
        tokens.append(hidden.size(0))
        return original(hidden, *args)

    ChunkedLogProbFunction.apply = staticmethod(apply)
    try:
        yield tokens
    finally:
        del ChunkedLogProbFunction.apply


# ------------------------------------------------------------------------------------------------------- the sides


def _cuda() -> bool:
    return DEVICE == "cuda"


def _clock() -> float:
    """CPU seconds of the process; on a GPU seconds of the clock, when it has finished."""
    if _cuda():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def _common(folder: str, steps: int) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "max_steps": steps,
        "per_device_train_batch_size": EPISODES,
        "gradient_accumulation_steps": 1,
        "num_generations": GROUP,
        "learning_rate": 1e-4,
        "logging_steps": 1,
        "bf16": _cuda(),
        "use_cpu": not _cuda(),
        "model_init_kwargs": {"dtype": "bfloat16" if _cuda() else "float32"},
        "gradient_checkpointing": CHECKPOINTS,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


class OurSide:
    """One of our trainers, whose updates are called one by one."""

    def __init__(self, model: Path, folder: str, steps: int, algorithm: str = "GRPO", **options: Any):
        lengths = turn_counts(ROLLOUTS[0])
        trainer, config = {
            "GRPO": (MultiTurnGRPOTrainer, MultiTurnGRPOConfig),
            "PPO": (MultiTurnPPOTrainer, MultiTurnPPOConfig),
            "REINFORCE": (MultiTurnREINFORCETrainer, MultiTurnREINFORCEConfig),
        }[algorithm]
        common = _common(folder, steps)
        if algorithm != "GRPO":
            del common["num_generations"]
        limits: dict[str, Any] = {
            "max_turns": TURNS,
            "max_new_tokens": LONG_ANSWER,
            "log_rollouts": False,
            "num_iterations": 1,
            "max_logprob_gap": 1e9,
        }
        self.trainer = trainer(
            model=str(model),
            args=config(**common, **limits, **options),
            peft_config=make_lora(),
            environment=lambda: Chatter(lengths),
        )
        self.trainer.remove_callback(PrinterCallback)

    def update(self, episodes: Sequence[Episode]) -> None:
        """Train on a batch."""
        seeds = [index // GROUP if self.trainer.num_generations > 1 else index for index in range(len(episodes))]
        self.trainer.update([e.trajectory(seed) for e, seed in zip(episodes, seeds)])


class Limit:
    """The bare model with its adapter: forward and backward over distinct tokens, the head on action tokens."""

    def __init__(self, model: Path):
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16 if _cuda() else torch.float32).to(
            DEVICE
        )
        self.model = get_peft_model(base, make_lora()).train()
        fuse(self.model)
        self._decoder, self._head = base.model, base.lm_head

    def run(self, episodes: Sequence[Episode], groups: int, shared: bool, rows: int) -> None:
        """Accumulate the gradient of the first ``groups`` groups, ``rows`` rows in a forward pass.

        With ``shared``, the members' common start is read once, and their own tokens attend to its keys.
        """
        self.model.zero_grad(set_to_none=True)
        for start in range(0, groups * GROUP, GROUP):
            group = sorted(episodes[start : start + GROUP], key=lambda e: len(e.ids))
            common = _common_start(group) if shared else 0
            losses: list[torch.Tensor] = []
            prefix = None
            if common:
                ids = torch.tensor([group[0].ids[:common]], device=DEVICE)
                cache = DynamicCache()
                hidden = self._decoder(input_ids=ids, use_cache=True, past_key_values=cache).last_hidden_state
                losses.append(self._loss(hidden, group, 0, common))
                prefix = [(layer.keys, layer.values) for layer in cache.layers]
            for first in range(0, GROUP, rows):
                part = group[first : first + rows]
                longest = len(part[-1].ids) - common
                ids = torch.tensor([(e.ids[common:] + [0] * longest)[:longest] for e in part], device=DEVICE)
                past = None
                if prefix is not None:
                    past = DynamicCache()
                    for layer, (keys, values) in enumerate(prefix):
                        past.update(*(x.expand(len(part), -1, -1, -1) for x in (keys, values)), layer)
                hidden = self._decoder(
                    input_ids=ids, past_key_values=past, use_cache=past is not None
                ).last_hidden_state
                loss = self._loss(hidden, part, common, common + longest)
                if prefix is None:
                    loss.backward()
                else:
                    losses.append(loss)
            if losses:
                torch.stack(losses).sum().backward()

    @torch.no_grad()
    def read(self, episodes: Sequence[Episode]) -> None:
        """Run the decoder over each episode, without gradient."""
        for e in episodes:
            self._decoder(input_ids=torch.tensor([e.ids], device=DEVICE))

    def _loss(self, hidden: torch.Tensor, part: Sequence[Episode], begin: int, end: int) -> torch.Tensor:
        """Negative log-likelihood of the action tokens that positions [begin, end) predict, the head on distinct ones.

        A single row of hidden states is that of all episodes.
        """
        places = Counter(
            (i % hidden.size(0), p - begin, e.ids[p + 1])
            for i, e in enumerate(part)
            for p in e.action_positions
            if begin <= p < end
        )
        if not places:
            return hidden.sum() * 0.0
        rows, positions, targets = map(list, zip(*places))
        logits = self._head(hidden[rows, positions])
        losses = torch.nn.functional.cross_entropy(logits, torch.tensor(targets, device=DEVICE), reduction="none")
        return (losses * torch.tensor(list(places.values()), device=DEVICE)).sum()


def _common_start(group: Sequence[Episode]) -> int:
    """Number of tokens with which all episodes begin."""
    for index, ids in enumerate(zip(*(e.ids for e in group))):
        if len(set(ids)) > 1:
            return index
    return min(len(e.ids) for e in group)


def distinct_tokens(episodes: Sequence[Episode]) -> int:
    """Number of different prefixes of the episodes."""
    previous: list[int] = []
    count = 0
    for ids in sorted(e.ids for e in episodes):
        same = next((i for i, (a, b) in enumerate(zip(ids, previous)) if a != b), min(len(ids), len(previous)))
        count += len(ids) - same
        previous = ids
    return count


class AtSteps(TrainerCallback):
    """Runs the other sides at the beginning of each of TRL's steps, and measures TRL's own."""

    def __init__(self, others: Callable[[int], dict[str, Any]]):
        self._others = others
        self.pairs: list[dict[str, Any]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.pairs.append(self._others(state.global_step))
        self._started = _clock()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.pairs[-1]["TRL"] = _clock() - self._started


def alternate(
    model: Path, batches: Sequence[list[Episode]], others: Callable[[int], dict[str, Any]], first: Callable[[Any], Any]
) -> tuple[list[dict[str, Any]], Any]:
    """Train TRL's ``GRPOTrainer`` on batches and run other sides before each of its steps.

    Args:
        model: Its folder.
        batches: One for each step.
        others: Takes the step; returns the CPU seconds of each side by name.
        first: A context manager around training, given the trainer's model.

    Returns:
        The CPU seconds of all sides, step by step, and what ``first`` yielded.
    """
    drawn = iter(batches)

    def rollout(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        episodes = next(drawn)
        masks = [[0] * len(e.completion) for e in episodes]
        for mask, e in zip(masks, episodes):
            for start, end in e.turns:
                mask[start:end] = [1] * (end - start)
        return {
            "prompt_ids": [e.prompt for e in episodes],
            "completion_ids": [e.completion for e in episodes],
            "logprobs": None,
            "env_mask": masks,
            "episode_return": [sum(e.rewards) for e in episodes],
        }

    def episode_return(episode_return: list[float], **_: Any) -> list[float]:
        return episode_return

    steps = AtSteps(others)
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=str(model),
            reward_funcs=episode_return,
            args=GRPOConfig(**_common(folder, len(batches)), disable_dropout=True),
            train_dataset=Dataset.from_dict({"prompt": [""] * EPISODES}),
            peft_config=make_lora(),
            rollout_func=rollout,
            callbacks=[steps],
        )
        trainer.remove_callback(PrinterCallback)
        with first(trainer) as counted:
            trainer.train()
    return steps.pairs, counted


def seconds(work: Callable[..., Any], *args: Any) -> float:
    """Seconds of a call."""
    started = _clock()
    work(*args)
    return _clock() - started


@dataclass
class Counts:
    """Numbers of what a side kept and computed in the first step."""

    saved: int = 0
    """Most bytes that autograd kept at once."""
    head: int = 0
    """Tokens of the LM head, over all forward passes."""


@contextmanager
def counted(model: torch.nn.Module, into: Counts) -> Iterator[None]:
    saved = SavedBytes([*model.parameters(), *model.buffers()])
    with counting_head() as head, saved.counting():
        yield
    into.saved, into.head = saved.peak, sum(head)


class FirstStep(TrainerCallback):
    """Counts TRL's first step."""

    def __init__(self, model: torch.nn.Module):
        self.counts = Counts()
        self._model = model
        self._context: AbstractContextManager[None] | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            self._context = counted(self._model, self.counts)
            self._context.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._context is not None:
            self._context.__exit__(None, None, None)
            self._context = None


@contextmanager
def counting_first_step(trainer: GRPOTrainer) -> Iterator[Counts]:
    callback = FirstStep(trainer.model)
    trainer.add_callback(callback)
    yield callback.counts


def compare(workload: Workload, model: Path, pairs: int) -> dict[str, Any]:
    """Measure one workload on our side, TRL's and the bare model."""
    vocabulary = AutoModelForCausalLM.from_pretrained(model).config.vocab_size
    episodes = workload.make(random.Random(0), vocabulary)
    groups = EPISODES // GROUP - workload.zero_advantage_groups
    ours_counts = Counts()
    limit = Limit(model)
    best = min(workload.limits, key=lambda plan: seconds(limit.run, episodes, groups, *plan))
    with tempfile.TemporaryDirectory() as folder:
        ours = OurSide(model, folder, pairs + 2)

        def others(step: int) -> dict[str, Any]:
            if step == 0:
                ours.update(episodes)  # compares packed with padded rows, once
                with counted(ours.trainer.model, ours_counts):
                    ours.update(episodes)
                return {}
            took = {"ours": seconds(ours.update, episodes)}
            took["limit"] = seconds(limit.run, episodes, groups, *best)
            print(f"  {step}/{pairs}  ours {took['ours']:.2f} s, limit {took['limit']:.2f} s", flush=True)
            return took

        steps, trl_counts = alternate(model, [episodes] * (pairs + 1), others, counting_first_step)
    live = episodes[: groups * GROUP]
    return {
        "seconds": {side: [round(step[side], 3) for step in steps[1:]] for side in ("ours", "TRL", "limit")},
        "saved_bytes": {"ours": ours_counts.saved, "TRL": trl_counts.saved},
        "head_tokens": {"ours": ours_counts.head, "TRL": trl_counts.head},
        "action_tokens": sum(len(e.action_positions) for e in live),
        "tokens": sum(len(e.ids) for e in episodes),
        "distinct_tokens": distinct_tokens(live),
        "limit": f"{best[1]} rows a pass" + (", common start once" if best[0] else ""),
    }


def growth(model: Path) -> dict[str, Any]:
    """Measure batches of 1k to 16k tokens, one update each after a warm-up."""
    vocabulary = AutoModelForCausalLM.from_pretrained(model).config.vocab_size
    chance = random.Random(0)
    batches = [sized(tokens, chance, vocabulary) for tokens in (GROWTH[0], *GROWTH)]
    limit = Limit(model)
    with tempfile.TemporaryDirectory() as folder:
        ours = OurSide(model, folder, len(batches))

        def others(step: int) -> dict[str, Any]:
            return {
                "ours": seconds(ours.update, batches[step]),
                "limit": min(seconds(limit.run, batches[step], EPISODES // GROUP, False, rows) for rows in (1, 4)),
            }

        @contextmanager
        def nothing(_: Any) -> Iterator[None]:
            yield

        steps, _ = alternate(model, batches, others, nothing)
    return {
        "tokens": [sum(len(e.ids) for e in batch) for batch in batches[1:]],
        "seconds": {side: [round(step[side], 3) for step in steps[1:]] for side in ("ours", "TRL", "limit")},
    }


PPO_SIDES: dict[str, tuple[str, dict[str, Any]]] = {
    "GRPO": ("GRPO", {}),
    "PPO": ("PPO", {}),
    "PPO, critic_layers=1": ("PPO", {"critic_layers": 1}),
}


def compare_ppo(model: Path, pairs: int) -> dict[str, Any]:
    """Measure PPO's update beside GRPO's on the whole workload."""
    vocabulary = AutoModelForCausalLM.from_pretrained(model).config.vocab_size
    episodes = WORKLOADS["whole"].make(random.Random(0), vocabulary)
    took: dict[str, list[float]] = {name: [] for name in PPO_SIDES}
    took["forward"], took["backward"] = [], []
    limit = Limit(model)
    sides, folders = {}, tempfile.TemporaryDirectory()
    with folders as folder:
        for name, (algorithm, options) in PPO_SIDES.items():
            sides[name] = OurSide(model, f"{folder}/{name}", pairs + 1, algorithm, **options)
        for pair in range(pairs + 1):
            spent = {name: seconds(side.update, episodes) for name, side in sides.items()}
            whole = seconds(limit.run, episodes, EPISODES // GROUP, False, 1)
            forward = seconds(limit.read, episodes)
            spent |= {"forward": forward, "backward": whole - forward}
            if pair:
                for name, value in spent.items():
                    took[name].append(round(value, 3))
                print(f"  {pair}/{pairs}  " + ", ".join(f"{n} {v:.2f} s" for n, v in spent.items()), flush=True)
    return {"seconds": took}


# ------------------------------------------------------------------------------------------------------ the report


def ratios(took: dict[str, list[float]], side: str, other: str) -> list[float]:
    """Paired ratios of two sides."""
    return [a / b for a, b in zip(took[side], took[other], strict=True)]


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def update_table(results: dict[str, Any]) -> str:
    """The update of each workload as a Markdown table."""
    lines = [
        "| workload | tokens | distinct, informative | ours | TRL | limit | ours / TRL | bar | ours / limit | bar |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        took = result["seconds"]
        cells = [WORKLOADS[name].name, str(result["tokens"]), str(result["distinct_tokens"])]
        cells += [f"{median(took[side]):.2f} s" for side in ("ours", "TRL", "limit")]
        cells += [_spread(ratios(took, "ours", "TRL")), f"{WORKLOADS[name].bar:.2f}"]
        cells += [_spread(ratios(took, "ours", "limit")), f"{LIMIT_BAR:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def memory_table(results: dict[str, Any]) -> str:
    """Bytes kept for the backward pass and tokens of the LM head as a Markdown table."""
    lines = [
        "| workload | MiB kept, ours | TRL | ratio | tokens of the LM head, ours | TRL | informative action tokens |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        ours, trl = (result["saved_bytes"][side] for side in ("ours", "TRL"))
        head = result["head_tokens"]
        lines.append(
            f"| {WORKLOADS[name].name} | {ours / 2**20:.0f} | {trl / 2**20:.0f} | {ours / trl:.2f} "
            f"| {head['ours']} | {head['TRL']} | {result['action_tokens']} |"
        )
    return "\n".join(lines)


def ppo_table(result: dict[str, Any]) -> str:
    """PPO's update over GRPO's as a Markdown table."""
    took = result["seconds"]
    forward, backward = (median(took[part]) for part in ("forward", "backward"))
    whole = forward + backward
    layers = 1 / 4
    floors = {
        # A forward and backward pass of the critic, which is trained while it scores.
        "PPO": (whole + whole) / whole,
        # A scoring pass, and a forward and backward pass over the last layer.
        "PPO, critic_layers=1": (whole + forward + layers * whole) / whole,
    }
    lines = ["| update | seconds | over GRPO's | bar | floor |", "|---|---|---|---|---|"]
    lines.append(f"| GRPO | {median(took['GRPO']):.2f} | 1 | | |")
    for name, floor in floors.items():
        if name not in took:
            continue
        lines.append(
            f"| {name} | {median(took[name]):.2f} | {_spread(ratios(took, name, 'GRPO'))} | {PPO_BARS[name]:.2f} "
            f"| {floor:.2f} |"
        )
    return "\n".join(lines)


def growth_table(result: dict[str, Any]) -> str:
    """Update time by tokens as a Markdown table."""
    lines = ["| tokens | ours | TRL | limit | ours / TRL |", "|---|---|---|---|---|"]
    for tokens, ours, trl, limit in zip(result["tokens"], *(result["seconds"][s] for s in ("ours", "TRL", "limit"))):
        lines.append(f"| {tokens} | {ours:.2f} s | {trl:.2f} s | {limit:.2f} s | {ours / trl:.2f} |")
    return "\n".join(lines)


def plot(result: dict[str, Any]) -> None:
    """Plot update time by tokens."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(6, 4), layout="constrained")
    styles = {"TRL": ("#c44e52", "o-"), "ours": ("#4c72b0", "o-"), "limit": ("0.5", "o--")}
    for side, (color, style) in styles.items():
        label = {"TRL": "TRL's GRPOTrainer", "ours": "agile_trainers", "limit": "bare model"}[side]
        panel.plot(result["tokens"], result["seconds"][side], style, color=color, label=label)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log", base=2)
    panel.set(xlabel="tokens of the batch (16 episodes of 8 turns)", ylabel="CPU seconds of an update")
    panel.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:.0f}k")
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110, facecolor="white")
    plt.close(figure)


def sections(results: dict[str, Any]) -> dict[str, str]:
    """The tables of ``results/performance.md`` by the name in their markers."""
    workloads = {name: results[name] for name in WORKLOADS if name in results}
    tables = {"update": update_table(workloads), "memory": memory_table(workloads)} if workloads else {}
    if "ppo" in results:
        tables["ppo"] = ppo_table(results["ppo"])
    if "growth" in results:
        tables["growth"] = growth_table(results["growth"])
    return tables


def with_tables(page: str, tables: dict[str, str]) -> str:
    """A page with tables between their markers, such as ``<!-- begin: benchmark update -->`` and ``<!-- end -->``."""
    for name, table in tables.items():
        begin, end = f"<!-- begin: benchmark {name} -->", "<!-- end -->"
        head, found, rest = page.partition(begin)
        if found:
            page = f"{head}{begin}\n\n{table}\n\n{end}{rest.partition(end)[2]}"
    return page


def missed(results: dict[str, Any]) -> list[str]:
    """The bars that are missed, in words."""
    lines = []
    for name, workload in WORKLOADS.items():
        if name in results:
            took = results[name]["seconds"]
            for other, bar in (("TRL", workload.bar), ("limit", LIMIT_BAR)):
                value = median(ratios(took, "ours", other))
                if value > bar:
                    lines.append(f"{workload.name}: {value:.2f} of {other}'s time, bar {bar:.2f}")
    for name, bar in PPO_BARS.items() if "ppo" in results else ():
        if name not in results["ppo"]["seconds"]:
            continue
        value = median(ratios(results["ppo"]["seconds"], name, "GRPO"))
        if value > bar:
            lines.append(f"{name}: {value:.2f} of GRPO's time, bar {bar:.2f}")
    return lines


PARTS = (*WORKLOADS, "growth", "ppo")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts and write them down. Return 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="measured pairs of each workload")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="parts to measure; the rest is kept")
    parser.add_argument("--dry", action="store_true", help="write no file")
    parser.add_argument(
        "--shape", choices=SHAPES, help="measure a model of this shape, on a GPU if there is one; writes no file"
    )
    options = parser.parse_args(argv)
    if options.shape is not None:
        options.dry = True
        if torch.cuda.is_available():
            globals()["DEVICE"] = "cuda"
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    logging.get_logger("agile_trainers.trainers.trainer").setLevel("ERROR")
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() and not options.dry else {}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder)) if options.shape is None else make_shape(options.shape, Path(folder))
        for part in options.parts:
            print(part, flush=True)
            if part == "growth":
                results[part] = growth(Path(folder))
            elif part == "ppo":
                results[part] = compare_ppo(Path(folder), min(options.pairs, 3))
            else:
                results[part] = compare(WORKLOADS[part], Path(folder), options.pairs)
            if not options.dry:
                RESULTS.write_text(_compact(results))
    for table in sections(results).values():
        print(f"\n{table}")
    if not options.dry:
        if "growth" in results:
            plot(results["growth"])
        PAGE.write_text(with_tables(PAGE.read_text(), sections(results)))
    lines = missed(results)
    print("\n" + "\n".join(["Missed:", *lines] if lines else ["Every bar is met."]))
    return int(bool(lines))


def _compact(results: dict[str, Any]) -> str:
    """JSON with a line per part."""
    parts = [f"{json.dumps(name)}: {json.dumps(results[name])}" for name in PARTS if name in results]
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
