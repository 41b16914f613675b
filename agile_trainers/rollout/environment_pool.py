"""Runs environments inline, in threads, in processes or in an event loop, isolated from each other's failures."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import queue
import signal
import sys
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from agile_trainers.envs.agent import Agent, Model, Task, agent_of
from agile_trainers.envs.base import Environment, EnvironmentFactory, bound
from agile_trainers.imports import is_unread, pass_on_interrupt, unbound
from agile_trainers.rollout.process_environment import ProcessEnvironment, pickled
from agile_trainers.types import Message

logger = logging.getLogger(__name__)

_CANCEL_SECONDS = 5.0
"""Seconds that coroutines have to end when the event loop is stopped."""
_BLOCKED_SECONDS = 5.0
"""Seconds without an answer after which an event loop counts as blocked by a coroutine."""

SILENT_SECONDS = 60.0
"""Seconds after which a call that has not answered is named, if no timeout is set."""

_LAST_SECONDS = 1.0
"""Seconds for closing each instance after one that has not answered."""

_Attempt = Callable[[], "tuple[Any, BaseException | None]"]
_Report = Callable[[Any, "BaseException | None"], None]
_Inbox = queue.SimpleQueue[tuple[_Attempt, _Report] | None]


class EnvironmentTimeoutError(Exception):
    """Raised when an environment does not answer in time."""


class _EndedError(BaseException):
    """Raised in an inline call that is ended; the environment's ``except Exception`` does not catch it."""


class InlineTimeoutError(ValueError):
    """Raised when a timeout is set for an inline environment, which cannot be interrupted."""


class SharedInstanceError(ValueError):
    """Raised when a factory returns an instance that plays another episode, so that their states would mix."""


@dataclass
class Outcome:
    """Result of a call: a value or an exception."""

    episode: int
    method: str
    """The method that was called, such as ``"reset"``."""
    value: Any = None
    error: BaseException | None = None


@dataclass(eq=False)
class _Call:
    """A pending call of an environment."""

    episode: int
    method: str
    environment: Environment | None = None
    """None if its construction failed."""
    function: Callable[[], Any] = lambda: None
    in_thread: bool = False
    since: float = field(default_factory=time.monotonic)
    deadline: float = float("inf")
    cancel: Callable[[], object] = lambda: None


