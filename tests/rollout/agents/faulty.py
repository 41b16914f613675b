"""Agents that fail in every way, beside sound ones: a module that is quick to import in other processes."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn
from urllib.parse import urlsplit

from agile_trainers.envs.agent import Model, Task

Messages = list[dict[str, Any]]
late: list[str] = []
"""What agents were told after their episode."""
go_on, told = threading.Event(), threading.Event()
"""Lets those go on that wait for the end of their episode; says that they were told."""

both_wait = threading.Barrier(2)
"""Passed by agents that never return."""


def body_of(messages: Messages | str, **fields: Any) -> bytes:
    said = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    return json.dumps({"model": "policy", "messages": said, **fields}).encode()


def connect(model: Model) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(model.base_url).netloc, timeout=60)


def post(model: Model, body: bytes, path: str = "/chat/completions", **headers: str) -> tuple[int, dict[str, Any]]:
    sent = {"Authorization": f"Bearer {model.api_key}"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    connection = connect(model)
    try:
        connection.request("POST", f"/v1{path}", body, sent)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def ask(model: Model, messages: Messages | str, **headers: str) -> str:
    status, answer = post(model, body_of(messages), **headers)
    if status != 200:
        raise RuntimeError(answer["error"]["message"])
    return str(answer["choices"][0]["message"]["content"])


def raw(model: Model, body: bytes, length: int | None = None, *lines: str) -> socket.socket:
    """Send a request without waiting for its answer."""
    address = urlsplit(model.base_url)
    connection = socket.create_connection((address.hostname, address.port), timeout=60)
    head = [
        "POST /v1/chat/completions HTTP/1.1", f"Host: {address.netloc}", f"Authorization: Bearer {model.api_key}",
        f"Content-Length: {len(body) if length is None else length}", *lines,
    ]  # fmt: skip
    connection.sendall("\r\n".join(head).encode("utf-8", "surrogateescape") + b"\r\n\r\n" + body)
    return connection


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def sound(model: Model, task: Task) -> float:
    """Talk for two turns about the seed."""
    messages: Messages = [{"role": "user", "content": f"start {task.seed}"}]
    for _ in range(2):
        said = ask(model, messages)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"you said {said}"}]
    return len(messages[-1]["content"]) % 7 / 6


# ------------------------------------------------------------------------------------------- what is heard of the client


def hangs_up(model: Model, task: Task) -> float:
    raw(model, body_of("again")).close()
    reset(raw(model, body_of("again")))
    return sound(model, task)


def hangs_up_in_a_stream(model: Model, task: Task) -> float:
    with raw(model, body_of("again", stream=True)) as connection:
        connection.recv(16)
        reset(connection)
    ask(model, "again")
    return sound(model, task)


def retries(model: Model, task: Task) -> float:
    said = [ask(model, "again", x_stainless_retry_count=str(count)) for count in (0, 1, 2)]
    assert said[0] == said[1] == said[2]
    assert ask(model, "once", Idempotency_Key="a") == ask(model, "once", Idempotency_Key="a")
    assert post(model, body_of("other"), Idempotency_Key="a")[0] == 400
    ask(model, "again")  # without a mark: a new sample
    return sound(model, task)


def duplicates(model: Model, task: Task) -> float:
    threads = [threading.Thread(target=ask, args=(model, "all at once")) for _ in range(4)]
    threads += [
        threading.Thread(target=ask, args=(model, "one of all"), kwargs={"Idempotency_Key": "a"}) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sound(model, task)


def too_much(model: Model, task: Task) -> float:
    with raw(model, b" " * 2**16, 50 * 2**20) as connection:
        assert b" 413 " in connection.recv(64)
    return sound(model, task)


_kept: list[Any] = []
"""Connections that stay open after their episode."""


def never_finishes_a_body(model: Model, task: Task) -> float:
    connections = [raw(model, body_of("slow")[:20], 1000) for _ in range(3)]
    _kept.extend(connections)
    return sound(model, task)


def not_utf8(model: Model, task: Task) -> float:
    for name in ("x-occurrence", "User-Agent", "Idempotency-Key", "x-stainless-retry-count"):
        with raw(model, body_of("bytes"), None, f"{name}: \udcff\udcfe") as connection:
            assert b" 200 " in connection.recv(1 << 16)
    return sound(model, task)


def wrong_keys(model: Model, task: Task) -> float:
    for key in ("", "sk-wrong", "\udcff", "x" * 5000):
        assert post(Model(model.base_url, key.encode("latin-1", "replace").decode()), body_of("whose"))[0] == 401
    return sound(model, task)


def rewards_wrongly(model: Model, task: Task) -> float:
    said = [post(model, body_of("reward"))[1]["id"] for _ in range(2)]
    for value, call in (
        (float("nan"), said[0]), (float("inf"), None), (1e39, None), (True, None), ("1", None), (1.0, "chatcmpl-0"),
        (1.0, ""), (1.0, f"{said[0]}:1"), (1.0, f"{said[0]}:²"), (1.0, f"{said[0]}:{'9' * 5000}"), (1.0, 7),
    ):  # fmt: skip
        body = json.dumps({"value": value, "call": call}).encode()
        status, _ = post(Model(model.base_url, model.reward_key), body, "/reward")
        assert status in (400, 404), (value, call, status)
    assert post(model, b'{"value": 1.0}', "/reward")[0] == 401
    for _ in range(2):
        model.reward(0.25, said[1])
    return sound(model, task)


# ---------------------------------------------------------------------------------------------------- how the agent ends


def outlives(model: Model, task: Task) -> float:
    def go_on_asking() -> None:
        go_on.wait(60)
        status, answer = post(model, body_of("late"))
        late.append(f"{status}: {answer['error']['code']}")
        try:
            model.reward(1.0)
        except ValueError as error:
            late.append(str(error))
        told.set()

    threading.Thread(target=go_on_asking, daemon=True).start()
    return sound(model, task)


def waits_for_the_late_one(model: Model, task: Task) -> float:
    """Keep the rollout going until another episode's agent was told that it is late."""
    assert told.wait(60)
    return sound(model, task)


