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
    """Answer requests until the input ends."""
    replies = os.dup(1)
    os.dup2(2, 1)  # keeps printed text of libraries out of the replies
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
        # Without a handler in Python, the kernel ends the process at any point.
        signal.setitimer(signal.ITIMER_PROF, request["timeout"])
        try:
            answer = "value", functions[key](*request["arguments"])
            json.dumps(answer)
        except MemoryError:
            answer = "memory", "MemoryError"
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
