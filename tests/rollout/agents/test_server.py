"""The endpoint of agents over real connections: requests, refusals, hang-ups, closing."""

from __future__ import annotations

import gzip
import http.client
import json
import logging
import resource
import socket
import struct
import threading
import time
import tracemalloc
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from answering import KEY, REWARD_KEY, Answering, said

from agile_trainers.envs.agent import Endpoint, Model
from agile_trainers.rollout.agents.requests import Answer, ChatRequest, Choice, Marks, Refusal
from agile_trainers.rollout.agents.server import AgentServer

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
PATHS = {
    "/chat/completions": CHAT,
    "/responses": {"model": "policy", "input": "hi"},
    "/messages": CHAT,
}


def _last_word(request: ChatRequest) -> Answer:
    return said(f"you said {request.messages[-1]['content']}")


@pytest.fixture
def answering() -> Iterator[Answering]:
    with Answering(_last_word) as exchange:
        yield exchange


@pytest.fixture
def server(answering: Answering) -> Iterator[AgentServer]:
    with AgentServer(answering, max_body=2**20) as server:
        yield server


def _connect(server: AgentServer) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(server.base_url).netloc, timeout=60)


def _ask(
    server: AgentServer, path: str, body: Any = None, *, method: str = "POST", key: str | None = KEY, **headers: str
) -> tuple[int, http.client.HTTPMessage, str]:
    connection = _connect(server)
    sent = {} if key is None else {"Authorization": f"Bearer {key}"}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    data = body if isinstance(body, (bytes, type(None))) else json.dumps(body)
    connection.request(method, f"/v1{path}", data, sent)
    response = connection.getresponse()
    answer = response.status, response.headers, response.read().decode()
    connection.close()
    return answer


# ------------------------------------------------------------------------------------------------------------ answers


@pytest.mark.parametrize("path", PATHS)
def test_a_request_is_answered_whole_and_as_a_stream(server: AgentServer, answering: Answering, path: str) -> None:
    status, headers, text = _ask(server, path, PATHS[path])
    assert status == 200 and headers["Content-Type"].startswith("application/json") and "you said hi" in text
    status, headers, text = _ask(server, path, {**PATHS[path], "stream": True})
    assert status == 200 and headers["Content-Type"].startswith("text/event-stream")
    events = text.split("\n\n")
    assert events[-1] == "" and all("data: " in event for event in events[:-1])
    answering.wait_for(ends=2)
    assert answering.ends == [("delivered", ticket) for ticket in answering.asked]
    assert answering.asked[0].request.body == json.dumps(PATHS[path]).encode()


@pytest.mark.parametrize("prefix", ["", "/v1", "/v1/v1"])
def test_a_base_url_with_v1_twice_works(server: AgentServer, prefix: str) -> None:
    assert _ask(server, f"{prefix}/messages", CHAT)[0] == 200
    assert _ask(server, f"{prefix}/models/", method="GET")[0] == 200


def test_the_key_comes_in_either_header_and_anthropics_is_asked_first(server: AgentServer) -> None:
    assert _ask(server, "/messages", CHAT, key=None, x_api_key=KEY)[0] == 200
    assert _ask(server, "/messages", CHAT, key="a token of the user", x_api_key=KEY)[0] == 200
    assert _ask(server, "/chat/completions", CHAT, key=None, Authorization=f"bearer {KEY}")[0] == 200


def test_marks_are_read_from_the_headers(server: AgentServer, answering: Answering) -> None:
    marks = {"Idempotency_Key": "k", "x_stainless_retry_count": "2", "x_occurrence": "left", "User_Agent": "me/1"}
    _ask(server, "/chat/completions", CHAT, **marks)
    _ask(server, "/chat/completions", CHAT, x_stainless_retry_count="-1")
    assert [ticket.marks for ticket in answering.asked] == [Marks("k", 2, "left", "me/1"), Marks()]


def test_models_are_listed(server: AgentServer) -> None:
    models = json.loads(_ask(server, "/models", method="GET")[2])
    assert [model["id"] for model in models["data"]] == ["policy", "policy-frozen"]


