"""Runs Python code of a model in an isolated process without access to files and network."""

from __future__ import annotations

from agile_trainers.envs.isolation import levels as isolation

MODULES = (
    "bisect", "cmath", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools",
    "heapq", "itertools", "json", "math", "numbers", "operator", "random", "re", "statistics", "string", "textwrap",
    "time", "traceback", "typing",
)  # fmt: skip
"""Modules that the code may import. They are loaded before it runs, since nothing can be loaded afterwards."""

# Runs first in the child, which is already isolated. The hook cannot be removed, and it looks up nothing that the code could
# have replaced: its constants are part of its compiled body, and the hook blocks every event that could change that.
# Operations that raise no audit event are removed before: the system calls of `posix`, and the creation of builtin modules
# (`_posixsubprocess` starts processes). Lazy imports of the allowed modules are done early.
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
        if event not in {"exec", "compile", "builtins.id", "object.__getattr__", "sys._getframe", "sys._getframemodulename",
                         "sys.excepthook", "time.sleep", "function.__new__"}:
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

    The kernel isolates the process at the best level of this machine (see :mod:`~agile_trainers.envs.isolation.levels`),
    without environment variables or installed packages, and limits its memory and CPU time. In the process, an audit hook
    of the interpreter rejects every file, socket and process, and every module outside ``MODULES``. Linux only.

    Args:
        code: The program.
        timeout: Seconds of wall time, once the interpreter has started.
        memory: Megabytes of address space; the interpreter itself takes about 30.
        max_output: Bytes of output; a program that prints more is ended.

    Returns:
        Standard output, followed by the error (with its line), the limit that ended the program, or the signal or exit code
        with which the interpreter died. A note if there is no output.

    Raises:
        IsolationError: If this machine has no isolation and running without it is not allowed.
    """
    isolation.require("The Python sandbox")
    ran = isolation.run_program(code, timeout=timeout, memory=memory, max_output=max_output, prologue=_PROLOGUE)
    text = ran.printed.strip()
    if ran.cut:
        return f"{text}\n[output cut at {max_output} bytes]"
    if ran.timed_out:
        return f"{text}\nTimeoutError: stopped after {timeout:g} seconds".lstrip()
    if ran.status != 0:
        return f"{text}\nError: the interpreter died ({ran.death}; the memory limit is {memory} MB)".lstrip()
    return text or "(no output: print the result)"
