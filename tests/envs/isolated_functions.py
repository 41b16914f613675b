"""What the other process is asked to do in test_grading.py."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from types import ModuleType
from typing import Any


def echo(value: Any) -> Any:
    print("what is printed is no reply")
    return value


_PROCESS = os.urandom(8).hex()


def process() -> str:
    """Tells one process from another, which a process id does not: each may have a namespace of its own."""
    return _PROCESS


def hash_randomization() -> int:
    return sys.flags.hash_randomization


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


def prepare() -> None:
    sys.modules.setdefault("cellpylib", ModuleType("cellpylib"))
    with suppress(ImportError):
        import reasoning_gym  # noqa: F401


def attack_scorer(name: str, entry: dict[str, Any], programs: list[str]) -> list[str]:
    """What each program brought as the answer to a question of reasoning-gym, with nothing to look at it beforehand."""
    import builtins

    import reasoning_gym

    data_set = reasoning_gym.create_dataset(name, seed=0, size=10)
    brought = []
    for program in programs:
        builtins.found = "it was not executed"  # type: ignore[attr-defined]
        lines = [
            "import builtins, os",
            f"try: builtins.found = str(({program}))",
            "except BaseException as e: builtins.found = repr(e)",
        ]
        answer = f"__import__('builtins').exec({chr(10).join(lines)!r}, {{}})"
        data_set.score_answer(answer=answer, entry=entry)
        brought.append(builtins.found)  # type: ignore[attr-defined]
    return brought
