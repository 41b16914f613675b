"""Serves an OpenEnv application in a thread."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def bound(port: int = 0) -> socket.socket:
    """A socket that holds a port; connections are refused until it, or another one of the port, listens."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind(("127.0.0.1", port))
    return made


@contextmanager
def serve(app: Any, port: int = 0) -> Iterator[str]:
    """A server in a thread; its address."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws_ping_interval=None))
    holder = bound(port)
    thread = threading.Thread(target=server.run, args=([holder],), daemon=True)
    port = holder.getsockname()[1]
    thread.start()
    while not server.started:
        thread.join(0.01)
        assert thread.is_alive(), "the server did not start"
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)