def test_a_call_is_rewarded(server: AgentServer, answering: Answering) -> None:
    model = Model(server.base_url, KEY, reward_key=REWARD_KEY)
    model.reward(0.5, call="chatcmpl-a1")
    model.reward(1)
    model.reward(np.float32(0.25))
    assert answering.rewards == [(0.5, "chatcmpl-a1"), (1, None), (0.25, None)]
    with pytest.raises(ValueError, match=r"array\(\[1\]\)"):
        model.reward(np.array([1]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected a finite number"):
        model.reward("much")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="NaN"):
        model.reward(float("nan"))
    with pytest.raises(ValueError, match=r"expected model\.reward_key"):
        Model(server.base_url, KEY, reward_key=KEY).reward(1.0)


def test_a_proxy_is_warned_of_and_gets_no_reward(
    answering: Answering, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(urllib.request, "_opener", None)  # it keeps the proxies that it was made with
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://user:secret@127.0.0.1:9")
    with AgentServer(answering) as server:
        Model(server.base_url, KEY, reward_key=REWARD_KEY).reward(1.0)
    assert answering.rewards == [(1.0, None)]
    assert "Set NO_PROXY=127.0.0.1,localhost" in caplog.text and "secret" not in caplog.text
    caplog.clear()
    monkeypatch.setenv("NO_PROXY", "localhost,127.0.0.1")
    with AgentServer(answering):
        assert not caplog.text


def test_several_hundred_requests_are_open_at_once() -> None:
    count = 300
    everybody = threading.Barrier(count)

    def reply(request: ChatRequest) -> None:
        return None

    with Answering(reply) as answering, AgentServer(answering) as server:

        def one(number: int) -> str:
            everybody.wait()
            return _ask(server, "/chat/completions", {**CHAT, "messages": [{"role": "user", "content": str(number)}]})[
                2
            ]

        with ThreadPoolExecutor(count) as pool:
            texts = pool.map(one, range(count))
            answering.wait_for(asked=count)
            for ticket in reversed(answering.asked):  # each gets its own, in any order
                ticket.answer.set_result(_last_word(ticket.request))
        for number, text in enumerate(texts):
            assert json.loads(text)["choices"][0]["message"]["content"] == f"you said {number}"
        answering.wait_for(ends=count)
        assert {end for end, _ in answering.ends} == {"delivered"}


# ------------------------------------------------------------------------------------------------------------ refusals


def _refused(answer: tuple[int, http.client.HTTPMessage, str], path: str = "/chat/completions") -> tuple[int, str]:
    status, headers, text = answer
    assert headers["x-should-retry"] == "false" and KEY not in text
    body = json.loads(text)
    assert (body["type"] == "error") if path == "/messages" else ("code" in body["error"])
    return status, body["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
def test_refusals_come_in_the_dialect_and_are_not_sent_again(server: AgentServer, path: str) -> None:
    body = PATHS[path]
    assert _refused(_ask(server, path, b"{"), path)[0] == 400
    assert _refused(_ask(server, path, b"[" * 100_000), path)[0] == 400
    assert _refused(_ask(server, path, ["hi"]), path) == (400, '`body` is ["hi"]; expected an object.')
    assert _refused(_ask(server, path, {**body, "temperature": "hot"}), path)[1].startswith("`temperature` is 'hot'")
    assert _refused(_ask(server, path, body, key="wrong"), path) == (401, "There is no episode with this key.")
    assert _refused(_ask(server, path, body, key=None), path)[0] == 401
    status, message = _refused(_ask(server, path, method="GET"), path)
    assert status == 404 and f"POST /v1{path}" in message
    assert _ask(server, path, body)[0] == 200


def test_a_body_that_is_not_what_its_headers_say_is_no_error_of_ours(
    server: AgentServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A program that sends thousands would fill the log with tracebacks."""
    status, message = _refused(_ask(server, "/chat/completions", CHAT, Content_Encoding="gzip"))
    assert status == 400 and message.startswith("The body cannot be read: 400")
    assert "Traceback" not in caplog.text and "failed in the endpoint" not in caplog.text


def test_a_reward_without_a_key_asks_for_the_key_of_rewards(server: AgentServer) -> None:
    """With `model.api_key` it would be refused again."""
    status, message = _refused(_ask(server, "/reward", {"value": 1.0}, key=None))
    assert status == 401 and "pass `model.reward_key`" in message


def test_an_unknown_path_is_named(server: AgentServer) -> None:
    status, message = _refused(_ask(server, "/embeddings", CHAT))
    assert status == 404 and "POST /v1/embeddings" in message and "POST /v1/chat/completions" in message


def test_the_exchanges_refusal_is_the_answer() -> None:
    def reply(request: ChatRequest) -> Answer:
        raise Refusal("The context is full.", code="context_length_exceeded")

    with Answering(reply) as answering, AgentServer(answering) as server:
        status, headers, text = _ask(server, "/chat/completions", {**CHAT, "stream": True})
        assert (status, headers["x-should-retry"]) == (400, "false")
        assert json.loads(text)["error"]["code"] == "context_length_exceeded"
    assert answering.ends == []


@pytest.mark.parametrize("where", ["ask", "answer", "write"])
def test_an_error_of_ours_is_logged_and_answered(where: str, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Answering):
        def ask(self, key: str, ticket: Any) -> None:
            if where == "ask":
                raise KeyError("lost")
            super().ask(key, ticket)

    def reply(request: ChatRequest) -> Answer:
        if where == "answer":
            raise KeyError("lost")
        return said("x", ("f", {"number": float("nan")}))  # cannot be written

    with Failing(reply) as answering, AgentServer(answering) as server:
        status, message = _refused(_ask(server, "/messages", CHAT), "/messages")
    assert status == 500 and "failed" in message
    [record] = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "POST /v1/messages" in record.getMessage() and record.exc_info
    assert [end for end, _ in answering.ends] == ["abandoned"]


def test_an_error_of_ours_after_the_answer_closes_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    """A second answer on it would be read as that to the next request."""

    class Failing(Answering):
        def delivered(self, key: str, ticket: Any) -> None:
            raise KeyError("lost")

    with Failing(_last_word) as answering, AgentServer(answering) as server:
        with _raw(server, CHAT) as connection:
            connection.settimeout(10)
            received = b""
            while block := connection.recv(100_000):
                received += block
        assert received.count(b"HTTP/1.1") == 1 and b"you said hi" in received
    assert "KeyError: 'lost'" in caplog.text


@pytest.mark.parametrize("chunked", [False, True], ids=["announced", "chunked"])
@pytest.mark.parametrize("key", [KEY, "wrong"])
def test_a_body_of_50_mb_is_refused_and_not_held(server: AgentServer, chunked: bool, key: str) -> None:
    block = b" " * 2**16
    connection = _connect(server)
    connection.putrequest("POST", "/v1/messages")
    connection.putheader("x-api-key", key)
    connection.putheader(*(("Transfer-Encoding", "chunked") if chunked else ("Content-Length", str(50 * 2**20))))
    connection.endheaders()
    tracemalloc.start()
    try:
        for _ in range(50 * 2**20 // len(block)):
            connection.send(b"%x\r\n%s\r\n" % (len(block), block) if chunked else block)
        connection.send(b"0\r\n\r\n" if chunked else b"")
        response = connection.getresponse()
        status, message = _refused((response.status, response.headers, response.read().decode()), "/messages")
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        connection.close()
    assert (status, "1048576 bytes" in message) == ((413, True) if key == KEY else (401, False))
    assert most < 10 * 2**20
    assert _ask(server, "/chat/completions", CHAT)[0] == 200


def test_the_key_is_not_logged(server: AgentServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    _ask(server, "/chat/completions", CHAT)
    _ask(server, "/chat/completions", b"{")
    for request in (
        f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization Bearer {KEY}\r\n\r\n",
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \x01{KEY}\r\n\r\n",
        f"nonsense {KEY}\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", urlsplit(server.base_url).port or 0), 60) as connection:
            connection.sendall(request.encode())
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
    assert _ask(server, "/chat/completions", CHAT)[0] == 200
    assert KEY not in caplog.text


def test_connections_leave_files_to_the_rest_of_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of eight files connections take six; the seventh waits for one of them to end."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8, 8))
    with Answering(lambda request: None) as answering, AgentServer(answering) as server:
        connections = [_raw(server, CHAT) for _ in range(6)]
        answering.wait_for(asked=6)
        connections.append(_raw(server, CHAT))
        deadline = time.monotonic() + 60
        while "hold 6 connections to the endpoint, of 8 files" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert len(answering.asked) == 6 and not answering.ends
        connections[0].close()
        answering.wait_for(asked=7)
        assert answering.ends == [("abandoned", answering.ends[0][1])]
        for connection in connections:
            connection.close()
    assert caplog.text.count("hold 6 connections") == 1


# ------------------------------------------------------------------------------------------------------------ hang-ups


def _raw(server: AgentServer, body: Any) -> socket.socket:
    """A connection that has sent a request."""
    connection = socket.create_connection(("127.0.0.1", urlsplit(server.base_url).port or 0), 60)
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: {KEY}\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_a_client_that_hangs_up_leaves_the_answer_for_later(reset: bool) -> None:
    with Answering(lambda request: None) as answering, AgentServer(answering) as server:
        connection = _raw(server, CHAT)
        answering.wait_for(asked=1)
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        answering.wait_for(ends=1)
        [ticket] = answering.asked
        assert answering.ends == [("abandoned", ticket)]
        assert not ticket.answer.done() and ticket.answer.set_running_or_notify_cancel()
        ticket.answer.set_result(said("kept"))
        assert len(answering.ends) == 1


def test_a_client_that_hangs_up_in_the_middle_did_not_get_the_answer() -> None:
    with Answering(lambda request: said("x" * 50_000_000)) as answering, AgentServer(answering) as server:
        with _raw(server, CHAT) as connection:
            assert connection.recv(100)
        answering.wait_for(ends=1)
        assert [end for end, _ in answering.ends] == ["abandoned"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_hangs_up_while_the_answer_is_written_did_not_get_it(stream: bool) -> None:
    """Its system answers what arrives by a reset, before the event loop could have heard of it."""

    class HangUp(tuple[Choice, ...]):
        def __iter__(self) -> Iterator[Choice]:
            connection.close()
            return super().__iter__()

        def __getitem__(self, index: Any) -> Any:
            connection.close()
            return super().__getitem__(index)

    asked = threading.Event()

    def reply(request: ChatRequest) -> Answer:
        asked.wait()
        return Answer("a1", "policy", 0, HangUp([Choice("x")]))

    with Answering(reply) as answering, AgentServer(answering) as server:
        connection = _raw(server, {**CHAT, "stream": stream})
        asked.set()
        answering.wait_for(ends=1)
        assert [end for end, _ in answering.ends] == ["abandoned"]


def test_an_answer_is_delivered_when_its_last_byte_has_left_this_process() -> None:
    """What the event loop still holds back is lost if the server ends."""

    def received(size: int) -> tuple[int, bool]:
        """Bytes that a client finds which begins to read when the server has ended, and whether it got the answer."""
        with Answering(lambda request: said("x" * size)) as answering:
            with AgentServer(answering) as server:
                connection = _raw(server, CHAT)
                answering.wait_for(asked=1)
                with suppress(AssertionError):
                    answering.wait_for(ends=1, seconds=0.2)
                delivered = [end for end, _ in answering.ends] == ["delivered"]
            with connection, suppress(ConnectionResetError):
                found = 0
                while block := connection.recv(2**20):
                    found += len(block)
            return found, delivered

    buffers, delivered = received(50_000_000)
    assert not delivered
    for size in range(buffers - 20_000, buffers + 60_000, 20_000):
        found, delivered = received(size)
        assert found > size or not delivered, size


def test_a_client_that_reads_all_and_hangs_up_at_once_got_the_answer(server: AgentServer, answering: Answering) -> None:
    for _ in range(100):
        connection = _raw(server, CHAT)
        received = b""
        while not received.endswith(b"}"):
            received += connection.recv(100_000)
        connection.close()
    answering.wait_for(ends=100)
    assert {end for end, _ in answering.ends} == {"delivered"}


def test_a_request_that_breaks_off_is_not_asked(server: AgentServer, answering: Answering) -> None:
    with socket.create_connection(("127.0.0.1", urlsplit(server.base_url).port or 0), 60) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: {KEY}\r\nContent-Length: 500\r\n\r\n"
        connection.sendall(head.encode() + b'{"model"')
    assert _ask(server, "/chat/completions", CHAT)[0] == 200
    assert len(answering.asked) == 1


def test_leaving_closes_everything() -> None:
    before = set(threading.enumerate())
    with Answering(lambda request: None) as answering:
        with AgentServer(answering) as server:
            port = urlsplit(server.base_url).port or 0
            waiting = [_raw(server, CHAT) for _ in range(50)]
            idle = socket.create_connection(("127.0.0.1", port), 60)
            answering.wait_for(asked=50)
        assert not any(thread.name == "agent-server" for thread in threading.enumerate())
        for connection in waiting:
            with connection:
                assert connection.recv(100) == b""
        with idle, suppress(ConnectionResetError):  # one that was not accepted yet
            assert idle.recv(100) == b""
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 60)
        assert sorted(end for end, _ in answering.ends) == ["abandoned"] * 50
        for ticket in answering.asked:  # answers that come later trouble nobody
            ticket.answer.set_result(said("late"))
    assert set(threading.enumerate()) <= before


def test_the_connection_of_a_client_that_does_not_read_is_closed() -> None:
    with Answering(lambda request: said("x" * 50_000_000)) as answering:
        with AgentServer(answering) as server:
            connection = _raw(server, CHAT)
            answering.wait_for(asked=1)
            connection.recv(1)
        with connection, suppress(ConnectionResetError):
            while connection.recv(2**20):
                pass
        assert [end for end, _ in answering.ends] == ["abandoned"]


def test_leaving_by_an_error_closes_everything(answering: Answering) -> None:
    with pytest.raises(KeyError), AgentServer(answering) as server:
        raise KeyError
    with pytest.raises(ConnectionRefusedError):
        _ask(server, "/models", method="GET")


# ----------------------------------------------------------------------------------------------------- other endpoints


def test_other_models_are_asked_at_their_endpoint_with_its_key() -> None:
    keys: list[str] = []

    class Judge(Answering):
        def models(self, key: str) -> dict[str, Endpoint]:
            keys.append(key)
            return {}

        def ask(self, key: str, ticket: Any) -> None:
            super().ask(KEY, ticket)

    with Judge(_last_word) as judge, AgentServer(judge) as far:
        models = {
            "judge": Endpoint(far.base_url, "the-judges-key", "judge-7b"),
            "same": Endpoint(far.base_url + "/", "k2"),
        }
        with Answering(_last_word, models) as answering, AgentServer(answering) as near:
            for path, body in PATHS.items():
                status, headers, text = _ask(near, path, {**body, "model": "judge"})
                assert (status, headers["Content-Type"].split(";")[0]) == (
                    200,
                    "application/json",
                ) and "said hi" in text
                text = _ask(near, path, {**body, "model": "same", "stream": True})[2]
                assert "said hi" in text and text.endswith("\n\n")
            refused = _ask(near, "/messages", {"model": "judge", "messages": []})
            assert refused[0] == 400 and "`messages` is empty" in refused[2]
            listed = json.loads(_ask(near, "/models", method="GET")[2])["data"]
    assert answering.asked == [] and [model["id"] for model in listed][2:] == ["judge", "same"]
    assert [ticket.request.model for ticket in judge.asked] == ["judge-7b", "same"] * 3
    assert keys == ["the-judges-key", "k2"] * 3 + ["the-judges-key"]


def test_an_endpoint_that_fails_or_breaks_off_is_not_taken_for_an_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as broken:
        models = {
            "closed": Endpoint("http://127.0.0.1:9/v1", "secret"),
            "broken": Endpoint(f"http://127.0.0.1:{broken.getsockname()[1]}/v1", "secret"),
        }
        with Answering(_last_word, models) as answering, AgentServer(answering) as server:
            status, message = _refused(_ask(server, "/chat/completions", {**CHAT, "model": "closed"}))
            assert status == 502 and "127.0.0.1:9" in message and "secret" not in message
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(_ask, server, "/chat/completions", {**CHAT, "model": "broken"})
                connection, _ = broken.accept()
                with connection:
                    connection.recv(2**16)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
                with pytest.raises(http.client.IncompleteRead):
                    asked.result()


# ---------------------------------------------------------------------------------------------------------------- HTTP


def _all_received(server: AgentServer, *sent: bytes) -> bytes:
    """Send bytes, and read until the server closes the connection."""
    address = urlsplit(server.base_url)
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        for one in sent:
            connection.sendall(one)
        received = b""
        while more := connection.recv(2**16):
            received += more
    return received


def _head(body: bytes, *lines: str, version: str = "1.1", host: str = "127.0.0.1") -> bytes:
    fields = [f"POST /v1/chat/completions HTTP/{version}", f"Host: {host}", f"Authorization: Bearer {KEY}", *lines]
    return "\r\n".join([*fields, f"Content-Length: {len(body)}"]).encode() + b"\r\n\r\n" + body


def test_requests_on_one_connection_without_waiting_are_answered_in_order(server: AgentServer) -> None:
    bodies = [json.dumps({**CHAT, "messages": [{"role": "user", "content": f"no {k}"}]}).encode() for k in range(3)]
    received = _all_received(server, b"".join([*map(_head, bodies[:2]), _head(bodies[2], "Connection: close")]))
    assert received.count(b"HTTP/1.1 200 ") == 3
    assert received.find(b"you said no 0") < received.find(b"you said no 1") < received.find(b"you said no 2")


def test_the_first_version_of_http_is_answered(server: AgentServer, answering: Answering) -> None:
    received = _all_received(server, _head(json.dumps(CHAT).encode(), version="1.0"))
    assert b" 200 OK" in received and b"you said hi" in received and b"chunked" not in received
    answering.wait_for(ends=1)
    assert answering.ends[0][0] == "delivered"


def test_a_body_that_unpacks_to_50_mb_is_refused_and_not_held(server: AgentServer, answering: Answering) -> None:
    body = gzip.compress(b'{"model": "policy"' + b" " * (50 * 2**20) + b"}")
    assert len(body) < 2**17
    tracemalloc.start()
    received = _all_received(server, _head(body, "Content-Encoding: gzip", "Connection: close"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert b" 413 " in received.partition(b"\r\n")[0] and not answering.asked
    assert peak < 20 * 2**20


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1:1", ""])
def test_a_page_that_names_itself_as_the_host_needs_the_key(server: AgentServer, host: str) -> None:
    """A name that resolves to loopback (DNS rebinding) lets a browser's page send requests, but not know the key."""
    body = json.dumps(CHAT).encode()
    sent = _head(body, "Connection: close", host=host).replace(KEY.encode(), b"guessed")
    received = _all_received(server, sent)
    assert b" 401 " in received.partition(b"\r\n")[0] and b"Access-Control" not in received


def test_a_request_smuggled_behind_another_has_no_key(server: AgentServer, answering: Answering) -> None:
    hidden = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
    for both in ("Transfer-Encoding: chunked", "Content-Length: 3"):
        received = _all_received(server, _head(hidden, both, "Connection: close"))
        assert received.startswith(b"HTTP/1.") and b" 400 " in received.partition(b"\r\n")[0]
    assert not answering.asked


def test_a_password_in_an_endpoints_address_is_not_shown() -> None:
    judge = Endpoint("http://user:pass%40word@127.0.0.1:9/v1")
    with Answering(lambda request: None, {"judge": judge}) as answering, AgentServer(answering) as server:
        status, _, text = _ask(server, "/chat/completions", {**CHAT, "model": "judge"})
    assert status == 502 and "http://127.0.0.1:9/v1/chat/completions" in text and "pass" not in text
