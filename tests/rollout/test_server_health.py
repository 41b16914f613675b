"""A server that has ended is noticed beside the requests that it holds open; one that is slow is waited for."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import httpx
import pytest

from agile_trainers.rollout.generators import vllm
from agile_trainers.rollout.generators.vllm import Health
from agile_trainers.sampling.teacher_server import watching


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "EVERY_SECONDS", 0.02)
    monkeypatch.setattr(vllm, "_ASKING_SECONDS", 0.02)


@contextmanager
def waiting() -> Iterator[tuple[socket.socket, socket.socket, socket.socket, Health]]:
    """A listener, and both ends of a connection that it has accepted."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        closing(socket.create_connection(listener.getsockname())) as ours,
        listener.accept()[0] as theirs,
    ):
        yield listener, ours, theirs, Health(f"http://127.0.0.1:{listener.getsockname()[1]}/")


def answers(listener: socket.socket, *statuses: int) -> threading.Thread:
    """Answer one question for each status, and then none."""

    def serve() -> None:
        for status in statuses:
            asked, _ = listener.accept()
            with asked:
                assert asked.recv(4096).startswith(b"GET /health ")
                asked.sendall(b"HTTP/1.1 %d x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % status)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


def test_a_server_that_takes_no_connections_has_ended() -> None:
    """It holds one open, as vLLM's does after SIGTERM."""
    with waiting() as (listener, ours, _, watched):
        listener.close()
        with pytest.raises(ConnectionResetError, match="it has ended, and holds a request open"):
            watched.wait(ours, 20.0)


def test_a_server_whose_engine_is_dead_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "_ASKING_SECONDS", 20.0)
    with waiting() as (listener, ours, _, watched):
        asked = answers(listener, 200, 404, 503, 200, 503, 503)  # it has ended when it says so twice in a row
        with pytest.raises(ConnectionResetError):
            watched.wait(ours, 20.0)
        asked.join(20)
        assert not asked.is_alive()


def test_a_server_that_says_nothing_is_busy() -> None:
    """Its listener takes connections, and nobody reads them."""
    with waiting() as (_, ours, theirs, watched):
        with pytest.raises(TimeoutError):
            watched.wait(ours, 0.3)
        theirs.sendall(b"x")
        watched.wait(ours, 20.0)


def test_an_answer_that_is_there_is_read() -> None:
    with waiting() as (listener, ours, theirs, watched):
        theirs.sendall(b"x")
        listener.close()
        watched.wait(ours, 20.0)
        assert ours.recv(1) == b"x"


def test_a_teacher_that_holds_a_request_has_ended() -> None:
    """Its requests are those of httpx."""
    with socket.create_server(("127.0.0.1", 0)) as listener, closing(httpx.Client(timeout=60)) as client:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        held: list[socket.socket] = []

        def hold() -> None:
            held.append(listener.accept()[0])
            held[0].recv(4096)
            listener.close()

        thread = threading.Thread(target=hold, daemon=True)
        thread.start()
        with pytest.raises(ConnectionResetError, match="it has ended"):
            client.post(url, json={}, extensions={"trace": watching(Health(url))})
        thread.join(20)
        held[0].close()


def test_requests_that_wait_ask_together() -> None:
    """However many there are."""
    asked = list[int]()
    with waiting() as (_, ours, theirs, watched), pytest.MonkeyPatch.context() as patched:
        patched.setattr(vllm, "EVERY_SECONDS", 0.2)
        patched.setattr(vllm, "_ask", lambda url: bool(asked.append(1)))
        threads = [threading.Thread(target=watched.wait, args=(ours, 20.0)) for _ in range(16)]
        for thread in threads:
            thread.start()
        for _ in range(200):
            if asked:
                break
            threading.Event().wait(0.05)
        theirs.sendall(b"x")
        for thread in threads:
            thread.join(20)
        assert asked and len(asked) < 16
