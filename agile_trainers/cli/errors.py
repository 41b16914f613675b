"""Tells a user's mistake from a crash: a mistake is one message and exit code 2, a crash keeps its traceback.

Imports nothing heavy, so that ``--help`` stays quick.
"""

from __future__ import annotations

import difflib
import errno
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable

MISTAKES = (ValueError, TypeError, OSError, ImportError)
"""Raised before training starts, these say that something that was given cannot be used."""
_FULL = (
    "Free some space, or choose a path on another disk; a run then goes on from its last whole checkpoint with "
    "--resume_from_checkpoint auto"
)
_WAYS_OUT = {
    errno.ENOENT: "Check the path",
    errno.EACCES: "Choose a path that you may write to, or change its permissions",
    errno.EPERM: "Choose a path that you may write to, or change its permissions",
    errno.EROFS: "Choose a path on a disk that can be written to",
    errno.ENOTDIR: "A part of this path is a file; choose a folder",
    errno.EEXIST: "A file has this name; choose another path, or remove it",
    errno.EISDIR: "It is a folder; name a file in it",
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
}
"""By the operating system's error number."""


class Progress:
    """Whether training runs, in which every error keeps its traceback."""

    training = False
    debug = False
    """Whether mistakes keep it too."""


def guard(command: str, run: Callable[[], int | None], *, debug: bool) -> int:
    """Run a command, and turn a user's mistake into one message on standard error.

    Args:
        command: Its name, for the message.
        run: The command.
        debug: Keep the traceback of a mistake too.

    Returns:
        The command's exit code, 2 after a mistake, 130 after Ctrl-C.

    Raises:
        Exception: What is no mistake of the user: any error while training runs, and types other than ``MISTAKES``.
    """
    Progress.training, Progress.debug = False, debug
    try:
        return run() or 0
    except KeyboardInterrupt as stop:
        print(f"\nagile-trainers: interrupted{f', {stop}' if str(stop) else ''}", file=sys.stderr)
        return 130
    except Exception as error:
        code = _launched(error)
        if code is None and (debug or not is_mistake(error)):
            raise
        if code is None:
            print(wrapped(f"agile-trainers {command}: error: {message(error)}"), file=sys.stderr)
            print("(--debug shows where it was raised)", file=sys.stderr)
        return code or 2


def is_mistake(error: BaseException) -> bool:
    """Whether an error says that something the user gave cannot be used.

    A full disk says so at any time.
    """
    return is_disk_full(error) or (isinstance(error, MISTAKES) and not Progress.training)


def is_disk_full(error: BaseException) -> bool:
    """Whether an error is the operating system's for a disk, or a quota, that is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def message(error: BaseException) -> str:
    """The text of an error, with the way out where the operating system or Python raised it."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"{_sentence(str(error))} Install the package that {error.name!r} belongs to, or correct the name."
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        where = f"{error.filename}: " if error.filename is not None else ""
        way_out = _WAYS_OUT.get(error.errno)
        return f"{where}{_sentence(error.strerror)}{f' {way_out}.' if way_out else ''}"
    text = str(error).strip()
    if isinstance(error, (TypeError, ImportError)) or not text:
        return f"{type(error).__name__}: {text}".rstrip(": ")
    return text


def wrapped(text: str) -> str:
    """The text, broken between words where a terminal would break it anywhere; as it is where there is no terminal."""
    if not sys.stderr.isatty():
        return text
    width = max(40, shutil.get_terminal_size().columns - 1)
    lines = [textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) for line in text.splitlines()]
    return "\n".join(part for line in lines for part in line or [""])


def nearest(name: object, names: Iterable[str], *, count: int = 3) -> str:
    """``; did you mean X?`` for a name that is not among those there are; empty where none is near."""
    found = difflib.get_close_matches(str(name), list(names), n=count, cutoff=0.6)
    return f"; did you mean {' or '.join(found)}?" if found else ""


def take_debug(arguments: Iterable[str]) -> tuple[bool, list[str]]:
    """Whether ``--debug`` is among the arguments, and the others. With a value it is the trainer's option of that name."""
    left, debug = list[str](), False
    rest = list(arguments)
    for argument, following in zip(rest, [*rest[1:], ""]):
        if argument == "--debug" and following not in ("underflow_overflow", "tpu_metrics_debug"):
            debug = True
        else:
            left.append(argument)
    return debug, left


def _sentence(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else f"{text}."


def _launched(error: BaseException) -> int | None:
    """The exit code of the processes that accelerate started, which have said themselves what is wrong; None for others."""
    if isinstance(error, subprocess.CalledProcessError):
        return error.returncode if error.returncode == 2 else None
    failures = getattr(error, "failures", None)  # torch's ChildFailedError
    if isinstance(failures, dict) and failures and all(failure.exitcode == 2 for failure in failures.values()):
        return 2
    return None