class EnvironmentPool:
    """A pool of environment instances, one per running episode, which are constructed once and reused.

    Instances are constructed in the caller's thread. An instance that raised, timed out or broke the protocol is not
    reused. An async environment must not block, since it would block all others.

    Args:
        factory: Makes an instance; or several factories by name, whose instances share the limits below. Idle instances
            are kept and do not count.
        workers: With 0, blocking environments are stepped inline, in the caller's thread, in a fixed order
            (bit-reproducible); otherwise the number of threads. Environments with ``async`` methods are always awaited
            together.
        timeout: Seconds after which a call's episode is ended and its worker freed. None waits forever. It cannot
            interrupt an inline call, so it needs ``workers >= 1`` unless the environment is async.
        processes: With 0, environments run in this process; otherwise each runs in a separate process, up to this many
            at once, and is killed when it hangs.
        max_environments: Number of episodes that play at once, each on a separate instance; the others wait. None: no
            limit.

    Raises:
        ValueError: If an argument is out of range or conflicts with another, or ``factory`` cannot be sent to a process.
        InlineTimeoutError: If a call starts inline with a timeout set.
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
                f"environment_processes={processes} sets the number of environments that play at once. Leave "
                "environment_workers and max_environments unset."
            )
        if timeout is not None and not timeout > 0:
            raise ValueError(f"environment_timeout must be a positive number of seconds, got {timeout}.")
        self.factories: dict[str | None, EnvironmentFactory] = (
            dict(factory.items()) if isinstance(factory, Mapping) else {None: factory}
        )
        self.titles = {name: getattr(make, "__name__", "the environment") for name, make in self.factories.items()}
        """Environment name to the name used in messages."""
        self._made = dict(self.factories)
        if processes:
            for name, make in self.factories.items():
                pickled(make)
                self.factories[name] = partial(ProcessEnvironment, make)
        self.workers, self.processes = workers, processes
        self.max_environments = processes or max_environments or sys.maxsize
        self.timeout = timeout
        self.busy = BusyMeter()
        """Measures when a call is under way, except while :meth:`waits` says otherwise, also in a pool that :meth:`another`
        made."""
        self._free_workers = workers
        self._idle: defaultdict[str | None, list[Environment]] = defaultdict(list)
        self._names: dict[int, str | None] = {}
        """Running episode to the name of its environment."""
        self._playing: dict[int, Environment] = {}
        self._waiting: deque[_Call] = deque()
        self._queued: deque[Callable[[], None]] = deque()
        """Resets that wait until another episode ends."""
        self._running: dict[int, _Call] = {}
        self._paused: dict[_Call, float] = {}
        """Calls whose time stands still, to the seconds that they have left."""
        self._given_up: set[_Call] = set()
        """Calls whose episode is over. Their instance is closed when they answer."""
        # The only attribute that other threads use; the caller's thread owns all others.
        self._answers: queue.SimpleQueue[tuple[_Call | None, Outcome]] = queue.SimpleQueue()
        self._loop: _Loop | None = None
        self._blocked_loops: list[_Loop] = []
        self._threads = _Threads()
        self._named_silent = False
        self._inline: _Call | None = None
        """The call that runs in the caller's thread."""
        self._watch: Callable[[], object] | None = None
        _pools.add(self)

    def another(self) -> EnvironmentPool:
        """Make a pool of the same environments and limits, whose episodes are independent of those of this one."""
        most = None if self.processes or self.max_environments == sys.maxsize else self.max_environments
        factories: Any = self._made  # of one environment, its name is None
        pool = EnvironmentPool(factories, self.workers, self.timeout, processes=self.processes, max_environments=most)
        pool.busy = self.busy
        return pool

    def reset(self, episode: int, seed: int, options: dict[str, Any] | None, name: str | None = None) -> None:
        """Start an episode of the environment ``name`` once ``max_environments`` allows it; see :meth:`outcomes`."""
        self._queue(episode, name, "reset", seed, options)

    def step(self, episode: int, action: str) -> None:
        """Send an action; :meth:`outcomes` returns the outcome."""
        self._call(episode, "step", action)

    def agent(self, name: str | None = None) -> Agent | None:
        """Return the agent that plays the episodes of an environment; None if its instances are stepped."""
        return agent_of(self._made[name])

    def play(self, episode: int, model: Model, task: Task, name: str | None = None) -> None:
        """Let an agent play a whole episode once ``max_environments`` allows it; see :meth:`outcomes`.

        ``timeout`` counts for the whole episode, without the time from :meth:`pause` to :meth:`go_on`.
        """
        self._queue(episode, name, "play", model, task)

    def pause(self) -> None:
        """Let the time of agents' episodes stand still, since nobody answers their requests."""
        now = time.monotonic()
        for call in self._running.values():
            if call.method == "play":
                self._paused[call], call.deadline = call.deadline - now, float("inf")

    def go_on(self) -> None:
        """Let the time of agents' episodes go on."""
        now = time.monotonic()
        for call, left in self._paused.items():
            call.deadline = now + left
        self._paused.clear()

    def waits(self, episode: int, waits: bool) -> None:
        """Note whether an agent waits for an answer, so that :attr:`busy` does not measure it."""
        if (call := self._running.get(episode)) is not None:
            self.busy.set(call, not waits)

    def post(self, outcome: Outcome) -> None:
        """Let :meth:`outcomes` return what happened to an episode outside the pool. May be called from any thread."""
        self._answers.put((None, outcome))

    def return_range(self, name: str | None = None) -> tuple[float, float] | None:
        """Return the lowest and highest return that an environment declares as ``return_range``; None if it does not.

        Raises:
            ValueError: If it is no pair of finite numbers in order.
        """
        # An instance in a process of its own has said at its first reset.
        asked = next(
            (one for one in (*self._idle[name], unbound(self._made[name])) if hasattr(one, "return_range")), None
        )
        return declared_range(asked, self.titles[name])

    def end(self, episode: int, reason: str) -> bool:
        """Tell the environment that a limit ends an episode. False if it does not define ``end``.

        Otherwise :meth:`outcomes` returns the reward, or None.
        """
        if not self._defines(episode, "end"):
            return False
        self._call(episode, "end", reason)
        return True

    def rewrites(self, episode: int) -> bool:
        """Return whether the environment defines ``context``, or may do so in a process of its own."""
        return self._defines(episode, "context")

    def context(self, episode: int, messages: list[Message]) -> None:
        """Ask the environment what the model is to see; :meth:`outcomes` returns it, or ``NotImplemented``."""
        self._call(episode, "context", messages)

    def _defines(self, episode: int, method: str) -> bool:
        try:
            found = getattr(self._playing[episode], method, None)
            return found is not None if method == "end" else callable(found)
        except BaseException as error:  # of the environment's own attribute; the call raises it again
            pass_on_interrupt(error)
            return True

    def outcomes(self, block: bool, *, posted: bool = False) -> list[Outcome]:
        """Return the calls that have been answered or have timed out since the last call of this method.

        Args:
            block: Wait for at least one outcome if a call is pending.
            posted: Wait also if none is, since something will be posted.
        """
        taken: list[Outcome] = []
        while self._running or not self._answers.empty() or (posted and block and not taken):
            try:
                call, outcome = self._answers.get(timeout=self._patience(block and not taken))
            except queue.Empty:
                taken += self._expire()
                self._name_silent()
                if not block or taken:
                    break
                continue
            if call is None:
                taken += self._expire() if outcome.method == _WAKE else [outcome]
            elif self._running.get(call.episode) is call:
                self._end(call)
                taken.append(outcome)
            else:
                self._given_up.discard(call)
                self._close(call.environment)
        return taken

    def release(self, episode: int, reusable: bool) -> None:
        """End an episode. A failed instance is closed instead of reused; unknown episodes are ignored."""
        environment, call = self._playing.pop(episode, None), self._running.get(episode)
        if call is not None:
            self._end(call)
            self._given_up.add(call)
            call.cancel()  # a thread cannot be interrupted
        elif environment is not None and reusable:
            self._idle[self._names[episode]].append(environment)
        else:
            self._close(environment)
        self._start_queued()

    def abandon(self) -> None:
        """End every episode without reusing their instances."""
        self._queued.clear()
        self._waiting.clear()
        for episode in {*self._playing, *self._running}:
            self.release(episode, reusable=False)

    def end_silent(self) -> None:
        """End the episodes of calls that have not answered for ``SILENT_SECONDS``, from a signal handler of the caller.

        Raises:
            BaseException: If such a call runs inline; the pool catches it.
        """
        now = time.monotonic()
        for call in [*self._running.values()]:
            if call.method != "play" and now - call.since >= SILENT_SECONDS:
                call.deadline = now
                self._answers.put((None, Outcome(call.episode, _WAKE)))
        if self._inline is not None and now - self._inline.since >= SILENT_SECONDS:
            raise _EndedError(_unanswered(self._inline))

    def _name_silent(self) -> None:
        """Warn of a call without a timeout that does not answer, once. From any thread."""
        if self._named_silent or self.timeout is not None:
            return
        now = time.monotonic()
        for call in [self._inline, *self._running.values()]:
            if call is not None and call.method != "play" and now - call.since >= SILENT_SECONDS:
                self._named_silent = True
                title = self.titles[self._names.get(call.episode)]
                workers = "" if self.workers or self.processes else " and environment_workers (one thread is enough)"
                logger.warning(
                    f"{title}: {call.method}() of episode {call.episode} (from 0, of those that play) has not answered for "
                    f"{now - call.since:.0f} s, and is waited for without a limit. Set environment_timeout{workers} to "
                    "end such episodes. In training, an interrupt (Ctrl-C) ends this one. This is said once."
                )
                return

    def close(self) -> None:
        """Close idle instances, and stop the event loop and idle threads.

        It waits up to ``timeout`` seconds for each instance, ``SILENT_SECONDS`` if there is no timeout, and hardly for those
        after one that has not answered.
        """
        closed: queue.SimpleQueue[int] = queue.SimpleQueue()
        idle: list[Environment | None] = [one for instances in self._idle.values() for one in instances]
        with suppress(queue.Empty):
            while any(not call.in_thread for call in self._given_up):  # cancelled coroutines, which end soon
                call, _ = self._answers.get(timeout=_CANCEL_SECONDS)
                if call in self._given_up:
                    self._given_up.discard(call)
                    idle.append(call.environment)
        self._given_up.clear()
        limit = SILENT_SECONDS if self.timeout is None else self.timeout
        inline = SILENT_SECONDS
        for place, environment in enumerate(idle):
            began = time.monotonic()
            self._close(environment, partial(_note_closed, closed, place), inline)
            if time.monotonic() - began >= inline:
                limit = inline = _LAST_SECONDS
        waiting = dict(enumerate(idle))
        with suppress(queue.Empty):
            while waiting:
                del waiting[closed.get(timeout=limit)]
        if waiting:
            logger.warning(
                f"{', '.join(sorted({type(one).__name__ for one in waiting.values()}))}: close() of {len(waiting)} of "
                f"{len(idle)} instances did not answer in time, and is waited for no longer. What they hold, such as "
                "processes or containers, may be left. Without environment_timeout each has "
                f"{SILENT_SECONDS:g} s, and {_LAST_SECONDS:g} s after one that did not answer."
            )
        self._idle.clear()
        for loop in (self._loop, *self._blocked_loops):
            if loop is not None:
                loop.stop()
        self._loop = None
        self._blocked_loops.clear()
        self._threads.stop()
        if self._watch is not None:
            self._watch()
            self._watch = None

    def _queue(self, episode: int, name: str | None, method: str, *arguments: Any) -> None:
        self._names[episode] = name
        self._queued.append(partial(self._call, episode, method, *arguments))
        self._start_queued()

    def _start_queued(self) -> None:
        while self._queued and len(self._playing) < self.max_environments:
            self._queued.popleft()()

    def _call(self, episode: int, method: str, *arguments: Any) -> None:
        call = _Call(episode, method)
        try:
            call.environment = self.environment(episode, self._names[episode])
            call.function = bound(call.environment, method, *arguments)
        except SharedInstanceError:
            raise
        except BaseException as error:
            pass_on_interrupt(error)
            self._running[episode] = call
            self._answers.put((call, Outcome(episode, method, error=error)))
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
        """Return the instance that plays an episode: its current one, an idle one of that name, or a new one."""
        if episode not in self._playing:
            self._names[episode] = name
            idle = self._idle[name]
            self._playing[episode] = idle.pop() if idle else self._new(name)
        return self._playing[episode]

    def _new(self, name: str | None) -> Environment:
        made = self.factories[name]()
        if any(made is other for other in self._playing.values()) and not isinstance(made, Agent):
            raise SharedInstanceError(
                f"The factory of {self.titles[name]} returned an instance that already plays another episode, so their "
                "states would mix. Return a new one at each call: environment=MyEnvironment, or lambda: MyEnvironment(...)."
            )
        return made

    def _start_waiting(self) -> None:
        while self._waiting and self._free_workers:
            self._free_workers -= 1
            self._begin(self._waiting.popleft())

    def _begin(self, call: _Call) -> None:
        call.since = time.monotonic()
        if self.timeout is not None:
            call.deadline = call.since + self.timeout
        inline = not call.in_thread and not inspect.iscoroutinefunction(call.function)

        def report(value: Any, error: BaseException | None) -> None:
            if inline:
                self._inline = None  # an interrupt ends it no more
            self.busy.end(call)
            self._answers.put((call, Outcome(call.episode, call.method, value, error)))

        self._inline = call if inline else None  # before it can be named, which a user answers with an interrupt
        try:
            self._running[call.episode] = call
            self.busy.begin(call)
            if inline and self._watch is None:
                self._watch = _watch_inline(self)
            call.cancel = self._launch(call.function, report)
        except _EndedError as error:  # not within the function itself
            report(None, EnvironmentTimeoutError(str(error)))
        except BaseException:  # an interrupt: an inline call has ended, and will not answer
            if inline:
                self._end(call)
            raise
        finally:
            self._inline = None

    def _end(self, call: _Call) -> None:
        del self._running[call.episode]
        self.busy.end(call)
        if call.in_thread:
            self._free_workers += 1
            self._start_waiting()

    def _launch(self, function: Callable[[], Any], report: _Report) -> Callable[[], object]:
        """Run a function of an environment inline, in a thread or in the event loop. Return a function that cancels it."""
        is_unread()  # programs that it starts do not write to an output that is lost
        if inspect.iscoroutinefunction(function):
            if self._loop is None:
                self._loop = _Loop()
            return self._loop.start(_attempt_async(function, report))
        if self.workers:
            self._threads.run(partial(_attempt, function), report)
        else:
            value, error = _attempt(function)
            if isinstance(error, _EndedError):
                error = EnvironmentTimeoutError(str(error))
            if error is not None:
                pass_on_interrupt(error)
            report(value, error)
        return lambda: None

    def _close(
        self,
        environment: Environment | None,
        report: _Report = lambda value, error: None,
        seconds: float | None = None,
    ) -> None:
        """Close an instance without waiting, or inline within some seconds (``SILENT_SECONDS``). Errors are ignored."""
        try:
            with _interrupted_after(SILENT_SECONDS if seconds is None else seconds):
                self._launch(getattr(environment, "close", lambda: None), report)
        except BaseException as error:
            pass_on_interrupt(error)
            report(None, error)

    def _patience(self, block: bool) -> float | None:
        """Return the seconds to wait for the next outcome: until the nearest deadline, or None."""
        if not block:
            return 0.0
        calls = self._running.values()
        deadline = min((call.deadline for call in calls), default=float("inf"))
        if not self._named_silent and self.timeout is None:
            deadline = min([deadline, *(call.since + SILENT_SECONDS for call in calls if call.method != "play")])
        return None if deadline == float("inf") else max(deadline - time.monotonic(), 0.0)

    def _expire(self) -> list[Outcome]:
        now = time.monotonic()
        expired = [call for call in self._running.values() if call.deadline <= now]
        if expired and self._loop is not None and self._loop.blocked():
            # Later coroutines would time out, too. Those behind the one that blocks go on when it returns.
            self._blocked_loops.append(self._loop)
            self._loop = None
        for call in expired:
            self.release(call.episode, reusable=False)
        return [Outcome(call.episode, call.method, error=self._late(call)) for call in expired]

    def _late(self, call: _Call) -> EnvironmentTimeoutError:
        if self.timeout is None:
            return EnvironmentTimeoutError(_unanswered(call))
        return EnvironmentTimeoutError(f"{call.method} took longer than environment_timeout={self.timeout} s")


