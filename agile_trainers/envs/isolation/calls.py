"""Runs functions on a model's text in an isolated process with enforced limits of time and memory.

A thread cannot be stopped, and one large integer or regular expression blocks all others. The level of isolation
determines what the process can access; see ``levels.py``.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from agile_trainers.envs.isolation import levels as isolation

_WORKER = Path(__file__).with_name("worker.py")
_MOST_WORKERS = 4
_MOST_MEMORY = 4096
"""Megabytes."""
_LOADING_SECONDS = 120.0
"""Seconds to start a process and load the function."""
_LONGEST_REPLY = 1 << 24
"""Bytes."""
_ENDS = ("value", "error", "memory")
"""Kinds of the reply that ends a call."""


class IsolatedError(RuntimeError):
    """Raised when the function raises or its process dies."""


class IsolatedDeath(IsolatedError):
    """Raised when the function's process dies, runs out of memory, or sends anything that is not its reply."""


def run_isolated(
    function: Callable[..., Any],
    *arguments: Any,
    timeout: float = 5.0,
    memory: int = 1024,
    required_by: str | None = None,
) -> Any:
    """Call a function in an isolated process, which is reused for later calls of functions of the same file.

    The process has the best isolation of this machine (see :mod:`~agile_trainers.envs.isolation.levels`). At every level
    it has no environment variables of this process and cannot write files. Arguments and result are sent as JSON, so the
    result is always plain data.

    Args:
        function: A top-level function of a file without relative imports; only that file is loaded in the process. The
            file's function ``prepare()``, if defined, is called before the clock starts, for slow imports.
        arguments: JSON-ready arguments.
        timeout: Seconds of CPU time, so that the result does not depend on the machine's load. The kernel then ends the
            process, even inside one long operation. The limit of wall time is thirty times as long.
        memory: Megabytes of address space, at most 4096.
        required_by: Name of the code that needs isolation, for the error if the machine has none. None: isolation is not
            required.

    Returns:
        The function's result.

    Raises:
        IsolationError: If isolation is required, but this machine has none and running without it is not allowed.
        TimeoutError: If the call took too long.
        IsolatedError: If the function raised, used too much memory, or returned a value that is not JSON, or if its process
            died or sent anything that is not its reply.
    """
    if required_by is not None:
        isolation.require(required_by)
    key = isolation.level(), function.__code__.co_filename
    with _slots:
        worker = _idle_worker(key) or _Worker(key[1])
        try:
            kind, value = worker.ask(function, arguments, timeout, memory)
            if kind == "memory":  # memory that the caught exception may still hold
                raise IsolatedDeath(f"{value}: more than {memory} megabytes")
        except BaseException:
            worker.kill()
            raise
        _idle[key].append(worker)
    if kind != "value":
        raise IsolatedError(str(value))
    return value


class _Worker:
    """Handle of the isolated process."""

    def __init__(self, file: str) -> None:
        most = {"RLIMIT_AS": _MOST_MEMORY << 20, "RLIMIT_FSIZE": 0, "RLIMIT_CORE": 0}
        self._process = _starter.submit(
            subprocess.Popen,
            isolation.command([str(_WORKER)], limits=most, sites=True, extra=[_WORKER, file]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_ENVIRONMENT,
            cwd="/",
            start_new_session=True,  # Ctrl-C is for the training process
        ).result()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._replies = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._requests, False)
        self._begun = b""
        self._send({"path": [os.path.realpath(entry) for entry in sys.path if entry]})

    def ask(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float, memory: int
    ) -> tuple[str, Any]:
        request = {
            "file": os.path.realpath(function.__code__.co_filename),
            "name": function.__name__,
            "arguments": arguments,
        }
        call = self._send({**request, "timeout": timeout, "memory": memory})
        self._receive(call, "loaded", _LOADING_SECONDS)
        self._receive(call, "done", 30 * timeout)
        # What was written during the call cannot name the ticket, which is drawn afterwards.
        ticket = self._send({})
        reply = self._receive(ticket, None, _LOADING_SECONDS)
        if not self.is_silent():
            raise IsolatedDeath("the process sent more than its reply")
        return reply

    def is_silent(self) -> bool:
        """Return whether the process lives and has sent nothing that was not read."""
        return self._process.poll() is None and not self._begun and not _ready(self._replies, select.POLLIN, 0.0)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]

    def _send(self, request: dict[str, Any]) -> str:
        """Send a request with a random number, and return the number."""
        number = secrets.token_hex(16)
        left = json.dumps({"number": number, **request}).encode() + b"\n"
        deadline = time.monotonic() + _LOADING_SECONDS
        with suppress(BrokenPipeError):  # a dead process does not answer
            while left:
                if not _ready(self._requests, select.POLLOUT, deadline):
                    raise TimeoutError("it reads no request")
                left = left[os.write(self._requests, left) :]
        return number

    def _receive(self, number: str, kind: str | None, seconds: float) -> tuple[str, Any]:
        """Read the reply to the request of this number; of any kind if ``kind`` is None."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._begun:
            if not _ready(self._replies, select.POLLIN, deadline):
                raise TimeoutError(f"no answer within {seconds:g} s")
            part = os.read(self._replies, 1 << 16)
            self._begun += part
            if not part or len(self._begun) > _LONGEST_REPLY:
                raise self._death()
        line, _, self._begun = self._begun.partition(b"\n")
        try:
            found, *reply = json.loads(line)
            named, value = reply
        except (ValueError, TypeError, RecursionError) as error:
            raise IsolatedDeath(f"the process sent something that is no reply ({type(error).__name__})") from error
        if found != number or named not in ([kind] if kind else _ENDS):
            raise IsolatedDeath("the process sent a reply to no request")
        return named, value

    def _death(self) -> Exception:
        self._process.kill()
        code = isolation.exit_code(self._process.wait())
        if code == -signal.SIGPROF:
            return TimeoutError("it used up its CPU time")
        return IsolatedDeath(f"the process died ({isolation.describe_status(code)})")


def _idle_worker(key: tuple[str, str]) -> _Worker | None:
    """Return an idle worker, None if there is none; one that died or sent something unasked is ended."""
    while True:
        try:
            worker = _idle[key].pop()
        except IndexError:
            return None
        if worker.is_silent():
            return worker
        worker.kill()


def _ready(descriptor: int, what: int, deadline: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, what)
    return bool(poll.poll(max(deadline - time.monotonic(), 0.0) * 1000))


_ENVIRONMENT = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
_idle: defaultdict[tuple[str, str], deque[_Worker]] = defaultdict(deque)
_slots = threading.BoundedSemaphore(_MOST_WORKERS)
_starter = ThreadPoolExecutor(1, "isolation")  # the kernel ends a process with the *thread* that started it


def _forget() -> None:
    """Forget the workers in a forked process, since they belong to the parent."""
    global _slots, _starter
    _idle.clear()
    _slots = threading.BoundedSemaphore(_MOST_WORKERS)
    _starter = ThreadPoolExecutor(1, "isolation")


os.register_at_fork(after_in_child=_forget)
