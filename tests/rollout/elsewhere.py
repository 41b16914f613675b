"""Environments that are played in processes of their own: a module that is quick to import there."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


class Elsewhere:
    """Two turns; what the step does is in the options."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.what, self.turns = (options or {}).get("what"), 0
        self.hangs = (options or {}).get("hangs")
        return "go", {"process": os.getpid(), "seed": seed}

    def step(self, action: str) -> Any:
        self.turns += 1
        if self.what == "raise":
            raise KeyError("a bug")
        if self.what == "die":
            os._exit(7)
        if self.what == "hang_up_its_group":
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and so would this process
            os.killpg(0, signal.SIGHUP)
        if self.what == "hang":
            if self.hangs:
                Path(self.hangs).touch()
            time.sleep(600)
        while self.hangs and not os.path.exists(self.hangs):  # the other one
            time.sleep(0.01)
        if self.what == "unsendable":
            return "up", 0.0, False, False, {"function": lambda: None}
        return "up", float(self.turns), self.turns == 2, False, {"process": os.getpid()}


class AsyncElsewhere(Elsewhere):
    """The same, awaited over there."""

    async def step(self, action: str) -> Any:  # type: ignore[override]
        return super().step(action)


class Toy:
    """No ``options``, and a name of its own for the action."""

    def reset(self, seed: int | None = None) -> Any:
        return "go", {"seed": seed}

    def step(self, text: str) -> Any:
        return "up", float(len(text) > 0), True, False, {"process": os.getpid()}


class Unread(Toy):
    """Nothing reads its outputs any more; it prints to one, and starts a program that prints to the other."""

    def reset(self, seed: int | None = None) -> Any:
        reader, writer = os.pipe()
        os.close(reader)
        for number in (1, 2):
            os.dup2(writer, number)
        print("reset", flush=True)
        return super().reset(seed)

    def step(self, text: str) -> Any:
        subprocess.run([sys.executable, "-Sc", "import os; os.write(2, b'step')"], check=True)
        return super().step(text)


class AsyncToy(Toy):
    """The same, awaited."""

    async def reset(self, seed: int | None = None) -> Any:  # type: ignore[override]
        return super().reset(seed)

    async def step(self, text: str) -> Any:  # type: ignore[override]
        return super().step(text)


class Scored(Elsewhere):
    """Never over by itself; its end is worth ten times its turns, less for a full context."""

    def step(self, action: str) -> Any:
        observation, reward, *_ = super().step(action)
        return observation, reward, False, False, {}

    def end(self, reason: str) -> float:
        if self.what == "raise at the end":
            raise KeyError("a bug")
        return {"max_turns": 10.0, "context_full": 5.0}[reason] * self.turns


class AsyncScored(Scored):
    """The same, awaited."""

    async def end(self, reason: str) -> float:  # type: ignore[override]
        return super().end(reason)


class Forgetful(Elsewhere):
    """Shows the first message and the last one only."""

    def context(self, messages: Any) -> Any:
        return [*messages.prompt, *messages[-1:]] if len(messages) > 1 else messages


class Colour(Elsewhere):
    """Has another attribute of that name."""

    context = "blue"


class Unready(Elsewhere):
    """Has a property of that name, which raises."""

    @property
    def context(self) -> Any:
        raise KeyError("not yet")


class Other(Elsewhere):
    """Has a method of that name, for something else."""

    def context(self) -> str:
        return "blue"


class Broken(Elsewhere):
    """Cannot rewrite its first messages."""

    def context(self, messages: Any) -> Any:
        return messages[5]


class Wrong(Elsewhere):
    """Shows text."""

    def context(self, messages: Any) -> Any:
        return messages[0]["content"]


class Leaving(Elsewhere):
    """Starts processes of every kind, which go on for ever, and tells their ids; else as above."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        observation, info = super().reset(seed, options)
        if not hasattr(self, "left"):
            self.left = leave_processes()
            self.temporary = tempfile.TemporaryDirectory()
            if self.what in ("exit slowly", "never exit"):  # a process that is killed meanwhile leaves the folder
                atexit.register(self.temporary.cleanup)
                atexit.register(time.sleep, 0.3 if self.what == "exit slowly" else 600)
        return observation, {**info, "left": self.left, "temporary": self.temporary.name}


def leave_processes() -> dict[str, int]:
    """Start a process of every kind; kind to id."""
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    left = {
        "child": subprocess.Popen(["sleep", "1000"], **quiet).pid,
        "child in a session of its own": subprocess.Popen(["sleep", "1000"], start_new_session=True, **quiet).pid,
    }
    for kind, command in (
        ("child of a shell that waits", "sleep 1000 & echo $!; wait"),
        ("orphan", "sleep 1000 & echo $!"),
        ("orphan in a session of its own", "setsid sleep 1000 & echo $!"),
        ("orphan that ignores signals", "trap '' TERM HUP INT QUIT; nohup setsid sleep 1000 & echo $!"),
    ):
        shell = subprocess.Popen(["sh", "-c", command], **{**quiet, "stdout": subprocess.PIPE}, text=True)
        assert shell.stdout is not None
        left[kind] = int(shell.stdout.readline())
    left["daemon"] = daemon()
    return left


def daemon() -> int:
    """Fork twice, with a session of its own between; the connection to the training process stays open in it."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if (child := os.fork()) != 0:
            os.write(writing, str(child).encode())
            os._exit(0)
        while True:
            signal.pause()
    os.wait()
    told = int(os.read(reading, 99))
    os.close(reading)
    os.close(writing)
    return told
