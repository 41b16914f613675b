"""Python that a model wrote, in a process of its own that can neither read a file nor reach the network."""

from __future__ import annotations

import functools
import math
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

MODULES = (
    "bisect", "cmath", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools",
    "heapq", "itertools", "json", "math", "numbers", "operator", "random", "re", "statistics", "string", "textwrap",
    "time", "typing",
)  # fmt: skip
"""What the code may import. They are loaded beforehand: once it runs, nothing more can be."""

# Runs first in the child. The hook cannot be taken out again, and looks nothing up that the code could have replaced:
# its constants are part of its compiled body, which no event lets through to be changed. What Python does not announce
# to a hook is cut off beforehand: the system calls of `posix`, and the making of builtin modules (`_posixsubprocess`
# starts processes). What the allowed modules import lazily is imported early.
_CHILD = """
import _imp, _strptime, os, posix, resource, sys
import {modules}
for name, limit in {limits}:
    resource.setrlimit(getattr(resource, name), (limit, limit))
_imp.create_builtin = None
for module in (os, posix):
    for name in set(vars(module)) - {{"fspath", "path", "PathLike", "urandom"}}:
        if not name.startswith("__"):
            delattr(module, name)
def run(code, explain):
    def guard(event, arguments):
        if event == "object.__setattr__" and arguments[1] not in {{"__code__", "__defaults__", "__kwdefaults__"}}:
            return
        if event not in {{"exec", "compile", "builtins.id", "object.__getattr__", "sys._getframe", "sys.excepthook"}}:
            raise PermissionError("the sandbox allows no files, network, processes or further modules (" + event + ")")
    sys.addaudithook(guard)
    try:
        exec(compile(code, "<code>", "exec"), {{"__name__": "__main__"}})
    except BaseException as error:
        explain(error)
    sys.stdout.flush()
def explain(error):
    if isinstance(error, SystemExit):
        return
    trace, line = error.__traceback__, getattr(error, "lineno", None)
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<code>":
            line = trace.tb_lineno
        trace = trace.tb_next
    print(type(error).__name__ + (f" in line {{line}}" if line else "") + f": {{error}}")
run(sys.stdin.read(), explain)
"""


def python(code: str) -> str:
    """Run Python code and return what it printed. There are no files and no network.

    Args:
        code: The program. It may import modules of the standard library for mathematics, text and dates.
    """
    return run_python(code)


def run_python(code: str, *, timeout: float = 5.0, memory: int = 256, max_output: int = 10_000) -> str:
    """Run Python code and return what it printed.

    The process is an isolated interpreter (``-I -S``: no site packages, no environment variables) in an empty folder
    that is deleted afterwards. The kernel limits its memory, CPU time and output; it can open no file, whether to read
    or to write, no socket and no process, and import nothing beyond ``MODULES``. Where the system allows it
    (``unshare``), it has no network interface either.

    This holds off what models write, by accident or by reward hacking. It is no defence against somebody with an exploit
    of CPython itself: run training in a container if that matters. Linux only.

    Args:
        code: The program.
        timeout: Seconds of wall time.
        memory: Megabytes of address space; the interpreter itself takes about 30.
        max_output: Bytes of output; printing more is an error inside the program.

    Returns:
        Standard output, followed by the error, with its line, that ended the program. A note if there is neither.

    Raises:
        ValueError: If a limit is not positive.
    """
    if min(timeout, memory, max_output) <= 0:
        raise ValueError(f"limits must be positive, got {timeout=}, {memory=}, {max_output=}.")
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [
                *_without_network(),
                sys.executable,
                "-I",
                "-S",
                "-B",
                "-W",
                "ignore",
                "-c",
                _child(timeout, memory, max_output),
            ],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            process.communicate(code.encode("utf-8", "replace"), timeout=timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        text = output.read(max_output).decode("utf-8", "replace").strip()
        if output.tell() == max_output:
            return f"{text}\n[output cut at {max_output} bytes]"
    return _with_ending(text, process.returncode, timeout, memory)


def _with_ending(text: str, returncode: int, timeout: float, memory: int) -> str:
    """The output, and why the program did not come to its end."""
    if returncode in (-signal.SIGKILL, -signal.SIGXCPU):
        return f"{text}\nTimeoutError: stopped after {timeout:g} seconds".lstrip()
    if returncode != 0:
        return f"{text}\nError: the interpreter died; the memory limit is {memory} MB".lstrip()
    return text or "(no output: print the result)"


def _child(timeout: float, memory: int, max_output: int) -> str:
    limits = [
        ("RLIMIT_AS", memory * 2**20),
        ("RLIMIT_CPU", math.ceil(timeout)),
        ("RLIMIT_FSIZE", max_output),
        ("RLIMIT_NOFILE", 3),  # the three that are open
        ("RLIMIT_CORE", 0),
    ]
    return _CHILD.format(modules=", ".join(MODULES), limits=limits)


@functools.cache
def _without_network() -> list[str]:
    """The command that starts a process without network interfaces, empty where that is not allowed."""
    tool = shutil.which("unshare")
    for command in ([tool, "--net"], [tool, "--user", "--map-root-user", "--net"]):
        if tool and Path("/proc/self/ns/net").exists():
            probe = subprocess.run([*command, "true"], capture_output=True)  # type: ignore[list-item]
            if probe.returncode == 0:
                return command  # type: ignore[return-value]
    return []