def kills_its_process(model: Model, task: Task) -> float:
    ask(model, "before")
    os._exit(7)


def never_returns(model: Model, task: Task) -> float:
    ask(model, "before")
    both_wait.wait()
    go_on.wait(600)
    return 0.0


def closes_all_sockets(model: Model, task: Task) -> float:
    ask(model, "before")
    os.closerange(3, 1000)
    return 0.0


def forks(model: Model, task: Task) -> float:
    if os.fork() == 0:
        time.sleep(0.01)
        return 1.0  # from the fork, too
    return sound(model, task)


def listens(model: Model, task: Task) -> float:
    with socket.create_server(("127.0.0.1", 0)) as server:
        _kept.append(server)
        return sound(model, task)


FAULTS: dict[str, Callable[[Model, Task], float]] = {
    "hangs up": hangs_up,
    "hangs up in a stream": hangs_up_in_a_stream,
    "retries": retries,
    "duplicates": duplicates,
    "50 MB": too_much,
    "slow body": never_finishes_a_body,
    "not UTF-8": not_utf8,
    "wrong keys": wrong_keys,
    "wrong rewards": rewards_wrongly,
    "listens": listens,
}
"""Their agents return a reward."""
CRASHES = {
    "exception": "KeyError: 'a bug'",
    "SystemExit": "SystemExit: 3",
    "KeyboardInterrupt": "KeyboardInterrupt",
    "GeneratorExit": "GeneratorExit",
    "CancelledError": "CancelledError",
    "StopIteration": "StopIteration",
    "group": "ExceptionGroup: several (2 sub-exceptions)",
}
"""Those that fail, and what is said of them."""


def crash(what: str) -> NoReturn:
    raise {
        "exception": KeyError("a bug"),
        "SystemExit": SystemExit(3),
        "KeyboardInterrupt": KeyboardInterrupt(),
        "GeneratorExit": GeneratorExit(),
        "CancelledError": asyncio.CancelledError(),
        "StopIteration": StopIteration(),
        "group": BaseExceptionGroup("several", [SystemExit(1), KeyboardInterrupt()]),
    }[what]


ALL: dict[str, Callable[[Model, Task], float]] = {
    "sound": sound,
    "outlives": outlives,
    "waits for the late one": waits_for_the_late_one,
    "never returns": never_returns,
    "os._exit": kills_its_process,
    "closes all": closes_all_sockets,
    "forks": forks,
    **FAULTS,
}


def solve(model: Model, task: Task) -> float:
    what = (task.row or {})["what"]
    if what in CRASHES:
        ask(model, "before")
        crash(what)
    return ALL[what](model, task)
