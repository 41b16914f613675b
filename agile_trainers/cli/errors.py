"""Reports a user's mistake as one message with exit code 2; other errors keep their traceback.

The module has no slow imports, so that ``--help`` is quick.
"""

from __future__ import annotations

import _thread
import argparse
import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from agile_trainers.imports import is_unread, outliving_readers

_ENDING: dict[int, str] = {signal.SIGTERM: "terminated (SIGTERM)", signal.SIGHUP: "hung up (SIGHUP)"}
"""Signals that end a command as Ctrl-C does, with what is said."""
_UNREAD = 128 + signal.SIGPIPE
_LONGEST = 4000
"""Characters of a message."""
MISTAKES = (ValueError, TypeError, OSError, ImportError)
"""Exception types that count as mistakes before training starts."""
_FULL = (
    "Free some space, or choose a path on another disk; a run then resumes from its last complete checkpoint with "
    "--resume_from_checkpoint auto, a chain or a population by the same command"
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
"""Error number of the operating system to advice."""


class Progress:
    """True while training runs, when every error keeps its traceback."""

    training = False
    debug = False
    """True if mistakes keep their traceback too."""


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP outside of training; whatever lets Ctrl-C through lets it through.

    Args:
        number: Of the signal.
    """

    def __init__(self, number: int):
        super().__init__()
        self.number = number


@contextmanager
def _signals_end_it() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the command as Ctrl-C does, and none of them be lost.

    Python runs a signal's handler where it is, and drops what it raises inside the callbacks of a garbage collection.
    """
    ours, dropped = os.getpid(), sys.unraisablehook

    def terminate(number: int, _: Any) -> None:
        if os.getpid() != ours:  # a fork, whose parent ends it
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        raise Terminated(number)

    def send_again(lost: Any) -> None:
        if lost.exc_type not in (KeyboardInterrupt, Terminated):
            return dropped(lost)
        number = lost.exc_value.number if lost.exc_type is Terminated else signal.SIGINT
        again = threading.Timer(0.05, _thread.interrupt_main, [number])
        again.daemon = True
        again.start()

    # torchrun ends its processes by SIGTERM, also those that wait in a collective, where no handler of Python runs. What
    # nohup starts ignores SIGHUP.
    alone = os.environ.get("WORLD_SIZE") in (None, "", "1") and threading.current_thread() is threading.main_thread()
    taken = [number for number in _ENDING if alone and signal.getsignal(number) == signal.SIG_DFL]
    for number in taken:
        signal.signal(number, terminate)
    sys.unraisablehook = send_again
    try:
        yield
    finally:
        sys.unraisablehook = dropped
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def guard(command: str, run: Callable[[], int | None], *, debug: bool) -> int:
    """Run a command, and report a user's mistake as one message on standard error.

    Args:
        command: Name of the command, for the message.
        run: The command.
        debug: Keep the traceback of a mistake too.

    Returns:
        The command's exit code, 2 after a mistake, 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP, 141 if nothing
        reads the output any more (``| head``).
        Code that exits while training runs never gives 0.

    Raises:
        Exception: Any error while training runs, and types other than ``MISTAKES``.
    """
    Progress.training, Progress.debug = False, debug
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # a closed one, as of some service managers (`>&-`)
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8", errors="backslashreplace"))  # noqa: SIM115
    with outliving_readers():
        return _guarded(command, run, debug)


def _guarded(command: str, run: Callable[[], int | None], debug: bool) -> int:
    try:
        with _signals_end_it():
            status = run() or 0
        sys.stdout.flush()
        return _UNREAD if is_unread() else status
    except KeyboardInterrupt as stop:
        number = stop.number if isinstance(stop, Terminated) else signal.SIGINT
        what = _ENDING.get(number, "interrupted")
        why = str(stop) or ("running the same again goes on" if command in ("chain", "evolve") else "")
        print(f"\nagile-trainers: {what}{f', {why}' if why else ''}", file=sys.stderr)
        return 128 + number
    except SystemExit as leaving:
        # --help or a wrong option; or a stop by a signal or without a reader, which `GracefulStop.pass_on` has told.
        if not Progress.training or leaving.code in (_UNREAD, *(128 + number for number in _ENDING)):
            raise
        place = traceback.extract_tb(leaving.__traceback__)[-1]
        print(
            wrapped(
                f"agile-trainers {command}: error: training was ended by SystemExit: {leaving.code} ({place.filename}, line "
                f"{place.lineno}). Code that a run calls must not exit: raise an error instead."
            ),
            file=sys.stderr,
        )
        return leaving.code if isinstance(leaving.code, int) and leaving.code else 1
    except Exception as error:
        code = _launched(error)
        if code is None and (debug or not is_mistake(error)):
            raise
        if code is None:
            print(wrapped(f"agile-trainers {command}: error: {message(error)}"), file=sys.stderr)
            print("(--debug shows where it was raised)", file=sys.stderr)
        return code or 2


@contextmanager
def mistakes_of_options(parser: argparse.ArgumentParser, *kinds: type[Exception]) -> Iterator[None]:
    """Report errors of some kinds as mistakes in the options, with the usage; with ``--debug`` they keep their traceback."""
    try:
        yield
    except kinds as error:
        if Progress.debug:
            raise
        parser.error(str(error))


def is_mistake(error: BaseException) -> bool:
    """Return whether an error is a user's mistake: one of ``MISTAKES`` before training, or a full disk at any time."""
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return is_full or (isinstance(error, MISTAKES) and not Progress.training)


def message(error: BaseException) -> str:
    """Return the text of an error, with advice for errors of the operating system or Python."""
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


def cut(text: str, size: int = 200) -> str:
    """Shorten a text that quotes a value; the end stays, where an error says how to fix it.

    Args:
        text: Any text.
        size: Characters from which it is shortened.
    """
    if len(text) <= size:
        return text
    return f"{text[: size // 2]} ... ({len(text) - size // 2 * 2:,} characters left out) ... {text[-(size // 2) :]}"


def printable(text: str) -> str:
    """Escape what would steer the terminal or cannot be encoded: controls, direction overrides, surrogates."""
    return "".join(one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode() for one in text)


def wrapped(text: str) -> str:
    """Shorten a message, and wrap it between words to the width of the terminal, if there is one."""
    text = printable(cut(text, _LONGEST))
    if not sys.stderr.isatty():
        return text
    width = max(40, shutil.get_terminal_size().columns - 1)
    lines = [textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) for line in text.splitlines()]
    return "\n".join(part for line in lines for part in line or [""])


def take_debug(arguments: Iterable[str]) -> tuple[bool, list[str]]:
    """Return whether the arguments contain ``--debug`` without a value, and the others. With one, it is the trainer's."""
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
    """Return the exit code of processes that accelerate started and that reported a mistake; None for other errors."""
    if isinstance(error, subprocess.CalledProcessError):
        return error.returncode if error.returncode == 2 else None
    failures = getattr(error, "failures", None)  # torch's ChildFailedError
    if isinstance(failures, dict) and failures and all(failure.exitcode == 2 for failure in failures.values()):
        return 2
    return None
