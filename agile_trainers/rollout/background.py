"""Plays an open rollout in a thread, while the process does something else."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from agile_trainers.rollout.generators.base import Generator
from agile_trainers.rollout.rollout import Rollout
from agile_trainers.types import Trajectory

_Result = TypeVar("_Result")


class BackgroundRollout:
    """A thread that plays a rollout from :meth:`start` to :meth:`close`; nothing else may use the rollout meanwhile.

    It computes little: the environments' own work, if they are stepped inline, and tokens to text. A generator that tells
    when it has an answer (``listen``) lets it sleep until then.

    Args:
        rollout: The rollout.
        generator: Samples the actions, elsewhere.
    """

    def __init__(self, rollout: Rollout, generator: Generator) -> None:
        self._rollout, self._generator = rollout, generator
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="rollout", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def call(self, function: Callable[[], _Result]) -> _Result:
        """Run a function of the rollout between two steps, and return its result.

        Raises:
            BaseException: What the function raised, or the rollout before.
        """
        results: list[_Result] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(function())
            except BaseException as error:
                errors.append(error)
            self._notify()

        self._post(run)
        self._wait(lambda: bool(results or errors))
        if errors:
            raise errors[0]
        return results[0]

    def wait(self, keys: Sequence[int]) -> list[Trajectory]:
        """Wait until some episodes have ended, and return them.

        Raises:
            BaseException: What the rollout raised.
        """
        self._wait(lambda: all(map(self._rollout.has_ended, keys)))
        return self._rollout.take(keys)

    def close(self) -> None:
        """End the thread after its step, without waiting for episodes."""
        self._closing = True
        if self._thread.is_alive():
            self._post(lambda: None)
            self._thread.join()

    def _post(self, function: Callable[[], None]) -> None:
        self._posted.put(function)
        self._rollout.wake()

    def _wait(self, until: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or until())
        if self._error is not None and not until():
            raise self._error

    def _notify(self, ended: Trajectory | None = None) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            with self._rollout.playing(self._generator, self._notify) as go_on_until:
                while not self._closing:
                    if self._rollout.under_way and self._posted.empty():
                        go_on_until(lambda: not self._posted.empty())
                    else:
                        self._posted.get()()
        except BaseException as error:
            self._error = error
            self._notify()
