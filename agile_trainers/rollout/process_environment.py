"""Runs an environment in a separate process, which cannot block the others and can be killed when it hangs."""

from __future__ import annotations

import asyncio
import atexit
import functools
import inspect
import multiprocessing
import os
import pickle
import pickletools
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from types import ModuleType
from typing import Any, cast
from weakref import ReferenceType, WeakKeyDictionary, ref

import cloudpickle
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_fixed

from agile_trainers.envs.agent import Model, Task
from agile_trainers.envs.base import Environment, EnvironmentFactory, ResetResult, StepResult, bound
from agile_trainers.envs.checker import describe_error, describe_failure
from agile_trainers.envs.isolation.levels import describe_status
from agile_trainers.envs.isolation.process_tree import (
    adopt_descendants,
    die_with_parent,
    kill_descendants,
    reap,
    remove_abandoned,
)
from agile_trainers.imports import is_unread, outliving_readers
from agile_trainers.types import Message

_STARTS, _PAUSE = 50, 0.1
"""Attempts to start a process, and the seconds between them, in which a killed server comes to its end."""
_CLOSING_SECONDS = 5.0
"""Seconds that an environment has to close, and its process to exit, before it is killed."""
_IMPORT = (cloudpickle.cloudpickle.subimport.__module__, "subimport")
"""The function by which a pickled function imports a module that it uses."""
_SERVER_SOCKET = "agile_trainers.rollout.server_socket"

_connections: WeakKeyDictionary[BaseProcess, ReferenceType[Connection]] = WeakKeyDictionary()
"""The processes of environments to their connections, each of which closes when its environment is collected."""
_exit: Finalize | None = None
"""Lets the processes exit when this process does. A fork of multiprocessing drops it."""


class EnvironmentProcessError(RuntimeError):
    """Raised when an environment raises in its process or the process dies."""


def pickled(factory: EnvironmentFactory) -> bytes:
    """Pickle a factory for another process; lambdas, closures and objects of the main script are sent by value.

    Raises:
        ValueError: If the factory holds an object that cannot be pickled.
    """
    try:
        return cast(bytes, cloudpickle.dumps(factory))
    except Exception as error:  # an object's pickling can raise anything
        raise ValueError(
            f"environment_processes sends the factory to other processes, but {factory!r} cannot be pickled "
            f"({describe_error(error)}). Create locks, files and connections inside the factory."
        ) from error


class ProcessEnvironment:
    """Plays an environment in a separate process, started from a clean server process (``forkserver``).

    Cancelling a call kills the process. What the environment has started ends with it (see :mod:`.keeper`). The
    environment's exceptions arrive as text. One that is not closed has five seconds to exit when the training process does.

    Args:
        factory: Makes the environment in that process.

    Raises:
        ValueError: If the factory cannot be sent, or the name of the temporary folder is too long for a socket.
    """

    def __init__(self, factory: EnvironmentFactory):
        sent = pickled(factory)
        context = multiprocessing.get_context("forkserver")
        # Imported once, before the first fork, instead of in every process.
        context.set_forkserver_preload([_SERVER_SOCKET, "psutil", __name__, *_modules(sent)])
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(sent, theirs), daemon=True)
        with _without_main_module():
            try:
                # An environment may have killed the server; the next attempt starts another.
                retrying = Retrying(
                    retry=retry_if_exception_type((EOFError, ConnectionError)), stop=stop_after_attempt(_STARTS),
                    wait=wait_fixed(_PAUSE), reraise=True,
                )  # fmt: skip
                retrying(self._process.start)
            except OSError as error:
                if "AF_UNIX" not in str(error):
                    raise
                raise ValueError(
                    f"The temporary folder {tempfile.gettempdir()} has a name too long for a socket in it, by which "
                    "environments are started in processes. Set TMPDIR to a shorter one, or environment_processes=0."
                ) from error
        theirs.close()
        _exit_before(self._process, self._connection)
        self._rewrites, self._known = True, False
        self._calls = 0
        """Number of the last call, which its answer repeats."""

    async def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Start an episode in the process."""
        started = await self._call("reset", seed, options)
        if not self._known:
            self._known = True
            with suppress(EnvironmentProcessError):  # an attribute that raises or cannot be sent declares nothing
                if (declared := await self._call("return_range")) is not None:
                    self.return_range = declared
        return started

    async def step(self, action: str) -> StepResult:
        """Step the environment in the process."""
        return await self._call("step", action)

    async def play(self, model: Model, task: Task) -> Any:
        """Let an agent play an episode in the process."""
        return await self._call("play", model, task)

    async def end(self, reason: str) -> float | None:
        """Tell the environment in the process that a limit ends the episode; None if it does not define ``end``."""
        return cast("float | None", await self._call("end", reason))

    @property
    def context(self) -> Callable[[list[Message]], Awaitable[Any]] | None:
        """Asks the environment for its context; None once it is known that it does not define ``context``."""
        return self._context if self._rewrites else None

    async def _context(self, messages: list[Message]) -> Any:
        context = await self._call("context", messages)
        self._rewrites = context is not NotImplemented
        return context

    async def close(self) -> None:
        """Close the environment, then end its process and all that were started by it."""
        try:
            with suppress(EnvironmentProcessError, TimeoutError):
                await asyncio.wait_for(self._call("close"), _CLOSING_SECONDS)
                self._connection.close()  # on which the process exits by itself
                await self._ended()
        finally:  # also when the pool's loop is stopped meanwhile
            self._end()
        await self._ended()

    async def _call(self, method: str, *arguments: Any) -> Any:
        self._calls += 1
        try:
            self._connection.send((self._calls, method, arguments))
            await until_readable(self._connection.fileno())
            number, error, value = self._connection.recv()
            if number != self._calls:  # a second answer to an earlier call, which would shift all later ones
                self._end()
                raise EnvironmentProcessError(f"the environment's process answered {method} twice")
        except asyncio.CancelledError:
            self._end()
            raise
        except (EOFError, OSError) as lost:
            await self._ended()
            code = self._process.exitcode
            how = "it is still ending" if code is None else describe_status(code)
            raise EnvironmentProcessError(f"the environment's process died in {method} ({how})") from lost
        if error is not None:
            raise EnvironmentProcessError(error)
        return value

    async def _ended(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(until_readable(self._process.sentinel), _CLOSING_SECONDS)

    def _end(self) -> None:
        self._process.terminate()  # the keeper, which kills the others
        self._connection.close()


def _exit_before(process: BaseProcess, connection: Connection) -> None:
    global _exit
    _connections[process] = ref(connection)
    if _exit is None or not _exit.still_active():
        _exit = Finalize(None, _let_exit, exitpriority=0)  # before multiprocessing terminates the daemonic processes


def _let_exit() -> None:
    """Close the connections, on which the processes exit by themselves, and wait for them. The others are killed next."""
    processes = [process for process in multiprocessing.active_children() if process in _connections]
    for process in processes:
        if (connection := _connections[process]()) is not None:
            connection.close()
    deadline = time.monotonic() + _CLOSING_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


async def until_readable(descriptor: int) -> None:
    """Wait until there is something to read, or a connection to accept."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)


