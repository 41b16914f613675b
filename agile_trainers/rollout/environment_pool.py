"""Where environments run: inline, in threads, in processes, or awaited; never at another episode's cost."""

from __future__ import annotations

import asyncio
import inspect
import queue
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from agile_trainers.envs.base import Environment, EnvironmentFactory, bound_reset, bound_step
from agile_trainers.rollout.process_environment import ProcessEnvironment, pickled

_FAILURES = (Exception, asyncio.CancelledError)
"""What costs an environment its episode. Anything else it raises (KeyboardInterrupt, SystemExit) ends the rollout."""

_Attempt = Callable[[], "tuple[Any, BaseException | None]"]
_Report = Callable[[Any, "BaseException | None"], None]


class EnvironmentTimeoutError(Exception):
    """An environment did not answer in time."""


class InlineTimeoutError(ValueError):
    """A timeout was asked for where nothing can interrupt the environment."""


@dataclass
class Outcome:
    """What a call came to: a value, or the exception that stands in its place."""

    episode: int
    value: Any = None
    error: BaseException | None = None


@dataclass(eq=False)
class _Call:
    """A call of an environment, from asking for it to its answer."""

    episode: int
    method: str
    environment: Environment | None = None
    """None if there is none: its construction failed."""
    function: Callable[[], Any] = lambda: None
    in_thread: bool = False
    deadline: float = float("inf")
    cancel: Callable[[], object] = lambda: None


