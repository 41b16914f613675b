"""What the other process is asked to do in test_grading.py."""

from __future__ import annotations

import os
import sys
import time
from typing import Any


def echo(value: Any) -> Any:
    print("what is printed is no reply")
    return value


def process() -> int:
    return os.getpid()


def big_integer() -> int:
    """One operation that holds the interpreter's lock for hours."""
    return 9**9**9 % 10


def sleep() -> None:
    time.sleep(3600)


def much_memory() -> int:
    return len(bytearray(1 << 40))


def die() -> None:
    os._exit(3)


def exit_early() -> None:
    sys.exit(4)


def environment() -> dict[str, str]:
    return dict(os.environ)


def write(path: str) -> None:
    with open(path, "w") as file:
        file.write("text" * 1000)


def unsayable() -> object:
    return object()


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def raise_unprintable() -> None:
    raise Unprintable
