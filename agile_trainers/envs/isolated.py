"""Runs functions on text that a model wrote in another process, which limits kill whatever it is doing.

A thread cannot be stopped, and one big integer or regular expression holds up every other. This file is also what the other
process runs, so it imports nothing but the standard library.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_MOST_WORKERS = 4
_LOADING_SECONDS = 120.0
"""What a new process may take, loading the function included."""
_LONGEST_REPLY = 1 << 24
"""Bytes."""


class IsolatedError(RuntimeError):
    """The function raised, or its process died."""


def run_isolated(function: Callable[..., Any], *arguments: Any, timeout: float = 5.0, memory: int = 1024) -> Any:
    """Call a function in a process of its own, which is kept for the next call unless it had to be killed.

    The process is a clean interpreter without the environment variables of this one, and can write no file. Arguments and
    value travel as JSON, so that what comes back is data whatever happened there.

    Args:
        function: Defined at the top of a file that imports nothing relative; only that file is loaded over there.
        arguments: What JSON can say.
        timeout: Seconds of CPU time, so that the outcome does not depend on what else the machine does. The kernel ends
            the process then, even inside one long operation. In wall time it may take thirty times as long.
        memory: Megabytes of address space.

    Returns:
        What the function returned.

    Raises:
        TimeoutError: If it took too long.
        IsolatedError: If it raised, used too much memory, or returned what JSON cannot say.
    """
    with _slots:
        try:
            worker = _idle.pop()
        except IndexError:
            worker = _Worker()
        try:
            reply = worker.ask(function, arguments, timeout, memory)
        except BaseException:
            worker.kill()
            raise
        _idle.append(worker)
    kind, value = reply
    if kind != "value":
        raise IsolatedError(str(value))
    return value


class _Worker:
    """The process, seen from here."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-s", "-B", "-W", "ignore", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PYTHONHASHSEED": "0"},
            start_new_session=True,  # Ctrl-C is for the training process
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._replies = self._process.stdin.fileno(), self._process.stdout.fileno()
        self._begun = b""
        self._send({"path": [entry for entry in sys.path if entry]})

    def ask(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float, memory: int
    ) -> tuple[str, Any]:
        where = function.__code__.co_filename
        request = {"file": where, "name": function.__name__, "arguments": arguments}
        self._send({**request, "timeout": timeout, "memory": memory})
        self._receive(_LOADING_SECONDS)
        return self._receive(30 * timeout)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]

    def _send(self, request: dict[str, Any]) -> None:
        left = json.dumps(request).encode() + b"\n"
        with suppress(BrokenPipeError):  # a dead process is noticed by its silence
            while left:
                left = left[os.write(self._requests, left) :]

    def _receive(self, seconds: float) -> tuple[str, Any]:
        deadline = time.monotonic() + seconds
        while b"\n" not in self._begun:
            ready, _, _ = select.select([self._replies], [], [], max(deadline - time.monotonic(), 0.0))
            if not ready:
                raise TimeoutError(f"no answer within {seconds:g} s")
            part = os.read(self._replies, 1 << 16)
            self._begun += part
            if not part or len(self._begun) > _LONGEST_REPLY:
                raise self._death()
        line, _, self._begun = self._begun.partition(b"\n")
        kind, value = json.loads(line)
        return kind, value

    def _death(self) -> Exception:
        self._process.kill()
        code = self._process.wait()
        if code == -signal.SIGPROF:
            return TimeoutError("it used up its CPU time")
        return IsolatedError(f"the process died (exit code {code})")


_idle: deque[_Worker] = deque()
_slots = threading.BoundedSemaphore(_MOST_WORKERS)


def _forget() -> None:
    """In a forked process: the workers are the parent's."""
    global _slots
    _idle.clear()
    _slots = threading.BoundedSemaphore(_MOST_WORKERS)


os.register_at_fork(after_in_child=_forget)


# ------------------------------------------------------------------------------------------------- the other process


def _serve() -> None:
    """Answer requests until nobody asks any more."""
    replies = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a library prints is no reply
    functions: dict[tuple[str, str], Callable[..., Any]] = {}

    def reply(kind: str, value: Any) -> None:
        left = json.dumps([kind, value]).encode() + b"\n"
        while left:
            left = left[os.write(replies, left) :]

    sys.path[:] = json.loads(sys.stdin.readline() or '{"path": []}')["path"]
    for line in sys.stdin:
        request = json.loads(line)
        key = request["file"], request["name"]
        try:
            if key not in functions:
                functions[key] = _load(*key)
        except BaseException as error:
            reply("loaded", None)
            reply("error", _described(error))
            continue
        _limit(request["memory"])
        reply("loaded", None)
        # Without a handler in Python the kernel ends the process, whatever it is doing.
        signal.setitimer(signal.ITIMER_PROF, request["timeout"])
        try:
            answer = "value", functions[key](*request["arguments"])
            json.dumps(answer)
        except BaseException as error:
            answer = "error", _described(error)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        reply(*answer)


def _load(file: str, name: str) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location(f"isolated_{abs(hash(file))}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    function: Callable[..., Any] = getattr(module, name)
    return function


def _limit(memory: int) -> None:
    import resource

    for kind, most in ((resource.RLIMIT_AS, memory << 20), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        with suppress(ValueError, OSError):  # some systems do not know one of them
            resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))


def _described(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


if __name__ == "__main__":
    _serve()
