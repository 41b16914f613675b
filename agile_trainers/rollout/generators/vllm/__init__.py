"""Generators on vLLM: an engine in this process, and a server, whose end is noticed beside the requests that it holds.

This file imports nothing that the core dependencies lack.
"""

from __future__ import annotations

import errno
import selectors
import socket
import threading
import time

EVERY_SECONDS = 5.0
"""Seconds between two looks at a server, of all requests that wait for it together."""
_CONNECTING_SECONDS = 2.0
_GONE = {errno.EHOSTUNREACH, errno.EHOSTDOWN}


class Health:
    """Looks whether a server takes connections, beside the requests that wait for it. Thread-safe.

    A vLLM server that is told to end (SIGTERM, Ctrl-C) takes no connections any more, and may hold those open that it has,
    for ever (vLLM 0.31). A look is a connection to where the request's own goes, so that proxies, credentials and
    certificates play no part. A server that is slow to take it counts as one that is busy.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._looked, self._ended = time.monotonic(), False

    def wait(self, connection: socket.socket, seconds: float | None) -> None:
        """Wait until a connection to the server has something to read.

        Args:
            connection: On which an answer is awaited.
            seconds: Seconds to wait at most; None without a limit.

        Raises:
            ConnectionResetError: If the server has ended meanwhile: it took no connection, twice in a row.
            TimeoutError: If there is nothing to read in time.
        """
        until = None if seconds is None else time.monotonic() + seconds
        ended = 0
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            while not selector.select(EVERY_SECONDS if until is None else min(EVERY_SECONDS, until - time.monotonic())):
                if until is not None and time.monotonic() >= until:
                    raise TimeoutError("timed out")
                ended = ended + 1 if self._has_ended(connection) else 0
                if ended == 2:
                    raise ConnectionResetError("it has ended, and holds a request open")

    def _has_ended(self, connection: socket.socket) -> bool:
        if self._lock.acquire(blocking=False):  # another looks already, and an answer may come meanwhile
            try:
                if time.monotonic() - self._looked >= EVERY_SECONDS / 2:
                    self._ended, self._looked = _refuses(connection), time.monotonic()
            finally:
                self._lock.release()
        return self._ended


def _refuses(connection: socket.socket) -> bool:
    """Return True if nobody takes connections any more where one leads to."""
    try:
        socket.create_connection(connection.getpeername()[:2], _CONNECTING_SECONDS).close()
    except OSError as error:
        return isinstance(error, ConnectionError) or error.errno in _GONE
    return False
