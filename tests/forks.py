"""Runs Python programs in forks of a process that has imported the libraries, which takes most of ten seconds.

``run`` takes the arguments of ``python`` and returns what ``subprocess.run`` does; ``run_ranks`` runs a program in several
processes, as ``torchrun`` does. The process is started at the first call, and ends with the tests. A fork has its own
environment variables, folder and output. Libraries read some variables when they are imported, which was before; those of
the Hub are read again.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import importlib.metadata
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from filelock import FileLock

LIBRARIES = (
    "torch.distributed", "datasets", "transformers.trainer", "peft", "accelerate", "trl.trainer.grpo_trainer",
    "matplotlib.backends.backend_agg", "matplotlib.figure", "agile_trainers.trainers.algorithms",
    "agile_trainers.evaluation.policy", "transformers.models.qwen3.modeling_qwen3",
    *(["deepspeed"] if find_spec("deepspeed") else []),  # Accelerate imports it where a model is unwrapped
)  # fmt: skip

ADDRESS = Path(os.environ.get("TESTS_FORKS") or f"{tempfile.gettempdir()}/forks-{os.getpid()}")
"""One for all workers of a test run."""

Done = subprocess.CompletedProcess[str]


class Forks:
    """A process whose forks run programs. The workers of a test run share it: its imports are made once.

    Args:
        address: Where it listens; who comes first starts it.
    """

    def __init__(self, address: Path) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        with FileLock(f"{address}.lock"):
            try:
                self._connect(address)
                return
            except OSError:  # nobody listens
                address.unlink(missing_ok=True)
            self._process = subprocess.Popen([sys.executable, __file__, address, *LIBRARIES], stdin=subprocess.PIPE)
            while not address.exists():
                if self._process.poll() is not None:
                    raise RuntimeError("The process that runs programs in forks has ended; its errors are above.")
                time.sleep(0.01)
            self._connect(address)

    def _connect(self, address: Path) -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(address))
            self._answers, self._questions = connection.makefile("r"), connection.makefile("w")

    def end(self) -> None:
        """Let it go; who has started it ends it. Others that it serves are served on."""
        self._questions.close()
        self._answers.close()
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()

    def run_all(self, programs: Sequence[dict[str, Any]], timeout: float) -> list[Done]:
        """Run programs at the same time. When one fails, the others get SIGTERM, and SIGKILL 30 seconds later.

        Args:
            programs: ``arguments`` of Python; ``env`` and ``cwd`` as for ``subprocess.run``.
            timeout: Seconds after which all are killed.

        Raises:
            subprocess.TimeoutExpired: After ``timeout``, with the output of the first program.
        """
        with tempfile.TemporaryDirectory() as folder:
            asked = [
                {
                    "arguments": list(map(str, one["arguments"])),
                    "env": dict(one.get("env") or os.environ),
                    "folder": str(one.get("cwd") or Path.cwd()),
                    "output": f"{folder}/{index}.out",
                    "errors": f"{folder}/{index}.err",
                }
                for index, one in enumerate(programs)
            ]
            print(json.dumps({"programs": asked, "timeout": timeout}), file=self._questions, flush=True)
            codes = json.loads(self._answers.readline() or "[]")
            if codes == []:
                raise RuntimeError("The process that runs programs in forks has ended; its errors are above.")
            done = [
                Done(
                    one["arguments"],
                    code,
                    *(Path(one[name]).read_text(encoding="utf-8", errors="replace") for name in ("output", "errors")),
                )
                for one, code in zip(asked, codes or [-1] * len(asked), strict=True)
            ]
        if codes is None:
            raise subprocess.TimeoutExpired(done[0].args, timeout, done[0].stdout, done[0].stderr)
        return done


@functools.cache
def _forks() -> Forks:
    forks = Forks(ADDRESS)
    atexit.register(forks.end)
    return forks


def run(arguments: Sequence[object], *, timeout: float = 600, **options: Any) -> Done:
    """Run ``python ARGUMENTS``; see :meth:`Forks.run_all`."""
    (done,) = _forks().run_all([{"arguments": arguments, **options}], timeout)
    return done


def run_ranks(processes: int, arguments: Sequence[object], *, timeout: float = 600) -> list[Done]:
    """Run ``torchrun --standalone --nproc_per_node=PROCESSES ARGUMENTS``; the results in the order of the ranks."""
    from torch.distributed import TCPStore

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    shared = {
        "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "GROUP_RANK": 0, "MASTER_ADDR": "localhost",
        "MASTER_PORT": store.port, "TORCHELASTIC_RUN_ID": "forks", "TORCHELASTIC_USE_AGENT_STORE": True,
    }  # fmt: skip
    ranks = [{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in range(processes)]
    environments = [{**os.environ, **{name: str(value) for name, value in rank.items()}} for rank in ranks]
    return _forks().run_all([{"arguments": arguments, "env": env} for env in environments], timeout)


def _serve(address: str, libraries: Sequence[str]) -> None:
    """Fork for each connection, until the input ends. In a fork of a fork, run a program and return."""
    importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)  # as in conftest.py
    with importlib.import_module("agile_trainers.imports").matplotlib_apart():
        for name in libraries:
            importlib.import_module(name)
    importlib.import_module("quick").make_quick()
    gc.collect()
    gc.freeze()  # collections in the forks would copy all pages
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{address}.new")
        listener.listen()
        os.rename(f"{address}.new", address)  # it is there when it can be connected to
        while listener in select.select([listener, sys.stdin], [], [])[0]:
            connection = listener.accept()[0]
            if os.fork() == 0:
                listener.close()
                if program := _asked(connection):
                    _become(**program)
                return
            connection.close()
        for name in (address, f"{address}.lock"):
            os.unlink(name)


def _asked(connection: socket.socket) -> dict[str, Any] | None:
    """Answer each line. In a fork, return its program; else None when nobody asks any more."""
    with connection, connection.makefile("rw") as lines:
        while line := lines.readline():
            asked = json.loads(line)
            running: dict[int, int] = {}
            for index, program in enumerate(asked["programs"]):
                child = os.fork()
                if child == 0:
                    return dict(program)
                running[child] = index
            codes = _codes(running, time.monotonic() + asked["timeout"], connection)
            print(json.dumps(codes), file=lines, flush=True)
    return None


def _codes(running: dict[int, int], deadline: float, asker: socket.socket) -> list[int] | None:
    """Wait for all processes; each leads a session. None after the deadline, or when nobody waits for the answer."""
    codes = [0] * len(running)
    end = signal.SIGTERM
    while running:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            codes[running.pop(child)] = code = os.waitstatus_to_exitcode(status)
            _leave(child, 0.0 if code else 5.0)
            if code and running and end is signal.SIGTERM:
                for other in running:
                    _kill(other, end)
                end, deadline = signal.SIGKILL, min(deadline, time.monotonic() + 30)
        elif time.monotonic() > deadline or select.select([asker], [], [], 0.01)[0]:
            for other in running:
                _kill(other, signal.SIGKILL)
                os.waitpid(other, 0)
            return None
    return codes


def _leave(session: int, seconds: float) -> None:
    """Kill what a process has left, after as long as Python's tracker takes to remove shared memory; it ends by itself."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            os.killpg(session, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    _kill(session, signal.SIGKILL)