def _note_closed(closed: queue.SimpleQueue[int], place: int, value: Any, error: BaseException | None) -> None:
    if not isinstance(error, EnvironmentTimeoutError):
        closed.put(place)


@contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    """Raise :class:`_EndedError` in what the main thread does once the seconds are over. Other threads go on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: Any) -> None:
        raise _EndedError(f"close had not answered for {seconds:.0f} s")

    handler = signal.signal(signal.SIGALRM, end)
    began = time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 1e-3), interval)


_WAKE = "wake up"
"""Method of an outcome that lets :meth:`EnvironmentPool.outcomes` look at the deadlines."""
_pools: weakref.WeakSet[EnvironmentPool] = weakref.WeakSet()


def end_silent_calls() -> None:
    """End the episodes of all pools whose environment has not answered for ``SILENT_SECONDS``; see
    :meth:`EnvironmentPool.end_silent`.
    """
    for pool in [*_pools]:
        pool.end_silent()


def _unanswered(call: _Call) -> str:
    return f"{call.method} had not answered for {time.monotonic() - call.since:.0f} s when the run was interrupted"


def _watch_inline(pool: EnvironmentPool) -> Callable[[], object]:
    """Let a thread name a call that holds up the caller's. Return a function that ends the thread."""
    # Not an event: the garbage collector may end the thread from any thread, also from within its own wait.
    ended: queue.SimpleQueue[None] = queue.SimpleQueue()
    refers = weakref.ref(pool)

    def watch() -> None:
        while True:
            with suppress(queue.Empty):
                return ended.get(timeout=SILENT_SECONDS / 4)
            if (watched := refers()) is None or watched._named_silent:
                return
            watched._name_silent()
            del watched

    threading.Thread(target=watch, daemon=True, name="silent-environments").start()
    end = weakref.finalize(pool, ended.put, None)  # it ends with the pool, also with one that is not closed
    end.atexit = False
    return end


