"""Simulated runs without a fault are told nothing in 99 of 100 cases, and simulated faults are found."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from diagnosed import Options

from agile_trainers.evaluation.diagnosis import Diagnosis

RUNS, BATCHES = 2000, 30
Course = Callable[[float, int], float]
"""The probability of success of a batch, from that at the start and the number of the batch."""


def binomial(rng: random.Random, count: int, share: float) -> int:
    return sum(rng.random() < share for _ in range(count))


def size_of(seed: int) -> int:
    return (8, 16, 32, 64)[seed % 4]


def batches(seed: int, course: Course) -> Iterator[dict[str, float]]:
    """Success, reward and entropy of a run's batches of 8 to 64 episodes; those of every fourth run have uneven tasks."""
    rng = random.Random(seed)
    size, start, paid = size_of(seed), rng.uniform(0.05, 0.6), rng.uniform(0.4, 1.0)
    for batch in range(BATCHES):
        share = course(start, batch)
        if seed % 5 == 0:
            share = rng.betavariate(16 * share, 16 * (1 - share))
        success = binomial(rng, size, share) / size
        yield {
            "success": success,
            "reward": success + rng.gauss(0, 0.2 / math.sqrt(size)) - 0.1,
            "reward_std": math.sqrt(success * (1 - success) + 0.04),
            "return/mean": success,
            "entropy": 1 - 0.3 * batch / BATCHES + rng.gauss(0, 0.03),
            "answers_cut": binomial(rng, size, 0.1) / size,
            "kl": 1e-4 * batch * rng.uniform(0.5, 1.5),
            "reward_success_correlation": math.tanh(math.atanh(0.9 * paid) + rng.gauss(0, 1 / math.sqrt(size - 3))),
        }


def told(seed: int, course: Course) -> set[str]:
    diagnosis = Diagnosis(Options(beta=1.0, num_generations=1 if seed % 3 else 8, generation_batch_size=size_of(seed)))
    return {
        finding.name for step, metrics in enumerate(batches(seed, course)) for finding in diagnosis.look(step, metrics)
    }


def steady(start: float, batch: int) -> float:
    return start


def learning(start: float, batch: int) -> float:
    return start + (0.75 - start) * (1 - math.exp(-batch / 20))


def test_a_run_without_a_fault_is_told_nothing() -> None:
    """One in a hundred of 2,000 runs at most, half of which learn nothing and half of which do."""
    found = Counter(name for seed in range(RUNS) for name in told(seed, learning if seed % 2 else steady))
    assert sum(found.values()) < RUNS / 100, found


@pytest.mark.parametrize("after", [0.1, 0.25])
def test_a_fall_is_found(after: float) -> None:
    """A policy that loses most of its success of .6 at batch 10, in batches of 8 to 64 episodes: in nine of ten runs."""

    def falls(start: float, batch: int) -> float:
        return 0.6 if batch < 10 else after * 0.6

    assert sum("worse_than_start" in told(seed, falls) for seed in range(100)) >= 90
