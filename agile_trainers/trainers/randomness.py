"""Seeds that depend on what is drawn, never on which process draws it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from agile_trainers.rollout.engine import EpisodeSpec

TRAINING, EVALUATION = 0, 1
"""First key of every stream: training and evaluation never share one."""


def environment_seed(seed: int, domain: int, generation: int, group: int) -> int:
    """The seed of a group's environments, a non-negative int below 2**31. Equal for all members of the group."""
    return int(np.random.SeedSequence((seed, domain, generation, group)).generate_state(1)[0] >> 1)


def training_specs(
    seed: int, generation: int, rows: Sequence[dict[str, Any] | None], first: int, group_size: int
) -> list[EpisodeSpec]:
    """The episodes of one rank's part of a generation batch.

    Args:
        seed: The run's seed.
        generation: Index of the generation batch in the run.
        rows: The dataset row of each episode, or None.
        first: Index of the first row in the whole batch, over all ranks.
        group_size: Members of a group.
    """
    specs = []
    for index, row in enumerate(rows, start=first):
        group, member = divmod(index, group_size)
        start = environment_seed(seed, TRAINING, generation, group)
        specs.append(EpisodeSpec(start, (seed, TRAINING, generation, group, member), row))
    return specs


def evaluation_specs(
    seed: int, count: int, rows: Sequence[dict[str, Any]] | None, rank: int, world_size: int
) -> list[EpisodeSpec]:
    """One rank's part of ``count`` evaluation episodes, the same in every evaluation of a run; rows repeat in order."""
    return [
        EpisodeSpec(
            environment_seed(seed, EVALUATION, 0, index),
            (seed, EVALUATION, 0, index, 0),
            None if rows is None else dict(rows[index % len(rows)]),
        )
        for index in range(rank, count, world_size)
    ]


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Leave Python's, NumPy's and torch's global generators as they were found."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if devices:
            torch.cuda.set_rng_state_all(devices)
