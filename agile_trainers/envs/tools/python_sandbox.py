"""Runs Python that a model wrote in an isolated process that can neither read a file nor reach the network."""

from __future__ import annotations

from agile_trainers.envs.isolation import levels as isolation

MODULES = (
    "bisect", "cmath", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools",
    "heapq", "itertools", "json", "math", "numbers", "operator", "random", "re", "statistics", "string", "textwrap",
    "time", "traceback", "typing",
)  # fmt: skip
"""What the code may import. They are loaded beforehand: once it runs, nothing more can be."""

# Runs first in the child, which is isolated by then. The hook cannot be taken out again, and looks nothing up that the code
# could have replaced: its constants are part of its compiled body, which no event lets through to be changed. What Python
# does not announce to a hook is cut off beforehand: the system calls of `posix`, and the making of builtin modules
# (`_posixsubprocess` starts processes). What the allowed modules import lazily is imported early.
_PROLOGUE = """
import _imp, _strptime, builtins, linecache, os, posix, resource, sys, tokenize
import MODULES
builtins.exit = builtins.quit = sys.exit
linecache.checkcache = linecache.updatecache = lambda *arguments: []
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
_imp.create_builtin = None
for module in (os, posix):
    for name in set(vars(module)) - {"fspath", "path", "PathLike", "urandom"}:
        if not name.startswith("__"):
            delattr(module, name)
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
    print(type(error).__name__ + (f" in line {line}" if line else "") + f": {error}")
def run(code, explain=explain):
    def guard(event, arguments):
        if event == "object.__setattr__" and arguments[1] != "__code__":
            return
        if event not in {"exec", "compile", "builtins.id", "object.__getattr__", "sys._getframe", "sys.excepthook"}:
            raise PermissionError("the sandbox allows no files, network, processes or further modules (" + event + ")")
    linecache.cache["<code>"] = len(code), None, code.splitlines(True), "<code>"
    sys.addaudithook(guard)
    try:
        exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
    except BaseException as error:
        explain(error)
    sys.stdout.flush()
""".replace("MODULES", ", ".join(MODULES))


def python(code: str) -> str:
    """Run Python code and return what it printed. There are no files and no network.

    Args:
        code: The program. It may import modules of the standard library for mathematics, text and dates.
    """
    return run_python(code)


def run_python(code: str, *, timeout: float = 5.0, memory: int = 256, max_output: int = 10_000) -> str:
    """Run Python code and return what it printed.

    The kernel isolates the process as well as this machine can (see :mod:`~agile_trainers.envs.isolation.levels`), without
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
    ran = isolation.run_program(code, timeout=timeout, memory=memory, max_output=max_output, prologue=_PROLOGUE)
    text = ran.printed.strip()
    if ran.cut:
        return f"{text}\n[output cut at {max_output} bytes]"
    if ran.timed_out:
        return f"{text}\nTimeoutError: stopped after {timeout:g} seconds".lstrip()
    if ran.status != 0:
        return f"{text}\nError: the interpreter died; the memory limit is {memory} MB".lstrip()
    return text or "(no output: print the result)"
