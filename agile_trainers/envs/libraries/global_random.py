"""Gives libraries that use Python's and NumPy's global random state a separate state with a seed."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

# Only one call may replace the global state at a time, for all libraries.
LOCK = threading.RLock()


class OwnRandomState:
    """A random state that replaces the global one while a library runs; without a seed it is another each time."""

    def __init__(self, seed: int | None = None) -> None:
        self.seed(seed)

    def seed(self, seed: int | None) -> None:
        """Seed the state with any integer."""
        numpy_seed = None if seed is None else seed % 2**32  # NumPy's range of seeds
        self._states = random.Random(seed).getstate(), np.random.RandomState(numpy_seed).get_state()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the global random state by this one inside the block."""
        with LOCK:
            outside = random.getstate(), np.random.get_state()
            random.setstate(self._states[0])
            np.random.set_state(self._states[1])
            try:
                yield
            finally:
                self._states = random.getstate(), np.random.get_state()
                random.setstate(outside[0])
                np.random.set_state(outside[1])
