"""Calls functions in a process of another virtual environment, one at a time, so that two sides can alternate.

Only the standard library is imported here: both sides of a benchmark import this file. A call and its answer are a line of
JSON each. What the other side prints goes to a log file, whose end is part of the error when it dies.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

LOG_LINES = 30
"""Lines of the other side's log in an error."""


class OtherSideError(RuntimeError):
    """The other side raised, or died. Its message has the end of the traceback or of the log."""


class OtherSide:
    """A process that answers calls; use it as a context manager.

    Args:
        python: Interpreter of its virtual environment.
        script: A file that ends in :func:`serve`.
    """

    def __init__(self, python: Path, script: Path):
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115
        self._process = subprocess.Popen(
            [str(python), str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )

    def __enter__(self) -> OtherSide:
        return self

    def __exit__(self, *_: Any) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
        self._log.close()

    def __call__(self, name: str, **arguments: Any) -> Any:
        """Call a function there and wait for its result.

        Raises:
            OtherSideError: If it raised, or the process ended.
        """
        assert self._process.stdin and self._process.stdout
        line = ""
        try:
            self._process.stdin.write(json.dumps([name, arguments]) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            pass
        if not line:
            end = "".join(Path(self._log.name).read_text().splitlines(keepends=True)[-LOG_LINES:])
            raise OtherSideError(f"{name}: the process ended with code {self._process.wait()}. Its log ends:\n{end}")
        answer = json.loads(line)
        if "error" in answer:
            raise OtherSideError(f"{name}: {answer['error']}")
        return answer["result"]


def serve(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Answer calls from standard input until it ends. Everything else that is printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"result": functions[name](**arguments)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
