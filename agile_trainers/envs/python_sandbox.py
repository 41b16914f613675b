"""Runs Python that a model wrote in an isolated process that can neither read a file nor reach the network."""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import tempfile
import time

from . import isolation

MODULES = (
    "bisect", "cmath", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools",
    "heapq", "itertools", "json", "math", "numbers", "operator", "random", "re", "statistics", "string", "textwrap",
    "time", "traceback", "typing",
)  # fmt: skip
"""What the code may import. They are loaded beforehand: once it runs, nothing more can be."""

_STARTING_SECONDS = 60.0

# Runs first in the child, which is isolated by then. The hook cannot be taken out again, and looks nothing up that the code
# could have replaced: its constants are part of its compiled body, which no event lets through to be changed. What Python
# does not announce to a hook is cut off beforehand: the system calls of `posix`, and the making of builtin modules
# (`_posixsubprocess` starts processes). What the allowed modules import lazily is imported early.
_CHILD = """
import _imp, _strptime, builtins, linecache, os, posix, resource, sys, tokenize
import {modules}
builtins.exit = builtins.quit = sys.exit
linecache.checkcache = linecache.updatecache = lambda *arguments: []
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
_imp.create_builtin = None
for module in (os, posix):
    for name in set(vars(module)) - {{"fspath", "path", "PathLike", "urandom"}}:
        if not name.startswith("__"):
            delattr(module, name)
def run(code, explain):
    def guard(event, arguments):
        if event == "object.__setattr__" and arguments[1] != "__code__":
            return
        if event not in {{"exec", "compile", "builtins.id", "object.__getattr__", "sys._getframe", "sys.excepthook"}}:
            raise PermissionError("the sandbox allows no files, network, processes or further modules (" + event + ")")
    linecache.cache["<code>"] = len(code), None, code.splitlines(True), "<code>"
    sys.addaudithook(guard)
    try:
        exec(compile(code, "<code>", "exec"), {{"__name__": "__main__"}})
    except BaseException as error:
        explain(error)
    sys.stdout.flush()
def explain(error):
    if isinstance(error, SystemExit):
        if isinstance(error.code, str):
            print(error.code)
        return
    trace, line = error.__traceback__, getattr(error, "lineno", None)
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<code>":
            line = trace.tb_lineno
        trace = trace.tb_next
    print(type(error).__name__ + (f" in line {{line}}" if line else "") + f": {{error}}")
code = sys.stdin.read()
print(end="\\0", flush=True)
run(code, explain)
"""


def python(code: str) -> str:
    """Run Python code and return what it printed. There are no files and no network.

    Args:
        code: The program. It may import modules of the standard library for mathematics, text and dates.
    """
    return run_python(code)


def run_python(code: str, *, timeout: float = 5.0, memory: int = 256, max_output: int = 10_000) -> str:
    """Run Python code and return what it printed.

    The kernel isolates the process as well as this machine can (see :mod:`~agile_trainers.envs.isolation`), without
    environment variables or installed packages, and limits its memory and CPU time. Inside, a hook of the interpreter
    refuses every file, socket and process, and every module beyond ``MODULES``. Linux only.

    Args:
        code: The program.
        timeout: Seconds of wall time, once the interpreter has started.
        memory: Megabytes of address space; the interpreter itself takes about 30.
        max_output: Bytes of output; a program that prints more is ended.

    Returns:
        Standard output, followed by the error, with its line, that ended the program, or by the limit that did. A note if
        there is neither.

    Raises:
        ValueError: If a limit is not positive.
        IsolationError: If this machine isolates it from neither files nor network, and nobody has allowed that.
    """
    if min(timeout, memory, max_output) <= 0:
        raise ValueError(f"limits must be positive, got {timeout=}, {memory=}, {max_output=}.")
    isolation.require("The Python sandbox")
    limits = {
        "RLIMIT_AS": memory * 2**20,
        "RLIMIT_CPU": math.ceil(timeout) + 1,
        "RLIMIT_FSIZE": 0,
        "RLIMIT_CORE": 0,
    }
    child = _CHILD.format(modules=", ".join(MODULES))
    with tempfile.TemporaryFile() as program:
        program.write(code.encode("utf-8", "replace"))
        program.seek(0)
        process = subprocess.Popen(
            isolation.command(["-u", "-X", "utf8", "-c", child], limits=limits),
            stdin=program,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={},
            start_new_session=True,
        )
    assert process.stdout is not None
    with process.stdout as output:
        try:
            started = _read(output.fileno(), 1, _STARTING_SECONDS)[0]
            printed, ended = _read(output.fileno(), max_output + 1, timeout) if started else (b"", True)
            if ended:
                process.wait(_STARTING_SECONDS)
        finally:
            process.kill()
            process.wait()
    text = printed[:max_output].decode("utf-8", "replace").strip()
    if len(printed) > max_output:
        return f"{text}\n[output cut at {max_output} bytes]"
    # bubblewrap and the launcher report a signal as shells do.
    code_or_signal = process.returncode if process.returncode < 128 else 128 - process.returncode
    if not ended or code_or_signal in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"{text}\nTimeoutError: stopped after {timeout:g} seconds".lstrip()
    if code_or_signal != 0:
        return f"{text}\nError: the interpreter died; the memory limit is {memory} MB".lstrip()
    return text or "(no output: print the result)"


def _read(descriptor: int, size: int, seconds: float) -> tuple[bytes, bool]:
    """At most so many bytes, and whether that was all there will be; whatever has come when the time is over."""
    deadline, found = time.monotonic() + seconds, b""
    while len(found) < size:
        ready, _, _ = select.select([descriptor], [], [], max(deadline - time.monotonic(), 0.0))
        if not ready:
            return found, False
        part = os.read(descriptor, min(size - len(found), 1 << 16))
        if not part:
            return found, True
        found += part
    return found, False
