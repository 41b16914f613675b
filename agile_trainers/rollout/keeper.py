"""Ends everything that an environment has started when the environment's process ends, or when the training process does."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection, wait

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ENDING_SECONDS = 60.0
"""Seconds after which killed processes that the kernel does not end are left to it."""
_PAUSE = 0.005
_EXITING_SECONDS = 2.0
"""Seconds that a process whose trainer has ended has to exit by itself."""


def keep(connection: Connection) -> None:
    """Split this process into a keeper and its child, and return in the child alone.

    The keeper ends with the child, on SIGTERM, or soon after the training process has ended. Before, it kills every process
    below it. On Linux it is a subreaper: processes that left their parent or session stay below it. It exits with the
    child's exit code, or by the signal that ended the child.

    Args:
        connection: The child's connection to the training process, which the keeper closes.
    """
    own = os.getpid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # some systems drop the signal otherwise
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # no signal to the group ends the keeper
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != own:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    code: int | None = None
    try:
        connection.close()
        threading.Thread(target=_wait_for_trainer, daemon=True).start()
        while (code := _reap(child)) is None and signal.sigwait({signal.SIGCHLD, signal.SIGTERM}) != signal.SIGTERM:
            pass
        _kill_descendants()
    finally:
        _exit_like(-signal.SIGKILL if code is None else code)


def _exit_like(code: int) -> None:
    """End this process with an exit code; a negative one is minus the number of a signal."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _wait_for_trainer() -> None:
    trainer = multiprocessing.parent_process()
    assert trainer is not None
    wait([trainer.sentinel])
    time.sleep(_EXITING_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


def _reap(child: int) -> int | None:
    """Collect the processes that have ended. Return the exit code of ``child``; None if it runs."""
    code = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def _kill_descendants() -> None:
    """Kill all processes below this one, and those that they start meanwhile."""
    deadline = time.monotonic() + _ENDING_SECONDS
    refused: set[psutil.Process] = set()
    while (below := set(psutil.Process().children(recursive=True)) - refused) and time.monotonic() < deadline:
        for process in below:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
            except psutil.AccessDenied:  # another user's
                refused.add(process)
        _reap(0)
        time.sleep(_PAUSE)
