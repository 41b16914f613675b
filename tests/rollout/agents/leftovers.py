"""What a rollout of agents leaves: sockets that listen, threads of the endpoint, processes of environments."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil


def listening() -> set[int]:
    connections = psutil.Process().net_connections(kind="tcp")
    return {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}


@contextmanager
def nothing_is_left() -> Iterator[None]:
    before, processes = listening(), set(multiprocessing.active_children())
    yield
    assert listening() == before
    assert not [one for one in threading.enumerate() if one.name.startswith("agent-server")]
    for process in set(multiprocessing.active_children()) - processes:
        process.join(30)
        assert not process.is_alive()
