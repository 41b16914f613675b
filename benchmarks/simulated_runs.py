"""Simulates healthy runs, and counts what their diagnosis says (``python benchmarks/simulated_runs.py``; a minute).

The runs differ in curve (flat, learning, learning late, falling back to the start), difficulty, noise, number and size of
groups, length and reward. Nothing is wrong with any, so that each finding but ``solved`` is a false alarm.
``tests/evaluation/test_false_findings.py`` simulates fewer of them, and runs that do lose their success.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from agile_trainers.algorithms.grpo import MultiTurnGRPOConfig
from agile_trainers.algorithms.reinforce import MultiTurnREINFORCEConfig
from agile_trainers.evaluation.diagnosis import Diagnosis

RESULT = Path(__file__).resolve().parent / "results" / "simulated_runs.json"
RUNS = 2000
LENGTHS = (40, 100, 300)
GROUPS = ((4, 8), (8, 8), (12, 8), (16, 4), (8, 16), (32, 1), (96, 1))
"""Groups of a batch and episodes of a group."""
EVENNESS = (1.5, 8.0, 1e6)
"""Sum of the parameters of the beta distribution of a task's success: uneven, less so, and equal tasks."""
Curve = Callable[[np.ndarray, np.random.Generator], np.ndarray]
"""Expected success over the batches, given their numbers."""


def flat(batch: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Learns nothing, at any difficulty but those that the diagnosis should name."""
    return np.full(len(batch), rng.choice([rng.uniform(0.06, 0.15), rng.uniform(0.15, 0.75), rng.uniform(0.97, 0.985)]))


def learning(batch: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Approaches its limit within a third of a run to three runs."""
    start, limit = rng.uniform(0.06, 0.7), rng.uniform(0.7, 1)
    return start + (limit - start) * (1 - np.exp(-batch / (len(batch) * rng.uniform(0.1, 1))))


def late(batch: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Learns suddenly."""
    start, at = rng.uniform(0.06, 0.5), rng.uniform(0.2, 0.9) * len(batch)
    return start + (rng.uniform(0.6, 1) - start) / (1 + np.exp((at - batch) / (0.03 * len(batch))))


def falling_back(batch: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Learns, and loses most of it again, but nothing that the start could do."""
    start, gain, at = rng.uniform(0.2, 0.5), rng.uniform(0.1, 0.4), rng.uniform(0.2, 0.8) * len(batch)
    return start + gain * np.exp(-(((batch - at) / (0.2 * len(batch))) ** 2))


CURVES: dict[str, Curve] = {curve.__name__: curve for curve in (flat, learning, late, falling_back)}


@cache
def options(groups: int, members: int, beta: float) -> Any:
    """Return the configuration of a run."""
    kind = MultiTurnGRPOConfig if members > 1 else MultiTurnREINFORCEConfig
    return kind(
        output_dir="runs/simulated", use_cpu=True, bf16=False, report_to="none", num_generations=members,
        per_device_train_batch_size=groups * members, gradient_accumulation_steps=1, beta=beta, entropy_coef=0.05,
    )  # fmt: skip


def batches(success: np.ndarray, groups: int, members: int, rng: np.random.Generator) -> Iterator[dict[str, float]]:
    """Return the metrics of each batch of a run whose expected success is given."""
    length = len(success)
    even, paid, shaped = rng.choice(EVENNESS), rng.uniform(0.5, 1.5), rng.choice([0.0, 0.1, 0.25])
    cut_of_lost, cut_answers, turns = rng.uniform(0, 0.6), rng.uniform(0, 0.15), rng.uniform(1, 8)
    entropy, drift, reads = rng.uniform(0.3, 2.5), rng.uniform(-0.9, 0.15), rng.uniform(0.03, 0.3)
    wander = 0.0
    for batch, expected in enumerate(success):
        wander = 0.9 * wander + rng.normal(0, 0.05)  # of the policy's log-odds, with every update
        odds = np.clip(expected, 1e-3, 1 - 1e-3)
        share = 1 / (1 + (1 - odds) / odds * np.exp(-wander))
        tasks = rng.beta(even * share, even * (1 - share), size=(groups, 1))
        won = rng.random((groups, members)) < tasks
        rewards = paid * won + shaped * rng.normal(size=won.shape)
        lost, done = 1 - won.mean(), batch / length
        yield {
            "success": won.mean(),
            "groups_without_success": float(np.mean(~won.any(axis=1))),
            "success_sem": won.mean(axis=1).std(ddof=1) / groups**0.5,
            "reward": rewards.mean(), "return/mean": rewards.mean(), "return/std": rewards.std(),
            "return/min": rewards.min(), "return/max": rewards.max(), "reward_std": rewards.std(),
            **({"advantage/zero": float(np.mean(np.ptp(rewards, axis=1) == 0))} if members > 1 else {}),
            **_correlation(rewards, won),
            "entropy": entropy * (1 + drift * done) * (1 + rng.normal(0, 0.03)),
            "answers_cut": rng.binomial(won.size, cut_answers) / won.size,
            "return/answers_cut": rewards.mean() + rng.normal(0, rewards.std() / 3),
            "turns/mean": 1 + turns * lost + rng.normal(0, 0.3 * turns / won.size**0.5),
            "stop/max_turns": rng.binomial(won.size, cut_of_lost * lost) / won.size,
            "stop/truncated": 0.0, "stop/context_full": 0.0, "stop/environment_error": 0.0, "stop/environment_timeout": 0.0,
            "kl": 0.3 * done * rng.uniform(0.5, 1.5), "clip_ratio/region_mean": rng.uniform(0, 0.1),
            **(
                {"prompt_information": reads + 0.3 * done + rng.normal(0, 0.02), "policy_change": 0.01 + 0.6 * done}
                if batch % 50 == 0 or batch in (5, 15) else {}
            ),
        }  # fmt: skip


def _correlation(rewards: np.ndarray, won: np.ndarray) -> dict[str, float]:
    if rewards.shape[1] == 1:
        rewards, won = rewards.T, won.T  # without groups, all episodes of a batch are compared
    mixed = won.any(axis=1) & ~won.all(axis=1)
    x, y = (values[mixed] - values[mixed].mean(axis=1, keepdims=True) for values in (rewards, won.astype(float)))
    return (
        {"reward_success_correlation": float((x * y).sum() / np.sqrt((x**2).sum() * (y**2).sum()))}
        if mixed.any()
        else {}
    )


def told(seed: int, curve: Curve, lengths: tuple[int, ...] = LENGTHS) -> list[tuple[int, str]]:
    """Simulate a run, and return the batch (from 1) and the name of each finding."""
    rng = np.random.default_rng(seed)
    groups, members = GROUPS[rng.integers(len(GROUPS))]
    success = curve(np.arange(rng.choice(lengths)), rng)
    diagnosis = Diagnosis(options(groups, members, float(rng.choice([0.0, 0.04]))))
    run = batches(success, groups, members, rng)
    return [(step, found.name) for step, metrics in enumerate(run, 1) for found in diagnosis.look(step, metrics)]


def main() -> None:
    """Simulate, and write how many runs were told what."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=RUNS)
    runs = parser.parse_args().runs
    names, false, curves = [*CURVES], Counter[str](), Counter[str]()
    for seed in range(runs):
        name = names[seed % len(names)]
        found = {finding for _, finding in told(seed, CURVES[name])} - {"solved"}
        false.update(found)
        curves[name] += bool(found)
        if found:
            print(seed, name, found)
    result = {"runs": runs, "told": sum(curves.values()), "by_curve": dict(curves), "by_finding": dict(false)}
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