class _Threads:
    """A pool of daemon threads, which do not delay the program's exit when they hang."""

    def __init__(self) -> None:
        self._idle: deque[_Inbox] = deque()
        # The threads do not refer to this object, so that they end with it.
        weakref.finalize(self, _end_threads, self._idle).atexit = False

    def run(self, attempt: _Attempt, report: _Report) -> None:
        """Run ``attempt`` in an idle or new thread and report its result."""
        try:
            inbox = self._idle.pop()
        except IndexError:
            inbox = queue.SimpleQueue()
            threading.Thread(target=_serve_calls, args=(inbox, weakref.ref(self)), daemon=True).start()
        inbox.put((attempt, report))

    def stop(self) -> None:
        """End the idle threads."""
        _end_threads(self._idle)


def _end_threads(idle: deque[_Inbox]) -> None:
    while idle:
        idle.pop().put(None)


def _serve_calls(inbox: _Inbox, refers: weakref.ref[_Threads]) -> None:
    while (work := inbox.get()) is not None:
        attempt, report = work
        outcome = attempt()
        # Idle before reporting, so that the next call reuses this thread.
        if (threads := refers()) is not None:
            threads._idle.append(inbox)
        else:  # given up, and answered after the pool was gone
            inbox.put(None)
        del threads
        report(*outcome)
        del work, attempt, report, outcome  # an idle thread keeps no references


