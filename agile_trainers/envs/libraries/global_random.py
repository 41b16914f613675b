"""Libraries that draw from Python's and NumPy's global random state, made to depend on their own seed alone."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

# While one call borrows the global state, no other may, whichever library it belongs to.
LOCK = threading.RLock()


class OwnRandomState:
    """A random state of its own, put in the global one's place while a library runs and taken out again afterwards."""

    def __init__(self) -> None:
        self._states = random.Random().getstate(), np.random.RandomState().get_state()

    def seed(self, seed: int) -> None:
        """Start from a seed; any integer is fine."""
        numpy_seed = seed % 2**32  # all that NumPy can be seeded with
        self._states = random.Random(seed).getstate(), np.random.RandomState(numpy_seed).get_state()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """What runs inside draws from this state, and leaves the global one as it was."""
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
