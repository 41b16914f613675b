"""Ends everything that an environment has started when the environment's process ends, or when the training process does."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import tempfile
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection, wait

from agile_trainers.envs.isolation.process_tree import (
    adopt_descendants,
    die_with_parent,
    kill_descendants,
    reap,
    remove_abandoned,
)

_EXITING_SECONDS = 2.0
"""Seconds that a process whose trainer has ended has to exit by itself."""


def keep(connection: Connection) -> None:
    """Split this process into a keeper and its child, and return in the child alone.

    The keeper ends with the child, on SIGTERM, or soon after the training process has ended. Before, it kills every process
    below it, and then removes the folders of agents' programs among them. On Linux it is a subreaper: processes that left
    their parent or session stay below it. It exits with the child's exit code, or by the signal that ended the child.

    Args:
        connection: The child's connection to the training process, which the keeper closes.
    """
    own = os.getpid()
    adopt_descendants()
    signal.signal(signal.SIGCHLD, lambda *_: None)  # some systems drop the signal otherwise
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # no signal to the group ends the keeper
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        die_with_parent()
        if os.getppid() != own:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    code: int | None = None
    try:
        connection.close()
        threading.Thread(target=_wait_for_trainer, daemon=True).start()
        while (code := reap(child)) is None and signal.sigwait({signal.SIGCHLD, signal.SIGTERM}) != signal.SIGTERM:
            pass
        kill_descendants()
        remove_abandoned(tempfile.gettempdir(), child)
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


def _wait_for_trainer() -> None:
    trainer = multiprocessing.parent_process()
    assert trainer is not None
    wait([trainer.sentinel])
    time.sleep(_EXITING_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
