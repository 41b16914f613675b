"""Measures for how much of the time something was busy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager


class BusyMeter:
    """Measures the share of the time in which at least one of several overlapping activities went on.

    It reads the clock when the first of them begins and the last one ends. All methods may be called from any thread.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._active: set[Hashable] = set()
        self._busy, self._since, self._taken = 0.0, 0.0, clock()

    def begin(self, key: Hashable) -> None:
        """Note that an activity begins. One that is under way already is not begun again."""
        with self._lock:
            if not self._active:
                self._since = self._clock()
            self._active.add(key)

    def end(self, key: Hashable) -> None:
        """Note that an activity ends; unknown ones are ignored."""
        with self._lock:
            if key in self._active:
                self._active.remove(key)
                if not self._active:
                    self._busy += self._clock() - self._since

    def set(self, key: Hashable, active: bool) -> None:
        """Let an activity begin or end."""
        (self.begin if active else self.end)(key)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Count the block as an activity."""
        key = object()
        self.begin(key)
        try:
            yield
        finally:
            self.end(key)

    def take(self) -> float:
        """Return the share of the time since the last call, or since the meter was made, in [0, 1]; 0 if no time passed."""
        with self._lock:
            now = self._clock()
            if self._active:
                self._busy += now - self._since
                self._since = now
            busy, passed = self._busy, now - self._taken
            self._busy, self._taken = 0.0, now
        return busy / passed if passed else 0.0
