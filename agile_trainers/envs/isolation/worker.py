"""Serves function calls in the isolated process; see ``calls.py``. Imports only the standard library."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def _serve() -> None:
    """Answer requests until the input ends.

    The replies to a request, in order: it is ``loaded``, the call is ``done``, and then, with the number of a second
    request that arrives after the call, its ``value`` or ``error``.
    """
    replies = os.dup(1)
    os.dup2(2, 1)  # keeps printed text of libraries out of the replies
    functions: dict[tuple[str, str], Callable[..., Any]] = {}

    def reply(number: str, kind: str, value: Any = None) -> None:
        left = json.dumps([number, kind, value]).encode() + b"\n"
        while left:
            left = left[os.write(replies, left) :]

    sys.path[:] = json.loads(sys.stdin.readline() or '{"path": []}')["path"]
    for line in sys.stdin:
        request = json.loads(line)
        key = request["file"], request["name"]
        answer: tuple[str, Any] | None = None
        try:
            if key not in functions:
                functions[key] = _load(*key)
        except BaseException as error:
            answer = "error", _described(error)
        _limit(request["memory"])
        reply(request["number"], "loaded")
        if answer is None:
            answer = _call(functions[key], request["arguments"], request["timeout"])
        reply(request["number"], "done")
        reply(json.loads(sys.stdin.readline())["number"], *answer)


def _call(function: Callable[..., Any], arguments: list[Any], timeout: float) -> tuple[str, Any]:
    # Without a handler in Python, the kernel ends the process at any point.
    signal.setitimer(signal.ITIMER_PROF, timeout)
    try:
        answer: tuple[str, Any] = "value", function(*arguments)
        json.dumps(answer)
    except MemoryError:
        answer = "memory", "MemoryError"
    except BaseException as error:
        answer = "error", _described(error)
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    return answer


def _load(file: str, name: str) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location(f"isolated_{abs(hash(file))}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    if hasattr(module, "prepare"):
        module.prepare()
    function: Callable[..., Any] = getattr(module, name)
    return function


def _limit(memory: int) -> None:
    with suppress(ValueError, OSError):  # not available on all systems
        resource.setrlimit(resource.RLIMIT_AS, (memory << 20, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _described(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


if __name__ == "__main__":
    _serve()
