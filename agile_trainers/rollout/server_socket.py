"""Keeps multiprocessing's server of processes from signals to its owner's group; imported in the server alone.

It has a session of its own: torchrun sends SIGTERM to the whole group of a process, which then saves with its environments.
It also removes its socket if its owner was killed. Normally the owner does so, but the server ends last of all.
"""

from __future__ import annotations

import atexit
import os
from contextlib import suppress
from multiprocessing import forkserver


def _remove(server: int, owner: int) -> None:
    address = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]
    if address and (os.getpid(), os.getppid() == owner) == (server, False):
        with suppress(OSError):  # its folder may hold sockets of others
            os.unlink(address)
            os.rmdir(os.path.dirname(address))


atexit.register(_remove, os.getpid(), os.getppid())
os.setsid()