class _Loop:
    """An event loop in a separate thread, which an environment can neither stop nor end."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        stopped = threading.Event()
        self._tasks: set[asyncio.Task[None]] = set()  # a loop refers to them weakly
        # The thread does not refer to this object, so that it ends with it.
        threading.Thread(target=_serve_loop, args=(self._loop, stopped), daemon=True).start()
        self.stop = weakref.finalize(self, _stop_loop, self._loop, stopped)
        """Cancel the running coroutines and end the thread; this also happens when the object is deleted."""
        self.stop.atexit = False

    def start(self, coroutine: Coroutine[Any, Any, None]) -> Callable[[], object]:
        """Start a coroutine. Return a function that cancels it, but not before it has begun: it has to clean up."""
        made: list[asyncio.Task[None]] = []

        def begin() -> None:
            made.append(self._loop.create_task(coroutine))
            self._tasks.add(made[0])
            made[0].add_done_callback(self._tasks.discard)

        def cancel() -> None:
            self._loop.call_soon(made[0].cancel)  # after its first step, which `begin` has scheduled

        def cancel_from_outside() -> None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(cancel)

        self._loop.call_soon_threadsafe(begin)
        return cancel_from_outside

    def blocked(self) -> bool:
        """Return whether a coroutine keeps the others from running."""
        runs = threading.Event()
        self._loop.call_soon_threadsafe(runs.set)
        return not runs.wait(_BLOCKED_SECONDS)


def _serve_loop(loop: asyncio.AbstractEventLoop, stopped: threading.Event) -> None:
    asyncio.set_event_loop(loop)
    while not stopped.is_set() and not loop.is_closed():
        # A task that an environment has started and that exits, or its `loop.stop()`, ends `run_forever`; the other
        # environments' coroutines go on where they were.
        with suppress(BaseException):
            loop.run_forever()
    # A coroutine that is cancelled before its first step gives back nothing that it holds.
    with suppress(BaseException):
        loop.run_until_complete(asyncio.sleep(0))
    with suppress(BaseException):
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=_CANCEL_SECONDS))
        loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def _stop_loop(loop: asyncio.AbstractEventLoop, stopped: threading.Event) -> None:
    stopped.set()
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(loop.stop)


def _attempt(function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return function(), None
    except BaseException as error:  # in a thread, also a KeyboardInterrupt: the user's reaches the main thread alone
        return None, error


async def _attempt_async(function: Callable[[], Any], report: _Report) -> None:
    try:
        value = await function()
    except BaseException as error:  # otherwise a KeyboardInterrupt would end the loop and all other coroutines
        report(None, error)
    else:
        report(value, None)


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


def declared_range(environment: Any, title: str) -> tuple[float, float] | None:
    """Return the ``return_range`` of an environment or its class; None if it declares none.

    Args:
        environment: The instance or class.
        title: Its name in the error.

    Raises:
        ValueError: If it is no pair of finite numbers in order.
    """
    declared = getattr(environment, "return_range", None)
    if declared is None or isinstance(declared, property):
        return None
    try:
        low, high = map(float, declared)
    except (TypeError, ValueError):
        low = high = math.nan
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise ValueError(
            f"{title} declares return_range={declared!r}; expected the lowest and highest return of an episode, such as "
            "(0.0, 1.0)."
        )
    return low, high
