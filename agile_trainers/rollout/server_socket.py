"""Removes the socket of multiprocessing's server of processes, whose owner was killed; imported in the server alone.

Normally the owner removes it. The server ends last of all, so it does so for an owner that cannot.
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