@functools.lru_cache(maxsize=1)  # the instances of a pool are of one factory
def _modules(sent: bytes) -> frozenset[str]:
    """Return the modules that a pickle imports: of what a factory is made of, and those that its functions use."""
    pushed, kept, found = list[Any](), list[Any](), set[str]()
    argument: Any
    for opcode, argument, _ in pickletools.genops(sent):
        if opcode.name == "MEMOIZE":
            kept.append(pushed[-1])
        if opcode.name in ("MEMOIZE", "FRAME"):  # they push nothing
            continue
        if opcode.name == "STACK_GLOBAL":
            argument = tuple(pushed[-2:])
            found.add(argument[0])
        elif opcode.name == "TUPLE1" and pushed[-2] == _IMPORT:
            found.add(pushed[-1])
        pushed.append(kept[argument] if opcode.name.endswith("BINGET") else argument)
    return frozenset(found - {"__main__"})


@contextmanager
def _without_main_module() -> Iterator[None]:
    """Keep multiprocessing from importing the main script in every process; the factory brings its own imports."""
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _serve(sent: bytes, connection: Connection) -> None:
    """Run the other process."""
    keep(connection)
    with outliving_readers():
        _answer_calls(sent, connection)
    atexit._run_exitfuncs()  # as any program does, but not multiprocessing: temporary folders are removed


def _answer_calls(sent: bytes, connection: Connection) -> None:
    """Answer calls until the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the training process handles interrupts
    loop = asyncio.new_event_loop()
    environment: Any = None
    own = os.getpid()
    while True:
        try:
            number, method, arguments = connection.recv()
        except (EOFError, OSError):  # the training process has ended, or the environment closed the connection
            return
        is_unread()  # the trainer's, which it may have lost
        try:
            if environment is None and method != "close":
                factory: Callable[[], Environment] = pickle.loads(sent)
                environment = factory()
            if method == "close":
                function = getattr(environment, "close", lambda: None)
            elif method == "return_range":
                function = functools.partial(getattr, environment, method, None)
            else:
                function = bound(environment, method, *arguments)
            value = function()
            answer: tuple[str | None, Any] = None, value
            if inspect.isawaitable(value):
                answer = None, loop.run_until_complete(value)
        except BaseException as error:
            answer = describe_failure(error), None
        if os.getpid() != own:  # a process that the environment forked and that came back from its code
            os._exit(0)
        try:
            connection.send((number, *answer))
        except OSError:  # the training process has ended
            return
        except Exception as error:
            connection.send(
                (number, f"the result of {method} cannot be sent to another process: {describe_error(error)}", None)
            )


_EXITING_SECONDS = 2.0
"""Seconds that a process whose trainer has ended has to exit by itself."""


def keep(connection: Connection) -> None:
    """Split this process into a keeper and its child, and return in the child alone.

    The keeper ends with the child, on SIGTERM, or soon after the training process has ended. Before, it kills every process
    below it, and then removes the folders of agents' programs among them. On Linux it is a subreaper: processes that left
    their parent or session stay below it. It exits with the child's exit code, or by the signal that ended the child.

    Args:
        connection: The child's connection to the training process, which the keeper closes.
    """
    own = os.getpid()
    os.setsid()  # an environment that signals its group does not reach its neighbours
    adopt_descendants()
    signal.signal(signal.SIGCHLD, lambda *_: None)  # some systems drop the signal otherwise
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # no signal to the group ends the keeper
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        die_with_parent()
        if os.getppid() != own:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    code: int | None = None
    try:
        connection.close()
        threading.Thread(target=_wait_for_trainer, daemon=True).start()
        while (code := reap(child)) is None and signal.sigwait({signal.SIGCHLD, signal.SIGTERM}) != signal.SIGTERM:
            pass
        kill_descendants()
        remove_abandoned(tempfile.gettempdir(), child)
    finally:
        _exit_like(-signal.SIGKILL if code is None else code)


def _exit_like(code: int) -> None:
    """End this process with an exit code; a negative one is minus the number of a signal."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code)


def _wait_for_trainer() -> None:
    trainer = multiprocessing.parent_process()
    assert trainer is not None
    wait([trainer.sentinel])
    time.sleep(_EXITING_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
