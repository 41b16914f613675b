"""What a rollout of agents leaves: sockets that listen, and threads of the endpoint."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil


def listening() -> set[int]:
    connections = psutil.Process().net_connections(kind="tcp")
    return {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}


@contextmanager
def nothing_is_left() -> Iterator[None]:
    before = listening()
    yield
    assert listening() == before
    assert not [one for one in threading.enumerate() if one.name.startswith("agent-server")]
