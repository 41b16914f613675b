"""Where environments run: inline, in threads, or awaited; with a timeout, and never at another episode's cost."""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from agile_trainers.envs.base import Environment, EnvironmentFactory


class EnvironmentTimeoutError(Exception):
    """An environment did not answer in time."""


@dataclass
class Outcome:
    """What a call came to: a value, or the exception that stands in its place."""

    episode: int
    value: Any = None
    error: Exception | None = None


@dataclass
class _Call:
    episode: int
    method: str
    arguments: dict[str, Any]
    deadline: float = float("inf")


class EnvironmentPool:
    """Environment instances, one per running episode, constructed once and reset often.

    Args:
        factory: Makes an instance.
        workers: 0 steps blocking environments inline, in the caller's thread, in a fixed order (bit-reproducible); more
            steps up to that many at once in threads. Environments with ``async`` methods are always awaited, all at once.
        timeout: Seconds a call may take before its episode is given up. None waits forever. It cannot interrupt an
            inline call, so it needs ``workers >= 1`` unless the environment is async.

    Raises:
        ValueError: If ``workers`` or ``timeout`` is out of range, or a call starts inline with a timeout set.
    """

    def __init__(self, factory: EnvironmentFactory, workers: int = 0, timeout: float | None = None):
        if workers < 0:
            raise ValueError(f"environment_workers must be 0 (inline) or more, got {workers}.")
        if timeout is not None and timeout <= 0:
            raise ValueError(f"environment_timeout must be a positive number of seconds, got {timeout}.")
        self.factory = factory
        self.workers = workers
        self.timeout = timeout
        self._idle: list[Environment] = []
        self._playing: dict[int, Environment] = {}
        self._waiting: deque[_Call] = deque()
        self._running: dict[int, _Call] = {}
        self._outcomes: queue.SimpleQueue[tuple[_Call, Outcome]] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None

    def reset(self, episode: int, seed: int, options: dict[str, Any] | None) -> None:
        """Start an episode on an idle instance; the outcome comes from :meth:`outcomes`."""
        self._call(episode, "reset", {"seed": seed, "options": options})

    def step(self, episode: int, action: str) -> None:
        """Send an action; the outcome comes from :meth:`outcomes`."""
        self._call(episode, "step", {"action": action})

    def outcomes(self, block: bool) -> list[Outcome]:
        """Take what has been answered or has run out of time since the last call.

        Args:
            block: Wait for at least one outcome, if any call is under way.
        """
        taken: list[Outcome] = []
        while self._running or not self._outcomes.empty():
            try:
                call, outcome = self._outcomes.get(timeout=self._patience(block and not taken))
            except queue.Empty:
                taken += self._expire()
                if not block or taken:
                    break
                continue
            # An answer that comes after its deadline belongs to an episode that is over.
            if self._running.get(call.episode) is call:
                del self._running[call.episode]
                taken.append(outcome)
            self._start_waiting()
        return taken

    def release(self, episode: int, reusable: bool) -> None:
        """End an episode. An instance that failed is closed rather than played again."""
        environment = self._playing.pop(episode, None)
        if environment is None:
            return
        if reusable:
            self._idle.append(environment)
        else:
            _close(environment)

    def close(self) -> None:
        """Close every idle instance and stop the event loop."""
        while self._idle:
            _close(self._idle.pop())
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    def _call(self, episode: int, method: str, arguments: dict[str, Any]) -> None:
        call = _Call(episode, method, arguments)
        try:
            environment = self._instance(episode)
        except Exception as error:
            self._running[episode] = call
            self._outcomes.put((call, Outcome(episode, error=error)))
            return
        bound: Callable[..., Any] = getattr(environment, method)
        if inspect.iscoroutinefunction(bound):
            self._await(call, bound)
        elif self.workers:
            self._waiting.append(call)
            self._start_waiting()
        elif self.timeout is not None:
            raise ValueError(
                f"environment_timeout={self.timeout} cannot interrupt an environment that is stepped inline. Set "
                "environment_workers to the number of environments to step at once, or leave environment_timeout unset."
            )
        else:
            self._running[episode] = call
            self._run(call, bound)

    def _instance(self, episode: int) -> Environment:
        if episode not in self._playing:
            self._playing[episode] = self._idle.pop() if self._idle else self.factory()
        return self._playing[episode]

    def _run(self, call: _Call, bound: Callable[..., Any]) -> None:
        try:
            outcome = Outcome(call.episode, value=bound(**call.arguments))
        except Exception as error:
            outcome = Outcome(call.episode, error=error)
        self._outcomes.put((call, outcome))

    def _start_waiting(self) -> None:
        while self._waiting and len(self._running) < self.workers:
            call = self._waiting.popleft()
            self._begin(call)
            bound = getattr(self._playing[call.episode], call.method)
            # A thread per call: one that hangs takes nothing with it, and as a daemon it does not hold up the exit.
            threading.Thread(target=self._run, args=(call, bound), daemon=True).start()

    def _await(self, call: _Call, bound: Callable[..., Any]) -> None:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._begin(call)

        async def run() -> None:
            try:
                outcome = Outcome(call.episode, value=await asyncio.wait_for(bound(**call.arguments), self.timeout))
            except asyncio.TimeoutError:
                outcome = Outcome(call.episode, error=self._timeout_error(call))
            except Exception as error:
                outcome = Outcome(call.episode, error=error)
            self._outcomes.put((call, outcome))

        asyncio.run_coroutine_threadsafe(run(), self._loop)

    def _begin(self, call: _Call) -> None:
        if self.timeout is not None:
            call.deadline = time.monotonic() + self.timeout
        self._running[call.episode] = call

    def _patience(self, block: bool) -> float | None:
        """Seconds to wait for the next outcome: until the nearest deadline, if waiting at all."""
        if not block:
            return 0.0
        deadline = min((call.deadline for call in self._running.values()), default=float("inf"))
        return None if deadline == float("inf") else max(deadline - time.monotonic(), 0.0)

    def _expire(self) -> list[Outcome]:
        now = time.monotonic()
        expired = [call for call in self._running.values() if call.deadline <= now]
        for call in expired:
            del self._running[call.episode]
            # The instance is still inside the call: it is dropped without being closed.
            self._playing.pop(call.episode, None)
        self._start_waiting()
        return [Outcome(call.episode, error=self._timeout_error(call)) for call in expired]

    def _timeout_error(self, call: _Call) -> EnvironmentTimeoutError:
        return EnvironmentTimeoutError(f"{call.method} took longer than environment_timeout={self.timeout} s")


def _close(environment: Environment) -> None:
    close = getattr(environment, "close", None)
    if close is not None and not inspect.iscoroutinefunction(close):
        # Closing is a courtesy; an environment that fails at it has nothing left to lose.
        with suppress(Exception):
            close()
