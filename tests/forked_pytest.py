"""Run pytest in forks of a process that has imported the libraries, whose import takes longer than most tests.

The process reads a JSON object from each line of its input: ``folder`` is the project to test, ``tests`` are arguments of
pytest, and ``output`` is a file. It answers with a line: pytest's exit code. It never imports the project: each fork imports
it from its folder, as it is then. ``Pytest`` starts such a process and asks it.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

LIBRARIES = (
    "torch", "pyarrow.parquet", "pandas", "scipy.stats", "datasets", "transformers.trainer", "peft", "accelerate",
    "trl.trainer.grpo_trainer", "trl.rewards", "rich.console", "tenacity", "jsonschema", "pytest",
)  # fmt: skip

DATASETS = "HF_DATASETS_CACHE"
"""Read when `datasets` is imported, so it is one folder for all runs: it is emptied after each."""


class Pytest:
    """Runs pytest one time after another, each up to its first failure.

    Args:
        folder: For output and caches.
        libraries: Modules to import before the first run.
    """

    def __init__(self, folder: Path, libraries: Sequence[str] = LIBRARIES) -> None:
        self._output = folder / "output"
        caches = {DATASETS: str(folder / "datasets")}
        settings = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, *libraries],
            env={**os.environ, **settings, **offline, **caches},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Pytest:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def passes(self, project: Path, tests: str) -> bool:
        """Run tests on a project.

        Raises:
            RuntimeError: If pytest could not run them, or they would run other code than the project's.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        asked = {"folder": str(project), "tests": shlex.split(tests), "output": str(self._output)}
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline().strip()
        if answer not in ("0", "1"):
            output = self._output.read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"pytest {tests} ended with exit code {answer}:\n{output[-4000:]}")
        return answer == "0"


def run(folder: str, tests: list[str], output: str) -> int:
    """Run pytest in this process; return its exit code, or 3 if it would read the package of another folder."""
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor, replaced in ((os.open(os.devnull, os.O_RDONLY), 0), (written, 1), (written, 2)):
        os.dup2(descriptor, replaced)
    os.chdir(folder)
    os.environ["PYTHONPATH"] = folder  # of what tests start
    sys.path[0] = folder
    package = importlib.util.find_spec("agile_trainers")
    if package is None or not str(package.origin).startswith(folder + os.sep):
        print(f"The tests would read {package and package.origin} instead of the package in {folder}.")
        return 3
    import pytest

    return int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests]))


def serve(libraries: Sequence[str]) -> int | None:
    """Fork for each line of the input. Returns in the forks with an exit code, and at the end of the input with None."""
    for name in libraries:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # collections in the forks would copy all pages
    while line := sys.stdin.readline():
        child = os.fork()
        if child == 0:
            return run(**json.loads(line))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        shutil.rmtree(os.environ[DATASETS], ignore_errors=True)
        print(code, flush=True)
    return None


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:]))
