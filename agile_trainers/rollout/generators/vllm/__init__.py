"""Generators on vLLM: an engine in this process, and a server, whose end is noticed beside the requests that it holds.

This file imports nothing that the core dependencies lack.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
import urllib.error
import urllib.request
from http.client import HTTPException

EVERY_SECONDS = 5.0
"""Seconds between two questions for ``/health``, of all requests that wait for a server together."""
_ASKING_SECONDS = 2.0


class Health:
    """Asks a server for ``/health`` beside the requests that wait for it. Thread-safe.

    A vLLM server that is told to end (SIGTERM, Ctrl-C) takes no connections any more, and may hold those open that it has,
    for ever (vLLM 0.31). A server that is slow to say how it is counts as one that is busy.

    Args:
        url: Its address, ``http://host:port``.
    """

    def __init__(self, url: str) -> None:
        self._url = f"{url.rstrip('/')}/health"
        self._lock = threading.Lock()
        self._asked, self._ended = time.monotonic(), False

    def wait(self, connection: socket.socket, seconds: float | None) -> None:
        """Wait until a connection to the server has something to read.

        Args:
            connection: On which an answer is awaited.
            seconds: Seconds to wait at most; None without a limit.

        Raises:
            ConnectionResetError: If the server has ended meanwhile: it said so, or took no connection, twice in a row.
            TimeoutError: If there is nothing to read in time.
        """
        until = None if seconds is None else time.monotonic() + seconds
        ended = 0
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            while not selector.select(EVERY_SECONDS if until is None else min(EVERY_SECONDS, until - time.monotonic())):
                if until is not None and time.monotonic() >= until:
                    raise TimeoutError("timed out")
                ended = ended + 1 if self._has_ended() else 0
                if ended == 2:
                    raise ConnectionResetError("it has ended, and holds a request open")

    def _has_ended(self) -> bool:
        if self._lock.acquire(blocking=False):  # another asks already, and an answer may come meanwhile
            try:
                if time.monotonic() - self._asked >= EVERY_SECONDS / 2:
                    self._ended, self._asked = _ask(self._url), time.monotonic()
            finally:
                self._lock.release()
        return self._ended


def _ask(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=_ASKING_SECONDS).close()
    except urllib.error.HTTPError as error:
        with error:
            return error.code >= 500  # the engine's end, or a gateway's word on its server
    except (OSError, HTTPException) as error:
        return not isinstance(getattr(error, "reason", error), TimeoutError)
    return False
