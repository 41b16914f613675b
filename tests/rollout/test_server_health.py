"""A server that has ended is noticed beside the requests that it holds open; one that is slow is waited for."""

from __future__ import annotations

import errno
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
    monkeypatch.setattr(vllm, "_CONNECTING_SECONDS", 0.02)


@contextmanager
def waiting() -> Iterator[tuple[socket.socket, socket.socket, socket.socket, Health]]:
    """A listener, and both ends of a connection that it has accepted."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        closing(socket.create_connection(listener.getsockname())) as ours,
        listener.accept()[0] as theirs,
    ):
        yield listener, ours, theirs, Health()


def test_a_server_that_takes_no_connections_has_ended() -> None:
    """It holds one open, as vLLM's does after SIGTERM."""
    with waiting() as (listener, ours, _, watched):
        listener.close()
        with pytest.raises(ConnectionResetError, match="it has ended, and holds a request open"):
            watched.wait(ours, 20.0)


def test_a_server_that_takes_none_once_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has ended when it takes none twice in a row."""
    looks = iter([True, False, True, False, True, True])
    monkeypatch.setattr(vllm, "_refuses", lambda _: next(looks))
    monkeypatch.setattr(vllm, "EVERY_SECONDS", 0.0)
    with waiting() as (_, ours, _, watched), pytest.raises(ConnectionResetError):
        watched.wait(ours, 20.0)
    assert not list(looks)


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (TimeoutError("timed out"), False),
        (OSError(errno.EMFILE, "of ours"), False),
        (ConnectionRefusedError(errno.ECONNREFUSED, "closed"), True),
        (OSError(errno.EHOSTUNREACH, "its machine is gone"), True),
    ],
)
def test_what_is_said_of_the_server(monkeypatch: pytest.MonkeyPatch, error: OSError, refused: bool) -> None:
    def connect(*_: object) -> None:
        raise error

    with waiting() as (_, ours, _, _):
        monkeypatch.setattr(socket, "create_connection", connect)
        assert vllm._refuses(ours) == refused


def test_a_look_needs_no_address_but_that_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials in a URL, proxies and certificates are those of the client, and nothing is asked."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with waiting() as (listener, ours, theirs, watched):
        answer = threading.Timer(0.3, theirs.sendall, (b"x",))
        answer.start()
        watched.wait(ours, 20.0)
        answer.join()
        assert listener.accept()[0].recv(1) == b""


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
            client.post(url, json={}, extensions={"trace": watching(Health())})
        thread.join(20)
        held[0].close()


def test_requests_that_wait_look_together() -> None:
    """However many there are."""
    asked = list[int]()
    with waiting() as (_, ours, theirs, watched), pytest.MonkeyPatch.context() as patched:
        patched.setattr(vllm, "EVERY_SECONDS", 0.2)
        patched.setattr(vllm, "_refuses", lambda _: bool(asked.append(1)))
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