class EnvironmentPool:
    """Environment instances, one per running episode, constructed once and reset often.

    Instances are constructed in the caller's thread. One that raised, timed out or broke the protocol is never played
    again. An async environment must not block: while it does, no other is awaited.

    Args:
        factory: Makes an instance; or several factories by name, whose instances share the limits below. An instance that
            waits for its next episode is kept and does not count.
        workers: 0 steps blocking environments inline, in the caller's thread, in a fixed order (bit-reproducible); more
            steps up to that many at once in threads. Environments with ``async`` methods are always awaited, all at once.
        timeout: Seconds a call may take before its episode is given up, which frees its worker. None waits forever. It
            cannot interrupt an inline call, so it needs ``workers >= 1`` unless the environment is async.
        processes: 0 runs environments in this process; more gives each a process of its own, and plays up to that many at
            once. One that hangs is killed.
        max_environments: Episodes that play at once, each on an instance of its own; the others wait for one to end. None
            plays all.

    Raises:
        ValueError: If an argument is out of range or contradicts another, ``factory`` cannot be sent to a process, or a call
            starts inline with a timeout set.
    """

    def __init__(
        self,
        factory: EnvironmentFactory | Mapping[str, EnvironmentFactory],
        workers: int = 0,
        timeout: float | None = None,
        *,
        processes: int = 0,
        max_environments: int | None = None,
    ):
        if workers < 0:
            raise ValueError(f"environment_workers must be 0 (inline) or more, got {workers}.")
        if processes < 0:
            raise ValueError(f"environment_processes must be 0 (none) or more, got {processes}.")
        if max_environments is not None and max_environments < 1:
            raise ValueError(f"max_environments must be 1 or more, or None for no limit, got {max_environments}.")
        if processes and (workers or max_environments is not None):
            raise ValueError(
                f"environment_processes={processes} says how many environments play at once and runs them itself: leave "
                "environment_workers and max_environments unset."
            )
        if timeout is not None and not timeout > 0:
            raise ValueError(f"environment_timeout must be a positive number of seconds, got {timeout}.")
        self.factories: dict[str | None, EnvironmentFactory] = (
            dict(factory.items()) if isinstance(factory, Mapping) else {None: factory}
        )
        self.titles = {name: getattr(make, "__name__", "the environment") for name, make in self.factories.items()}
        """What messages call the environments."""
        if processes:
            for name, make in self.factories.items():
                pickled(make)
                self.factories[name] = partial(ProcessEnvironment, make)
        self.workers = workers
        self.max_environments = processes or max_environments or sys.maxsize
        self.timeout = timeout
        self._free_workers = workers
        self._idle: defaultdict[str | None, list[Environment]] = defaultdict(list)
        self._names: dict[int, str | None] = {}
        """Which environment each running episode plays."""
        self._playing: dict[int, Environment] = {}
        self._waiting: deque[_Call] = deque()
        self._queued: deque[Callable[[], None]] = deque()
        """Resets that wait for another episode to end."""
        self._running: dict[int, _Call] = {}
        # The only thing that other threads touch; the rest belongs to the caller's.
        self._answers: queue.SimpleQueue[tuple[_Call, Outcome]] = queue.SimpleQueue()
        self._loop: _Loop | None = None
        self._threads = _Threads()

    def reset(self, episode: int, seed: int, options: dict[str, Any] | None, name: str | None = None) -> None:
        """Start an episode of the environment of that name, as soon as there may be one more; see :meth:`outcomes`."""
        self._names[episode] = name
        self._queued.append(partial(self._call, episode, "reset", bound_reset, seed, options))
        self._start_queued()

    def step(self, episode: int, action: str) -> None:
        """Send an action; the outcome comes from :meth:`outcomes`."""
        self._call(episode, "step", bound_step, action)

    def outcomes(self, block: bool) -> list[Outcome]:
        """Take what has been answered or has run out of time since the last call.

        Args:
            block: Wait for at least one outcome, if any call is under way.

        Raises:
            BaseException: What an environment raised, if that is no ``Exception`` (KeyboardInterrupt, SystemExit).
        """
        taken: list[Outcome] = []
        while self._running or not self._answers.empty():
            try:
                call, outcome = self._answers.get(timeout=self._patience(block and not taken))
            except queue.Empty:
                taken += self._expire()
                if not block or taken:
                    break
                continue
            if outcome.error is not None and not isinstance(outcome.error, _FAILURES):
                raise outcome.error
            if self._running.get(call.episode) is call:
                self._end(call)
                taken.append(outcome)
            else:
                # Too late: the episode is over, and the instance was waiting to be let go.
                self._close(call.environment)
        return taken

    def release(self, episode: int, reusable: bool) -> None:
        """End an episode. An instance that failed is closed rather than played again; unknown episodes are fine."""
        environment, call = self._playing.pop(episode, None), self._running.get(episode)
        if call is not None:
            # Nothing gets a thread out of a call: the instance is closed once it answers.
            self._end(call)
            call.cancel()
        elif environment is not None and reusable:
            self._idle[self._names[episode]].append(environment)
        else:
            self._close(environment)
        self._start_queued()

    def abandon(self) -> None:
        """End every episode; none of their instances is played again."""
        self._queued.clear()
        self._waiting.clear()
        for episode in {*self._playing, *self._running}:
            self.release(episode, reusable=False)

    def close(self) -> None:
        """Close every idle instance, waiting up to ``timeout`` seconds for each; stop the event loop and idle threads."""
        closed: queue.SimpleQueue[None] = queue.SimpleQueue()
        idle = [environment for instances in self._idle.values() for environment in instances]
        for environment in idle:
            self._close(environment, lambda value, error: closed.put(None))
        with suppress(queue.Empty):
            for _ in idle:
                closed.get(timeout=self.timeout)
        self._idle.clear()
        if self._loop is not None:
            self._loop.stop()
            self._loop = None
        self._threads.stop()

    def _start_queued(self) -> None:
        while self._queued and len(self._playing) < self.max_environments:
            self._queued.popleft()()

    def _call(self, episode: int, method: str, bind: Callable[..., Callable[[], Any]], *arguments: Any) -> None:
        call = _Call(episode, method)
        try:
            call.environment = self.environment(episode, self._names[episode])
            call.function = bind(call.environment, *arguments)
        except _FAILURES as error:
            self._running[episode] = call
            self._answers.put((call, Outcome(episode, error=error)))
            return
        if inspect.iscoroutinefunction(call.function):
            self._begin(call)
        elif self.workers:
            call.in_thread = True
            self._waiting.append(call)
            self._start_waiting()
        elif self.timeout is not None:
            raise InlineTimeoutError(
                f"environment_timeout={self.timeout} cannot interrupt an environment that is stepped inline. Set "
                "environment_workers to the number of environments to step at once, or leave environment_timeout unset."
            )
        else:
            self._begin(call)

    def environment(self, episode: int, name: str | None = None) -> Environment:
        """The instance that plays an episode, made or taken from the idle ones of that name if it has none yet."""
        if episode not in self._playing:
            self._names[episode] = name
            idle = self._idle[name]
            self._playing[episode] = idle.pop() if idle else self.factories[name]()
        return self._playing[episode]

    def _start_waiting(self) -> None:
        while self._waiting and self._free_workers:
            self._free_workers -= 1
            self._begin(self._waiting.popleft())

    def _begin(self, call: _Call) -> None:
        if self.timeout is not None:
            call.deadline = time.monotonic() + self.timeout
        self._running[call.episode] = call

        def report(value: Any, error: BaseException | None) -> None:
            self._answers.put((call, Outcome(call.episode, value, error)))

        call.cancel = self._launch(call.function, report)

    def _end(self, call: _Call) -> None:
        del self._running[call.episode]
        if call.in_thread:
            self._free_workers += 1
            self._start_waiting()

    def _launch(self, function: Callable[[], Any], report: _Report) -> Callable[[], object]:
        """Run a function of an environment the way its kind runs. Returns what cancels it, as far as that is possible."""
        if inspect.iscoroutinefunction(function):
            if self._loop is None:
                self._loop = _Loop()
            return self._loop.start(_attempt_async(function, report))
        if self.workers:
            self._threads.run(partial(_attempt, function, (BaseException,)), report)
        else:
            report(*_attempt(function, _FAILURES))
        return lambda: None

    def _close(self, environment: Environment | None, report: _Report = lambda value, error: None) -> None:
        """Let an instance go, without waiting. Closing is a courtesy: nobody asks what came of it."""
        try:
            self._launch(getattr(environment, "close", lambda: None), report)
        except (Exception, SystemExit) as error:
            report(None, error)

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
            self.release(call.episode, reusable=False)
        return [
            Outcome(
                call.episode,
                error=EnvironmentTimeoutError(f"{call.method} took longer than environment_timeout={self.timeout} s"),
            )
            for call in expired
        ]


