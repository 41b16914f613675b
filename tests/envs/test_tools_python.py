"""Python in a sandbox: what it can do, and the many things it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from agile_trainers.envs.isolation.levels import OPTION, IsolationError
from agile_trainers.envs.tools.environment import ToolEnvironment
from agile_trainers.envs.tools.python_sandbox import MODULES, python, run_python


def test_programs() -> None:
    assert python("print(6 * 7)") == "42"
    assert python("x = 1") == "(no output: print the result)"
    assert python("print('a')\n\n1 / 0") == "a\nZeroDivisionError in line 3: division by zero"
    assert python("def f(:") == "SyntaxError in line 1: invalid syntax (<code>, line 1)"
    assert python("import sys\nprint('é')\nsys.exit(3)\nprint('b')") == "é"


def test_every_module_that_is_allowed_can_be_imported() -> None:
    assert python(f"import {', '.join(MODULES)}\nprint(math.comb(5, 2), re.sub('a', 'b', 'aa'))") == "10 bb"
    classes = "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nprint(A(3))"
    assert python(classes) == "A(x=3)"
    assert python("from typing import NamedTuple\nclass P(NamedTuple):\n    x: int = 3\nprint(P())") == "P(x=3)"
    assert python("from collections import namedtuple as n\nprint(n('P', 'x y', defaults=[1])(2))") == "P(x=2, y=1)"
    assert python("import datetime\nprint(datetime.datetime.strptime('2024', '%Y').year)") == "2024"


@pytest.mark.parametrize(
    "code",
    [
        "print(open({path!r}).read())",
        "import io; print(io.FileIO({path!r}).read())",
        "import os; print(os.read(os.open({path!r}, 0), 9))",
        "import posix; print(posix.open({path!r}, 0))",
        "import pathlib; print(pathlib.Path({path!r}).read_text())",
        "import subprocess; print(subprocess.run(['cat', {path!r}], capture_output=True))",
        "import os; os.system('cat ' + {path!r})",
        "import ctypes; print(ctypes.CDLL(None))",
        "import sys; f = sys.modules['_frozen_importlib_external']; print(f.FileLoader('x', {path!r}).get_data({path!r}))",
        "import sys; sys.modules['_frozen_importlib'].BuiltinImporter.load_module('_posixsubprocess').fork_exec",
        "import builtins; builtins.PermissionError = print; print(open({path!r}).read())",
    ],
)
def test_no_file_can_be_read(code: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret")
    printed = python(code.format(path=str(secret)))
    assert "secret" not in printed.replace(str(secret), "") and "Error in line 1" in printed


def test_a_traceback_shows_the_program_and_no_other_file() -> None:
    code = "import json, traceback\ntry:\n    json.loads('x')\nexcept ValueError:\n    print(traceback.format_exc())"
    printed = python(code)
    assert 'File "<code>", line 3, in <module>\n    json.loads(' in printed and "JSONDecodeError" in printed
    assert "def " not in printed and python("import linecache; print(linecache.getlines('/etc/passwd'))") == "[]"


@pytest.mark.parametrize("leave", ["exit()", "quit()", "import sys; sys.exit(0)", "raise SystemExit"])
def test_a_program_may_leave(leave: str) -> None:
    assert python(f"print('a')\n{leave}\nprint('b')") == "a"
    assert python("exit('the reason')") == "the reason"


def test_the_guard_cannot_be_taken_out() -> None:
    """Even code that gets hold of the guarding function through a traceback changes nothing about it."""
    code = """
def free(event, arguments): pass
try:
    open("x")
except PermissionError as error:
    trace = error.__traceback__
    while trace.tb_next:
        trace = trace.tb_next
    guard = trace.tb_frame.f_back.f_back.f_locals["guard"]
    for name, value in {"__code__": free.__code__, "__defaults__": ("compile", ()), "__kwdefaults__": {}}.items():
        try:
            setattr(guard, name, value)
        except PermissionError:
            print(guard.__name__, name)
print(open("/etc/hostname").read())
"""
    lines = python(code).splitlines()
    assert lines[0] == "guard __code__"
    assert lines[1].startswith("PermissionError in line 15: the sandbox allows no files")


@pytest.mark.parametrize("code", ["open('x', 'w')", "import os; os.mkdir('x')", "import os; os.mknod('x')"])
def test_no_file_can_be_written(code: str) -> None:
    assert "Error in line 1" in python(code)


@pytest.mark.parametrize("module", ["socket", "_socket", "urllib.request", "http.client", "asyncio", "ssl"])
def test_the_network_is_out_of_reach(module: str) -> None:
    assert python(f"import {module}").startswith("PermissionError in line 1: the sandbox allows no files, network")


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.fork()",
        "import os; os.kill(os.getppid(), 9)",
        "import os; print(os.stat('/'))",
        "import numpy",
        "import sys; print(sys.modules['_frozen_importlib'].BuiltinImporter.load_module('gc'))",
    ],
)
def test_no_process_no_signal_no_further_module(code: str) -> None:
    assert "Error in line 1" in python(code)


def test_the_environment_of_the_training_process_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "tell nobody")
    assert "Error" in python("import os; print(os.environ)")
    assert "Error" in python("print(open('/proc/self/environ').read())")


@pytest.mark.parametrize(
    "code",
    ["while True: pass", "import time; time.sleep(60)", "print('a')\nwhile 1: pass", "print('a', end='')\nwhile 1: 1"],
)
def test_time_is_limited(code: str) -> None:
    for limit in (0.1, 0.5, 2, 8, 32):  # a busy machine may take long to start an interpreter
        printed = run_python(code, timeout=limit)
        assert printed.endswith(f"TimeoutError: stopped after {limit:g} seconds")
        if printed.startswith("a\n") == ("print" in code):
            return
    raise AssertionError("what was printed before is lost")


def test_memory_and_output_are_limited() -> None:
    assert run_python("x = 'a' * 10**9", memory=128).startswith("MemoryError in line 1")
    printed = run_python("while True: print('a' * 100)", max_output=1000)
    assert printed.endswith("\n[output cut at 1000 bytes]") and len(printed) < 1100


def test_a_death_of_the_interpreter_is_said_as_it_was() -> None:
    assert python("import sys; print(1); sys.stdout.close()") == (
        "1\nError: the interpreter died (exit code 1: ValueError: I/O operation on closed file.; the memory limit is 256 MB)"
    )


def test_as_a_tool() -> None:
    environment = ToolEnvironment([python], [{"question": "q", "answer": "a"}] * 9)
    environment.reset(options={"question": "q", "answer": "a"})
    call = '<tool_call>{"name": "python", "arguments": {"code": "print(2 ** 5)"}}</tool_call>'
    assert environment.step(call)[0] == "<tool_response>\n32\n</tool_response>"


@pytest.mark.usefixtures("nothing_isolates")
def test_where_nothing_isolates_the_tool_is_refused_before_training_and_a_wrapper_at_its_call() -> None:
    """The model is not told: nothing that it writes could help."""
    rows = [{"question": "q", "answer": "a"}] * 9
    with pytest.raises(IsolationError, match=rf"The tool python.*{OPTION}"):
        ToolEnvironment([python], rows)

    def calculate(code: str) -> str:
        """Run code.

        Args:
            code: The code.
        """
        return run_python(code)

    environment = ToolEnvironment([calculate], rows)
    environment.reset(seed=0)
    with pytest.raises(IsolationError):
        environment.step('<tool_call>{"name": "calculate", "arguments": {"code": "1"}}</tool_call>')
