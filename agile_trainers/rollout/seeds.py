"""Random seeds that depend on the episode, not on the process that plays it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from agile_trainers.rollout.mixture import Mixture
from agile_trainers.rollout.spec import EpisodeSpec

TRAINING, EVALUATION, SELECTION, HELD_OUT = 0, 1, 5, 6
"""First key of every random stream: of training, of evaluations during a run, of those by which a population selects, and of
those that choose nothing. The choice of environments (2), the choice of tasks (3) and the seeds of a pool (4) have separate
streams."""


def environment_seed(seed: int, domain: int, generation: int, group: int) -> int:
    """Compute the environment seed of a group, a non-negative int below 2**31, equal for all its members."""
    return int(np.random.SeedSequence((seed, domain, generation, group)).generate_state(1)[0] >> 1)


def training_specs(
    seed: int,
    generation: int,
    rows: Sequence[dict[str, Any] | None],
    places: Sequence[int],
    group_size: int,
    mixture: Mixture | None = None,
    *,
    environments: Sequence[str] | None = None,
    offset: int = 0,
) -> list[EpisodeSpec]:
    """Return the episodes of one rank's part of a generation batch.

    Args:
        seed: The run's seed.
        generation: Index of the generation batch in the run.
        rows: The dataset row of each episode, or None.
        places: Index of each row in the whole batch, over all ranks.
        group_size: Members of a group.
        mixture: Chooses the environments in a run of several: named by the row, or drawn for the whole group.
        environments: Name of each group's environment in a run of several without rows. Default: ``mixture`` draws them.
        offset: Added to the indices of groups, so that groups that replace others have seeds and noise of their own.
    """
    specs = []
    if environments is None:
        environments = mixture.draw(seed, generation) if mixture is not None else []
    for place, row in zip(places, rows, strict=True):
        group, member = divmod(place, group_size)
        start = environment_seed(seed, TRAINING, generation, group + offset)
        name: str | None = None
        if mixture is not None:
            name, row = (environments[group], None) if row is None else mixture.of_row(row)
        specs.append(EpisodeSpec(start, (seed, TRAINING, generation, group + offset, member), row, name))
    return specs


def evaluation_specs(
    seed: int,
    count: int,
    rows: Sequence[dict[str, Any]] | None,
    rank: int,
    world_size: int,
    mixture: Mixture | None = None,
    *,
    domain: int = EVALUATION,
) -> list[EpisodeSpec]:
    """Return one rank's part of an evaluation's episodes, which are the same in every evaluation.

    Args:
        seed: The run's seed.
        count: Number of episodes, over all ranks.
        rows: The evaluation dataset; its rows repeat in order. None: there is none.
        rank: Index of this process.
        world_size: Number of processes.
        mixture: The environments of a run of several. Without rows, each plays the same episodes as in a run of its own.
        domain: ``EVALUATION``, ``SELECTION`` or ``HELD_OUT``: each plays other episodes of the same seed.
    """
    places = mixture.evaluated(count) if mixture is not None and rows is None else [(None, n) for n in range(count)]
    specs = []
    for index in range(rank, count, world_size):
        name, number = places[index]
        row = None if rows is None else dict(rows[index % len(rows)])
        if mixture is not None and row is not None:
            name, row = mixture.of_row(row, "eval_dataset")
        stream = (seed, domain, 0, number, 0)
        specs.append(EpisodeSpec(environment_seed(seed, domain, 0, number), stream, row, name))
    return specs


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore the state of Python's, NumPy's and torch's global random generators after the block."""
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
