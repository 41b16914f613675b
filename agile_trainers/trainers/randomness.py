"""Seeds that depend on what is drawn, never on which process draws it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

TRAINING, EVALUATION = 0, 1
"""First key of every stream: training and evaluation never share one."""


def environment_seed(seed: int, domain: int, generation: int, group: int) -> int:
    """The seed of a group's environments, a non-negative int below 2**31. Equal for all members of the group."""
    return int(np.random.SeedSequence((seed, domain, generation, group)).generate_state(1)[0] >> 1)


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
