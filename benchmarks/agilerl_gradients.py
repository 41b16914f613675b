"""Compares converted scripts with AgileRL 2.58 in its own environment (``make test-agilerl``): steps, rates, gradients.

Each pair of scripts of docs/agilerl_scripts.md runs on both sides with the embedded model; the optimizer steps of each
rollout, and rate, weight decay, betas and epsilon of each step, must be equal. Then both sides train on the same
episodes, from the same weights and value head, in the same order of rows; ``SAME`` lists what must have the same
gradient. ``DIFFERENT`` lists the deliberate differences. Each has two formulas of the first gradient, theirs and ours,
which are computed here from single log-probabilities and values, without either library's code; each side must have the
gradient of its own formula. The results go to ``results/agilerl_gradients.json`` and to the tables of
``results/agilerl.md``."""

from __future__ import annotations

import argparse
import ast
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from agilerl_names import common_name
from agilerl_scripts import ALGORITHMS, MODEL, NAMES, Pair, pair, set_keywords
from counting import reading_gradients
from other_side import OtherSide
from safetensors.torch import load_file, save_file
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from update_vs_trl import with_tables

from agile_trainers.embedded import make_embedded_model
from agile_trainers.train_batch import TrainBatch
from agile_trainers.types import StopReason, Trajectory, Turn

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/agilerl_gradients.json"
PAGE = ROOT / "benchmarks/results/agilerl.md"
AGILERL = ROOT / ".venv-agilerl/bin/python"
SCRIPT = ROOT / "benchmarks/agilerl_gradients_side.py"
WORDS = (*"0123456", "Start:", "What", "is", "2+2?", "+", "?", "Done.")
BAR = 1e-5
"""Norm of the difference of two equal gradients, over that of the gradient."""
Tensors = dict[str, torch.Tensor]
ON_CPU = {"device": "cpu", "use_liger_loss": False, "model_config": ast.parse("{'dtype': torch.float32}").body[0].value}  # type: ignore[attr-defined]
"""Arguments of AgileRL's agents, whose kernels need a GPU."""
ON_OUR_CPU = {
    "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "log_rollouts": False,
    "diagnosis_interval": 0, "num_eval_episodes": 2,
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- cadence


def runnable(scripts: Pair, algorithm: str, model: Path, folder: Path, **theirs: Any) -> tuple[str, str]:
    """Return both scripts with the embedded model, on CPU, with answers of one token.

    Args:
        scripts: The pair.
        algorithm: Of ``ALGORITHMS``.
        model: The embedded model's folder.
        folder: Our ``output_dir``.
        **theirs: Further arguments of AgileRL's agent.
    """
    trees = [ast.parse(text.replace(MODEL, str(model))) for text in (scripts.theirs, scripts.ours)]
    set_keywords(trees[0], ALGORITHMS[algorithm].agent, max_output_tokens=1, **ON_CPU, **theirs)
    set_keywords(trees[1], f"MultiTurn{algorithm}Config", max_new_tokens=1, output_dir=str(folder), **ON_OUR_CPU)
    return ast.unparse(trees[0]), ast.unparse(trees[1])


def settings(optimizer: torch.optim.Optimizer) -> list[list[Any]]:
    """Rate, weight decay, betas, epsilon and number of parameters of each group that has some."""
    names = ("lr", "weight_decay", "betas", "eps")
    groups = [[*(group[name] for name in names), len(group["params"])] for group in optimizer.param_groups]
    return json.loads(json.dumps(sorted([group for group in groups if group[-1]], key=str)))


def run_ours(script: str) -> list[list[list[Any]]]:
    """Run a whole script; return the settings of each optimizer step."""
    steps: list[list[list[Any]]] = []
    hook = register_optimizer_step_post_hook(lambda optimizer, *_: steps.append(settings(optimizer)))
    try:
        exec(compile(script, "script", "exec"), {})
    finally:
        hook.remove()
    return steps


def rates(steps: Sequence[list[list[Any]]]) -> list[list[str]]:
    """Reduce settings to those that weights of one kind have: rate, decay, betas and epsilon, each once."""
    return [sorted({json.dumps(group[:-1]) for group in step}) for step in steps]


def compare_cadence(other: OtherSide, environment: str, algorithm: str, model: Path, folder: Path) -> dict[str, Any]:
    """Run both scripts of a pair for two rollouts."""
    turns = 128 if environment == "reasoning" else 256
    scripts = pair(environment, algorithm, turns=turns, evaluations=1)
    (folder / "theirs").mkdir(parents=True)
    theirs, ours = runnable(scripts, algorithm, model, folder / "ours")
    there = other("run", script=theirs, algorithm=ALGORITHMS[algorithm].agent, folder=str(folder / "theirs"))
    here = run_ours(ours)
    undecayed = sum(group[-1] for group in here[0] if group[1] == 0.0)
    decayed = [sorted({json.dumps(g[:-1]) for g in step if g[1] != 0.0}) for step in here]
    return {
        "steps_per_rollout": {"AgileRL": there["steps_per_rollout"], "ours": len(here) / scripts.rollouts},
        "steps": {"AgileRL": len(there["steps"]), "ours": len(here)},
        "rates": sorted({group[0] for step in here for group in step}),
        "undecayed": undecayed,
        "equal": rates(there["steps"]) == decayed,
    }


# ------------------------------------------------------------------------------------------------------------ episodes


@dataclass(frozen=True)
class Played:
    """The tokens of an episode and the reward of each turn."""

    prompt: list[int]
    completion: list[int]
    turns: list[tuple[int, int]]
    """Start and end of each answer, in completion coordinates."""
    rewards: list[float]
    seed: int

    @property
    def actions(self) -> list[int]:
        """Positions of action tokens, in prompt and completion."""
        return [len(self.prompt) + t for start, end in self.turns for t in range(start, end)]

    @property
    def turn_of(self) -> list[int]:
        """Turn of each action token."""
        return [number for number, (start, end) in enumerate(self.turns) for _ in range(start, end)]

    def trajectory(self, log_probs: Sequence[float]) -> Trajectory:
        """Make the episode as ``trainer.update`` takes it, with the sampler's log-probabilities of action tokens."""
        sampled = [0.0] * len(self.completion)
        for position, value in zip(self.actions, log_probs, strict=True):
            sampled[position - len(self.prompt)] = value
        turns = [
            Turn(start, end, "", "stop", reward, "")
            for (start, end), reward in zip(self.turns, self.rewards, strict=True)
        ]
        return Trajectory(self.prompt, self.completion, sampled, turns, StopReason.TERMINATED, seed=self.seed)


def play(count: int, group: int, turns: int, longest: int, vocabulary: int, scale: float, seed: int) -> list[Played]:
    """Make episodes of random tokens and rewards; members of a group share their prompt."""
    chance = random.Random(seed)
    ids = lambda number: [chance.randrange(10, vocabulary) for _ in range(number)]  # noqa: E731
    episodes = []
    for number in range(count):
        if number % group == 0:
            prompt = ids(chance.randint(4, 8))
        completion, spans = list[int](), []
        for turn in range(turns):
            start = len(completion)
            completion += ids(chance.randint(1, longest))
            spans.append((start, len(completion)))
            completion += ids(3) if turn + 1 < turns else []
        rewards = [scale * chance.gauss(0.3, 1.0) for _ in range(turns)]
        episodes.append(Played(prompt, completion, spans, rewards, number // group))
    return episodes


def as_arrays(episodes: Sequence[Played], pad: int) -> dict[str, np.ndarray]:
    """Make the batch of ``learn``: token ids (B, T), action masks and turns (B, T-1), rewards (B, K)."""
    longest = max(len(e.prompt) + len(e.completion) for e in episodes)
    arrays = {
        "token_ids": np.full((len(episodes), longest), pad),
        "turn_ids": np.full((len(episodes), longest - 1), -1),
        "rewards": np.zeros((len(episodes), max(len(e.turns) for e in episodes)), dtype=np.float32),
    }
    for row, episode in enumerate(episodes):
        tokens = episode.prompt + episode.completion
        arrays["token_ids"][row, : len(tokens)] = tokens
        arrays["turn_ids"][row, np.array(episode.actions) - 1] = episode.turn_of
        arrays["rewards"][row, : len(episode.rewards)] = episode.rewards
    return arrays | {"action_masks": arrays["turn_ids"] >= 0}


# --------------------------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case:
    """Episodes that both sides train on once, by a converted script with some options changed."""

    algorithm: str
    title: str
    turns: int = 1
    longest: int = 1
    """Tokens of an answer, at most."""
    episodes: int = 64
    steps: int = 8
    """Optimizer steps of a pass."""
    accumulation: int = 1
    ours: dict[str, Any] = field(default_factory=dict)
    theirs: dict[str, Any] = field(default_factory=dict)
    reference_moved: float = 0.02
    """Deviation of the reference's weights from the policy's, so that the penalty has a gradient."""
    sampler_noise: float = 0.0
    """Deviation of the sampler's log-probabilities from the policy's."""
    scale: float = 1.0
    """Factor of the rewards."""


@dataclass(frozen=True)
class Difference:
    """A deliberate difference: a case, and the formulas of its first gradient."""

    case: Case
    theirs: Callable[[Evidence], Terms]
    ours: Callable[[Evidence], Terms]
    explained: Callable[[Evidence], str]
    """The numbers that explain it, of both sides."""


@dataclass
class Evidence:
    """Holds what formulas read: episodes, and arrays over action tokens of log-probabilities and of values before them."""

    case: Case
    episodes: list[Played]
    policy: list[np.ndarray]
    reference: list[np.ndarray]
    values: list[np.ndarray]
    sampled: list[np.ndarray]
    options: Any
    """Our configuration."""
    first: list[int] = field(default_factory=list)
    """Rows of the first optimizer step."""

    @property
    def tokens(self) -> int:
        return sum(len(e.actions) for e in self.episodes)

    @property
    def turns(self) -> int:
        return sum(len(e.turns) for e in self.episodes)


@dataclass
class Terms:
    """A gradient: coefficients of the gradients of log-probabilities and of values, by episode and action token."""

    log_probs: list[np.ndarray]
    values: list[np.ndarray] | None = None


GRPO, REINFORCE, PPO = "GRPO", "REINFORCE", "PPO"
NO_KL: dict[str, Any] = {
    "ours": {"beta": 0.0, "reference_adapter": False, "sync_ref_model": False},
    "theirs": {"beta": 0.0},
}


def case(algorithm: str, title: str, **changes: Any) -> Case:
    """Make a case; ``mini_batch_size`` follows from its accumulation."""
    made = Case(algorithm, title, **changes)
    micro = made.episodes // made.steps // made.accumulation
    group = 8 if algorithm == GRPO else 1
    ours: dict[str, Any] = {
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": made.accumulation,
        "generation_batch_size": made.episodes,
        "max_steps": 1000,
        "max_turns": made.turns,
        "max_new_tokens": made.longest,
        "max_logprob_gap": 1e9,
        "max_grad_norm": 1e9,
        "num_iterations": 1,
    }
    theirs = {
        "batch_size": made.episodes // group,
        "micro_batch_size_per_gpu": micro,
        "max_grad_norm": 1e9,
    }
    if made.accumulation > 1:
        theirs["mini_batch_size"] = micro * made.accumulation
    if algorithm == PPO:
        theirs["update_epochs"] = 1
    if algorithm == PPO and made.turns > 1:
        ours |= {"importance_sampling_level": "turn", "turn_ratio_pooling": "sum", "advantage_granularity": "turn"}
    return Case(**{**vars(made), "ours": ours | made.ours, "theirs": theirs | made.theirs})


BY_WINDOW: dict[str, Any] = {"accumulation": 2, "steps": 4}
WHOLE: dict[str, Any] = {"accumulation": 8, "steps": 1}
CAPPED: dict[str, Any] = {
    "ours": {
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": 2.0,
    },
    "sampler_noise": 0.6,
}
SAME = [
    case(GRPO, "the script, answers of 1 to 6 tokens", longest=6),
    case(GRPO, "`mini_batch_size` of the whole rollout", longest=6, **WHOLE, ours={"loss_type": "dapo"}),
    case(GRPO, "a sampler that differs, cap 2.0", longest=6, **CAPPED, reference_moved=0.0,
         theirs={"off_policy_token_mask_bounds": None, "old_logprobs_source": "trainer"}),
    case(REINFORCE, "the script, answers of one token"),
    case(REINFORCE, "`advantage_granularity=\"turn\"`, `beta=0`, 1 to 6 tokens", longest=6, reference_moved=0.0,
         ours={**NO_KL["ours"], "kl_placement": "loss", "advantage_granularity": "turn"},
         theirs={**NO_KL["theirs"], "advantage_granularity": "turn"}),
    case(REINFORCE, "`mini_batch_size` of two micro-batches", **BY_WINDOW),
    case(PPO, "the script, answers of one token"),
    case(PPO, "`mini_batch_size` of two micro-batches", **BY_WINDOW),
]  # fmt: skip
"""Cases whose gradients must be equal, the first step's to ``BAR``."""


# ------------------------------------------------------------------------------------- formulas of the first gradient


def z_scores(values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Shift and scale over all entries, with ddof 1."""
    flat = np.concatenate([np.asarray(one, dtype=np.float64) for one in values])
    return [(one - flat.mean()) / flat.std(ddof=1) for one in values]


def by_token(episode: Played, of_turns: Sequence[float] | np.ndarray) -> np.ndarray:
    """Give each action token its turn's value."""
    return np.asarray(of_turns, dtype=np.float64)[episode.turn_of]


def returns(rewards: Sequence[float], gamma: float) -> np.ndarray:
    """Discounted sums from each entry on."""
    total, found = 0.0, []
    for reward in reversed(rewards):
        total = reward + gamma * total
        found.append(total)
    return np.array(found[::-1])


def gae(rewards: Sequence[float], values: np.ndarray, gamma: float, decay: float) -> np.ndarray:
    """Generalized advantage estimates of steps, with value 0 after the last."""
    following = np.append(values[1:], 0.0)
    return returns(np.asarray(rewards) + gamma * following - values, gamma * decay)


def mean_over_tokens(at: Evidence, advantages: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Coefficients of a policy gradient that averages over all action tokens."""
    return [-one / at.tokens for one in advantages]


def reinforce_there(at: Evidence) -> Terms:
    """Every token has the turn's reward, and is discounted."""
    gamma = at.options.gamma
    return Terms(mean_over_tokens(at, z_scores([returns(e.rewards * len(e.actions), gamma) for e in at.episodes])))


def reinforce_here(at: Evidence) -> Terms:
    """A turn's reward counts once."""
    return Terms(mean_over_tokens(at, z_scores([by_token(e, e.rewards) for e in at.episodes])))


def penalized(at: Evidence, pool: Callable[[np.ndarray], float]) -> Terms:
    """REINFORCE with a penalty that is pooled over the tokens of a turn."""
    found = []
    for e, policy, reference in zip(at.episodes, at.policy, at.reference, strict=True):
        gaps, turns = policy - reference, np.array(e.turn_of)
        rewards = [r - at.options.beta * pool(gaps[turns == k]) for k, r in enumerate(e.rewards)]
        found.append(returns(rewards, at.options.gamma))
    return Terms(mean_over_tokens(at, [by_token(e, a) for e, a in zip(at.episodes, z_scores(found), strict=True)]))


def grpo(at: Evidence, credit: Callable[[Played], np.ndarray]) -> Terms:
    """GRPO whose turns are compared with the same turn of the group's other members."""
    of_turns = np.stack([credit(e) for e in at.episodes]).reshape(-1, 8, at.case.turns)
    centred = (of_turns - of_turns.mean(axis=1, keepdims=True)).reshape(-1, at.case.turns)
    return Terms(mean_over_tokens(at, [by_token(e, a) for e, a in zip(at.episodes, centred, strict=True)]))


def grpo_masked(at: Evidence, bounds: tuple[float, float]) -> Terms:
    """GRPO of a sampler that differs: weights up to 2, and no token whose ratio is out of the bounds."""
    terms = grpo(at, lambda e: np.array(e.rewards)).log_probs
    for place, (policy, sampled) in enumerate(zip(at.policy, at.sampled, strict=True)):
        ratio = np.exp(policy - sampled)
        terms[place] = terms[place] * np.minimum(ratio, 2.0) * ((ratio >= bounds[0]) & (ratio <= bounds[1]))
        drift = (sampled - policy).mean()
        terms[place] *= not (terms[place].max() > 0 and drift > 0.03)  # negative advantages of drifted episodes
    return Terms(terms)


def ppo_tokens(at: Evidence, *, there: bool) -> Terms:
    """PPO of single turns, whose tokens have values and advantages of their own."""
    options, advantages, targets, weights = at.options, [], [], []
    for e, values in zip(at.episodes, at.values, strict=True):
        length = len(e.actions)
        if there:
            advantages.append(gae(e.rewards * length, values, options.gamma, options.gae_lambda))
            targets.append(advantages[-1] + values)
            weights.append(np.full(length, 1 / at.tokens))
        else:
            advantages.append(e.rewards[0] - values)
            targets.append(np.full(length, e.rewards[0]))
            weights.append(np.full(length, 1 / length / at.turns))
    errors = [w * (v - t) for w, v, t in zip(weights, at.values, targets, strict=True)]
    return Terms(mean_over_tokens(at, z_scores(advantages)), [options.vf_coef * one for one in errors])


def ppo_turns(at: Evidence, *, there: bool) -> Terms:
    """PPO of several turns: the value before the last token of an answer, or before its first one."""
    options, advantages, errors = at.options, [], []
    for e, values in zip(at.episodes, at.values, strict=True):
        first = np.array([e.turn_of.index(k) for k in range(len(e.turns))])
        read = np.append(first[1:], len(values)) - 1 if there else first
        found = gae(e.rewards, values[read], options.gamma, options.gae_lambda)
        advantages.append(found)
        error = np.zeros(len(values))
        error[read] = -options.vf_coef * found / at.turns
        errors.append(error)
    units = at.turns if there else at.tokens
    return Terms([-by_token(e, a) / units for e, a in zip(at.episodes, z_scores(advantages), strict=True)], errors)


def with_penalty(at: Evidence, terms: Terms, trained: Sequence[np.ndarray], corrected: bool) -> Terms:
    """Add the gradient of k3, on the tokens that ``trained`` keeps; ``corrected`` multiplies it by the ratio first."""
    for place, (policy, reference) in enumerate(zip(at.policy, at.reference, strict=True)):
        k3, slope = _k3(policy, reference)
        terms.log_probs[place] += at.options.beta / at.tokens * trained[place] * (slope + corrected * k3)
    return terms


def _k3(policy: np.ndarray, reference: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    gap = reference - policy
    return np.exp(gap) - gap - 1, 1 - np.exp(gap)


def clamped(at: Evidence, bound: float) -> Terms:
    """PPO of one token, whose penalty has no gradient where k3 exceeds the bound and the reference is above the policy."""
    pairs = list(zip(at.policy, at.reference, strict=True))
    kept = [~((_k3(p, r)[0] > bound) & (r > p)) for p, r in pairs]
    return with_penalty(at, ppo_tokens(at, there=True), kept, corrected=False)


def drifted(at: Evidence, *, there: bool) -> Terms:
    """GRPO of a sampler that differs, whose masked sequences have no penalty there."""
    masked = grpo_masked(at, (0.0, np.inf))
    kept = [np.full(len(one), not there or bool(np.any(one))) for one in masked.log_probs]
    return with_penalty(at, masked, kept, corrected=True)


def windowed(at: Evidence, *, there: bool) -> Terms:
    """GRPO's first step of several, over its own tokens or over the mean of all steps."""
    terms = grpo(at, lambda e: np.array(e.rewards)).log_probs
    own = sum(len(at.episodes[row].actions) for row in at.first)
    factor = at.tokens / (own if there else at.tokens / at.case.steps)
    return Terms([factor * one if row in at.first else 0 * one for row, one in enumerate(terms)])


def _paid_for_length(at: Evidence) -> str:
    """The return of the first token of the longest answer."""
    longest = max(at.episodes, key=lambda e: len(e.actions))
    place, count, reward = at.episodes.index(longest), len(longest.actions), longest.rewards[0]
    found = returns([reward] * count, at.options.gamma)[0]
    if at.values:
        values = at.values[place]
        found = gae([reward] * count, values, at.options.gamma, at.options.gae_lambda)[0] + values[0]
    return f"return of the first token of {count}: {found:.2f}, here the reward {reward:.2f}"


def _clamped_tokens(at: Evidence) -> str:
    pairs = zip(at.policy, at.reference, strict=True)
    return f"{sum(int(((_k3(p, r)[0] > 0.1) & (r > p)).sum()) for p, r in pairs)} of {at.tokens} tokens"


def _dropped(at: Evidence) -> str:
    ratios = np.concatenate([np.exp(p - s) for p, s in zip(at.policy, at.sampled, strict=True)])
    return f"{((ratios < 0.5) | (ratios > 5)).sum()} of {len(ratios)} tokens dropped, here none"


RAGGED: dict[str, Any] = {"episodes": 16, "steps": 1, "longest": 6, "reference_moved": 0.0}
"""One optimizer step on ragged answers; the penalty has no gradient."""
DIFFERENT = {
    "length": Difference(
        case(REINFORCE, "REINFORCE, single turns: the reward is on every token, and on the turn here", **RAGGED),
        reinforce_there, reinforce_here, _paid_for_length,
    ),
    "length-ppo": Difference(
        case(PPO, "PPO, single turns: the same, and the value loss averages over tokens, over turns here", **RAGGED),
        partial(ppo_tokens, there=True), partial(ppo_tokens, there=False),
        _paid_for_length,
    ),
    "credit": Difference(
        case(GRPO, "GRPO, several turns: a turn has its own reward as credit, and all later ones here", turns=2, **RAGGED),
        partial(grpo, credit=lambda e: np.array(e.rewards)), partial(grpo, credit=lambda e: returns(e.rewards, 1.0)),
        lambda at: f"credit of a first turn {at.episodes[0].rewards[0]:.2f}, here {sum(at.episodes[0].rewards):.2f}",
    ),
    "value": Difference(
        case(PPO, turns=2, **RAGGED,
             title="PPO, several turns: the value before the last token, here the first; the mean over turns, here tokens"),
        partial(ppo_turns, there=True), partial(ppo_turns, there=False),
        lambda at: f"tokens of a turn, the factor of the policy's part: {at.tokens / at.turns:.2f}",
    ),
    "penalty": Difference(
        case(REINFORCE, "REINFORCE, several turns: the penalty is the mean over a turn's tokens, their sum here",
             turns=2, **{**RAGGED, "reference_moved": 0.02}, ours={"beta": 0.5}, theirs={"beta": 0.5}),
        partial(penalized, pool=lambda gaps: float(gaps.mean())), partial(penalized, pool=lambda gaps: float(gaps.sum())),
        lambda at: f"tokens of a turn, the factor of its penalty: {at.tokens / at.turns:.2f}",
    ),
    "mask": Difference(
        case(GRPO, "GRPO, a sampler that differs: tokens with a ratio out of (.5, 5) are dropped, and weigh <= 2 here",
             **RAGGED, **CAPPED, theirs={"old_logprobs_source": "trainer"}),
        partial(grpo_masked, bounds=(0.5, 5.0)), partial(grpo_masked, bounds=(0.0, np.inf)), _dropped,
    ),
    "masked": Difference(
        case(GRPO, "GRPO, a sampler that differs: a masked sequence has no penalty, and has it here",
             **{**RAGGED, **CAPPED, "reference_moved": 0.05},
             theirs={"old_logprobs_source": "trainer", "off_policy_token_mask_bounds": None}),
        partial(drifted, there=True), partial(drifted, there=False),
        lambda at: f"{sum(not one.any() for one in grpo_masked(at, (0.0, np.inf)).log_probs)} of 16 sequences masked",
    ),
    "window": Difference(
        case(GRPO, "GRPO, several micro-batches a step: the mean over its tokens, over the mean of all steps here",
             **{**RAGGED, "episodes": 32, "steps": 2, "accumulation": 2}, ours={"loss_type": "dapo"}),
        partial(windowed, there=True), partial(windowed, there=False),
        lambda at: f"tokens of the step {sum(len(at.episodes[row].actions) for row in at.first)}, here {at.tokens / 2:g}",
    ),
    "clamp": Difference(
        case(PPO, "PPO and GRPO: a token whose k3 is above `kl_clamp` (.1 instead of 10) has no penalty, and has it here",
             **{**RAGGED, "longest": 1, "reference_moved": 0.2}, ours={"beta": 0.1}, theirs={"beta": 0.1, "kl_clamp": 0.1}),
        partial(clamped, bound=0.1), partial(clamped, bound=np.inf),
        _clamped_tokens,
    ),
}  # fmt: skip
"""Deliberate differences of the gradient, by name."""


# ------------------------------------------------------------------------------------------------------------ measuring


def common(weights: Tensors) -> Tensors:
    """Name weights by :func:`common_name`, without those that have none."""
    return {common_name(n): w.detach().clone() for n, w in weights.items() if common_name(n)}


def difference(ours: Tensors, theirs: Tensors, role: str = "") -> float:
    """Norm of the difference of two gradients over that of ours; of weights whose name begins with ``role``.

    Raises:
        ValueError: If the weights have different names.
    """
    names = {n for n in ours if n.startswith(role)}
    if names != {n for n in theirs if n.startswith(role)}:
        odd = sorted(names ^ {n for n in theirs if n.startswith(role)})
        raise ValueError(f"The sides train different weights; {len(odd)} are on one side only, such as {odd[:2]}.")
    a, b = (torch.cat([side[n].double().flatten() for n in sorted(names)]) for side in (ours, theirs))
    return ((a - b).norm() / a.norm()).item()


class OurSide:
    """The trainer of a converted script, with weights of its own."""

    def __init__(self, script: str, seed: int, reference_moved: float) -> None:
        tree = ast.parse(script)
        tree.body = [node for node in tree.body if ast.unparse(node) != "trainer.train()"]
        names: dict[str, Any] = {}
        exec(compile(tree, "script", "exec"), names)
        self.trainer = names["trainer"]
        chance = torch.Generator().manual_seed(seed)
        weights = {common_name(n): p for n, p in self.trainer.model.named_parameters() if common_name(n)}
        for name in sorted(weights):
            own = torch.randn(weights[name].shape, generator=chance)
            if name.startswith("reference"):  # after the policy's, by name
                own = weights[f"policy{name.removeprefix('reference')}"].data + reference_moved * own
            else:
                own *= 0.1
            weights[name].data.copy_(own)
        self.weights = {n: p.detach().clone() for n, p in weights.items()}

    @torch.no_grad()
    def log_probs(self, episode: Played, adapter: str | None = "default") -> np.ndarray:
        """Log-probabilities of action tokens at the trainer's temperature, each from a plain forward pass."""
        with self.trainer.use_adapter(adapter):
            return self._log_probs(episode).numpy()

    def _log_probs(self, episode: Played) -> torch.Tensor:
        ids = torch.tensor([episode.prompt + episode.completion])
        logits = self.trainer.model(input_ids=ids).logits[0] / self.trainer.temperature
        picked = torch.tensor(episode.actions)
        return logits[picked - 1].log_softmax(-1).gather(1, ids[0, picked, None])[:, 0]

    def _values(self, episode: Played) -> torch.Tensor:
        ids, before = torch.tensor([episode.prompt + episode.completion]), torch.tensor([episode.actions]) - 1
        return self.trainer.model(
            input_ids=ids, attention_mask=ids.new_ones(ids.shape), value_positions=before
        ).state_values[0]

    def evidence(self, one: Case, episodes: list[Played], sampled: list[np.ndarray]) -> Evidence:
        """Compute what formulas read."""
        adapters = self.trainer.model.peft_config
        policy = [self.log_probs(e).astype(np.float64) for e in episodes]
        reference = [self.log_probs(e, "ref").astype(np.float64) for e in episodes] if "ref" in adapters else policy
        with torch.no_grad():
            values = [self._values(e).numpy().astype(np.float64) for e in episodes] if "critic" in adapters else []
        return Evidence(one, episodes, policy, reference, values, sampled, self.trainer.args)

    def gradient_of(self, terms: Terms, episodes: Sequence[Played]) -> Tensors:
        """Compute the gradient of a linear combination of log-probabilities and values, episode by episode."""
        model = self.trainer.model
        model.zero_grad()
        for parameter in (
            p for n, p in model.named_parameters() if common_name(n).startswith(("policy", "critic", "value"))
        ):
            parameter.requires_grad_(True)
        for place, episode in enumerate(episodes):
            total = (self._log_probs(episode).double() * torch.from_numpy(terms.log_probs[place])).sum()
            if terms.values is not None:
                total = total + (self._values(episode).double() * torch.from_numpy(terms.values[place])).sum()
            total.backward()
        found = common({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
        return found

    def learn(
        self, episodes: Sequence[Played], sampled: Sequence[np.ndarray]
    ) -> tuple[list[Tensors], list[Tensors], list[list[int]]]:
        """Train once; return each step's gradient before and after clipping, and the rows of each micro-batch."""
        steps: list[Tensors] = []
        clipped: list[Tensors] = []
        with gradients_of_steps(self.trainer.model, steps, clipped):
            self.trainer.update([e.trajectory(one.tolist()) for e, one in zip(episodes, sampled, strict=True)])
        buffered = self.trainer._buffered_inputs
        return steps, clipped, [TrainBatch.from_trl(one).episodes.tolist() for one in buffered]  # type: ignore[union-attr]


@contextmanager
def gradients_of_steps(model: torch.nn.Module, steps: list[Tensors], clipped: list[Tensors]) -> Iterator[None]:
    """Append the gradient of every optimizer step, as it is before and after clipping."""
    with reading_gradients(model) as found:

        def step(*_: Any) -> None:
            steps.append(common(found))
            clipped.append(common({n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
            found.clear()

        hook = register_optimizer_step_pre_hook(step)
        try:
            yield
        finally:
            hook.remove()


@dataclass
class Both:
    """Both sides after training once on the same episodes: their gradients by step, before and after clipping."""

    ours: list[Tensors]
    theirs: list[Tensors]
    clipped: tuple[list[Tensors], list[Tensors]]
    weights: tuple[Tensors, Tensors]
    """Weights of ours and theirs after the last step."""
    here: OurSide
    evidence: Evidence


def both(other: OtherSide, one: Case, model: Path, folder: Path, seed: int = 0) -> Both:
    """Train both sides once on the same episodes, from the same weights, in the same order."""
    (folder / "theirs").mkdir(parents=True)
    environment = "reasoning" if one.turns == 1 else "toy"
    scripts = pair(environment, one.algorithm, **one.ours)
    theirs, ours = runnable(scripts, one.algorithm, model, folder / "ours", **one.theirs)
    tree = ast.parse(ours)
    set_keywords(tree, f"MultiTurn{one.algorithm}Config", max_new_tokens=one.longest)
    here = OurSide(ast.unparse(tree), seed, one.reference_moved)
    weights = dict(here.weights)
    for name in [name for name in weights if name.startswith("policy")]:
        weights.setdefault(f"reference{name.removeprefix('policy')}", weights[name].clone())
    save_file(weights, folder / "weights.safetensors")
    vocabulary = here.trainer.model.config.vocab_size
    group = 8 if one.algorithm == GRPO else 1
    episodes = play(one.episodes, group, one.turns, one.longest, vocabulary, one.scale, seed)
    noise = np.random.default_rng(seed)
    sampled = [here.log_probs(e).astype(np.float64) for e in episodes]
    sampled = [s + one.sampler_noise * noise.standard_normal(len(s)) for s in sampled]
    evidence = here.evidence(one, episodes, sampled)
    mine, clipped, order = here.learn(episodes, sampled)
    evidence.first = [row for rows in order[: one.accumulation] for row in rows]
    arrays = as_arrays(episodes, here.trainer.processing_class.pad_token_id)
    if one.sampler_noise:
        arrays["sampling"] = np.zeros(arrays["turn_ids"].shape, dtype=np.float32)
        for row, (episode, values) in enumerate(zip(episodes, sampled, strict=True)):
            arrays["sampling"][row, np.array(episode.actions) - 1] = values
    np.savez(folder / "batch.npz", **arrays)  # type: ignore[arg-type]
    other("make", script=theirs, weights=str(folder / "weights.safetensors"))
    answer = other("learn", batch=str(folder / "batch.npz"), order=order, folder=str(folder / "theirs"))
    gradients, cut = (
        [load_file(folder / "theirs" / f"{kind}-{number}.safetensors") for number in range(len(answer["steps"]))]
        for kind in ("gradient", "clipped")
    )
    after = common(dict(here.trainer.model.named_parameters())), load_file(folder / "theirs" / "weights.safetensors")
    return Both(mine, gradients, (clipped, cut), after, here, evidence)


def compare_same(other: OtherSide, one: Case, model: Path, folder: Path) -> dict[str, Any]:
    """Differences of the gradients of the first and the last step, of policy, critic and value head apart."""
    found = both(other, one, model, folder)
    roles = ("policy", "critic", "value") if one.algorithm == PPO else ("policy",)
    return {
        "algorithm": one.algorithm,
        "title": one.title,
        "steps": {"AgileRL": len(found.theirs), "ours": len(found.ours)},
        "first": max(difference(found.ours[0], found.theirs[0], role) for role in roles),
        "last": max(difference(found.ours[-1], found.theirs[-1], role) for role in roles),
    }


def compare_different(other: OtherSide, one: Difference, model: Path, folder: Path) -> dict[str, Any]:
    """The difference of the first gradients, and that of each side from its own formula."""
    found = both(other, one.case, model, folder)
    evidence, here = found.evidence, found.here
    for name, parameter in here.trainer.model.named_parameters():
        if common_name(name):  # before the step
            parameter.data.copy_(here.weights[common_name(name)])
    return {
        "title": one.case.title,
        "difference": difference(found.ours[0], found.theirs[0]),
        "AgileRL": difference(here.gradient_of(one.theirs(evidence), evidence.episodes), found.theirs[0]),
        "ours": difference(here.gradient_of(one.ours(evidence), evidence.episodes), found.ours[0]),
        "explained": one.explained(evidence),
    }


CLIPPED = case(
    PPO,
    "",
    episodes=8,
    steps=1,
    scale=3.0,
    reference_moved=0.0,
    ours={"max_grad_norm": 1.0},
    theirs={"max_grad_norm": 1.0},
)


def compare_clipping(other: OtherSide, model: Path, folder: Path) -> list[dict[str, Any]]:
    """Clipping of policy and critic, and the decay of the value head's bias, of one step of PPO."""
    found = both(other, CLIPPED, model, folder)
    norms = {
        role: torch.cat(
            [g.flatten() for n, g in found.ours[0].items() if n.startswith("policy") == (role == "policy")]
        ).norm()
        for role in ("policy", "critic")
    }
    together = torch.stack(list(norms.values())).norm()
    apart, shared = (
        {n: g / max(1.0, float(norm_of(n))) for n, g in found.ours[0].items()}
        for norm_of in (lambda n: norms["policy" if n.startswith("policy") else "critic"], lambda n: together)
    )
    ours, theirs = (side[0] for side in found.clipped)
    bias, rate, decay = found.here.weights["value:bias"], 5e-5, 0.01
    gap = (found.weights[1]["value:bias"] - found.weights[0]["value:bias"]).item()
    return [
        {
            "title": "PPO: policy and critic are clipped apart (`share_grad_clip=False`), and together here",
            "difference": difference(ours, theirs),
            "AgileRL": difference(apart, theirs),
            "ours": difference(shared, ours),
            "explained": f"norms {norms['policy']:.2f} and {norms['critic']:.2f}, together {together:.2f}",
        },
        {
            "title": "PPO: weight decay shrinks the value head's bias, and leaves it here, as all biases in transformers",
            "difference": abs(gap),
            "AgileRL": abs(gap + rate * decay * bias.item()),
            "ours": 0.0,
            "explained": f"bias {bias.item():.3f}: rate x decay x bias = {rate * decay * bias.item():.1e} in a step",
        },
    ]


# -------------------------------------------------------------------------------------------------------- the report


def cadence_table(rows: dict[str, Any]) -> str:
    """Optimizer steps of both sides as a Markdown table."""
    lines = [
        "| script | optimizer steps of a rollout | of two rollouts, AgileRL and ours | rates of every step |",
        "|---|---|---|---|",
    ]
    for name, row in rows.items():
        steps, per_rollout = row["steps"], row["steps_per_rollout"]
        shown = " and ".join(f"`{rate:g}`" for rate in row["rates"])
        lines.append(f"| {name} | {per_rollout['ours']:g} | {steps['AgileRL']} = {steps['ours']} | {shown} |")
    return "\n".join(lines)


def same_table(rows: Sequence[dict[str, Any]]) -> str:
    """Equal gradients as a Markdown table."""
    lines = ["| algorithm | episodes | first step | last step |", "|---|---|---|---|"]
    lines += [f"| {row['algorithm']} | {row['title']} | {row['first']:.0e} | {row['last']:.0e} |" for row in rows]
    return "\n".join(lines)


def different_table(rows: Sequence[dict[str, Any]]) -> str:
    """Deliberate differences as a Markdown table."""
    lines = [
        "| difference | gradients differ by | AgileRL from its formula | ours | what explains it |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        cells = (
            row["title"],
            f"{row['difference']:.2g}",
            f"{row['AgileRL']:.0e}",
            f"{row['ours']:.0e}",
            row["explained"],
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def missed(results: dict[str, Any]) -> list[str]:
    """Say which comparisons failed."""
    lines = [f"{name}: optimizer steps or rates differ" for name, row in results["cadence"].items()
             if not row["equal"] or row["steps"]["AgileRL"] != row["steps"]["ours"]]  # fmt: skip
    lines += [
        f"{row['algorithm']}, {row['title']}: {row['first']:.0e}" for row in results["same"] if row["first"] > BAR
    ]
    for row in results["different"]:
        lines += [
            f"{row['title']}: {side} is not its formula's, {row[side]:.0e}"
            for side in ("AgileRL", "ours")
            if row[side] > BAR
        ]
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, and write the results down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="write no file")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, OtherSide(AGILERL, SCRIPT) as other:
        folder = Path(name)
        model = make_embedded_model(folder / "model", words=WORDS, seed=0)
        results: dict[str, Any] = {"versions": other("versions")}
        results["same"] = [compare_same(other, one, model, folder / f"same-{n}") for n, one in enumerate(SAME)]
        results["different"] = [compare_different(other, one, model, folder / name) for name, one in DIFFERENT.items()]
        results["different"] += compare_clipping(other, model, folder / "clipping")
        results["cadence"] = {
            f"{environment}, {algorithm}": compare_cadence(
                other, environment, algorithm, model, folder / f"{environment}-{algorithm}"
            )
            for environment, algorithm in NAMES
        }
    tables = {
        "agilerl-cadence": cadence_table(results["cadence"]),
        "agilerl-same": same_table(results["same"]),
        "agilerl-different": different_table(results["different"]),
    }
    print("\n\n".join(tables.values()))
    if not options.dry:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), tables), encoding="utf-8")
    for line in missed(results):
        print(f"MISSED: {line}", file=sys.stderr)
    return 1 if missed(results) else 0


if __name__ == "__main__":
    sys.exit(main())