def _kill(session: int, how: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(session, how)


def _become(arguments: list[str], env: dict[str, str], folder: str, output: str, errors: str) -> None:
    """Do what ``python ARGUMENTS`` does."""
    os.setsid()
    opened = [os.open(os.devnull, os.O_RDONLY), *(os.open(name, os.O_WRONLY | os.O_CREAT) for name in (output, errors))]
    for descriptor, standard in zip(opened, (0, 1, 2)):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    tempfile.tempdir = None  # read again from the environment
    if constants := sys.modules.get("huggingface_hub.constants"):
        importlib.reload(constants)
        sys.modules["huggingface_hub.hf_api"].api.endpoint = constants.ENDPOINT
    sys.path[1:1] = [name for name in env.get("PYTHONPATH", "").split(os.pathsep) if name]
    match arguments:
        case ["-c", program, *rest]:
            sys.argv, sys.path[0] = ["-c", *rest], ""
            main = sys.modules["__main__"] = ModuleType("__main__")
            exec(compile(program, "<string>", "exec"), vars(main))
        case ["-m", module, *rest]:
            sys.argv, sys.path[0] = [module, *rest], folder
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case [script, *rest]:
            sys.argv, sys.path[0] = [script, *rest], str(Path(script).resolve().parent)
            runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2:])