class _Threads:
    """Threads that are used again. One that hangs is not waited for, and as a daemon it does not hold up the exit."""

    def __init__(self) -> None:
        self._idle: deque[queue.SimpleQueue[tuple[Callable[[], tuple[Any, BaseException | None]], _Report] | None]] = (
            deque()
        )

    def run(self, attempt: _Attempt, report: _Report) -> None:
        """Attempt it in an idle thread, or in a new one, and report what came of it."""
        try:
            inbox = self._idle.pop()
        except IndexError:
            inbox = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(inbox,), daemon=True).start()
        inbox.put((attempt, report))

    def stop(self) -> None:
        """End the idle threads."""
        while self._idle:
            self._idle.pop().put(None)

    def _serve(self, inbox: Any) -> None:
        while (work := inbox.get()) is not None:
            attempt, report = work
            outcome = attempt()
            # Idle first, so that the answer's next call finds this thread.
            self._idle.append(inbox)
            report(*outcome)
            del work, attempt, report, outcome  # while idle, nothing is kept alive


class _Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        started: queue.SimpleQueue[asyncio.AbstractEventLoop] = queue.SimpleQueue()

        async def serve() -> None:
            self._stop = asyncio.Event()
            started.put(asyncio.get_running_loop())
            await self._stop.wait()

        threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
        self._loop = started.get()

    def start(self, coroutine: Coroutine[Any, Any, None]) -> Callable[[], object]:
        """Let it run. Returns what cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).cancel

    def stop(self) -> None:
        """Cancel what is still running and end the thread."""
        self._loop.call_soon_threadsafe(self._stop.set)


def _attempt(
    function: Callable[[], Any], failures: tuple[type[BaseException], ...]
) -> tuple[Any, BaseException | None]:
    try:
        return function(), None
    except failures as error:
        return None, error


async def _attempt_async(function: Callable[[], Any], report: _Report) -> None:
    try:
        value = await function()
    except BaseException as error:  # let through, a KeyboardInterrupt would end the loop and with it all the others
        report(None, error)
    else:
        report(value, None)
