"""Isolated programs as agents: the endpoint is all that they reach, and their own folder all that they change."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import select
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from time_limits import at_the_first_limit

from agile_trainers.envs.agent import Agent, Model, Task
from agile_trainers.envs.isolation import levels as isolation
from agile_trainers.envs.isolation import process_tree
from agile_trainers.envs.isolation.levels import LANDLOCK, NONE, OPTION, IsolationError


class Echo(http.server.BaseHTTPRequestHandler):
    """Answers with the size of what it got, and that many bytes."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[::-1])

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Model]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield Model(f"http://127.0.0.1:{server.server_address[1]}/v1", "sk-isolated")
        server.shutdown()


def ran(model: Model, program: str, *arguments: str, score: Any = lambda task, finished: 1.0, **options: Any) -> Any:
    """The info of an isolated program of this Python."""
    agent = Agent.command([sys.executable, "-c", program, *arguments], score=score, isolated=True, **options)
    return asyncio.run(agent().play(model, Task(None, 0)))["info"]


def attempts(model: Model, *programs: str, **options: Any) -> list[str]:
    """What each attack brought: ``got ...``, or the error that stopped it."""
    attack = (
        "import json, os, socket, sys\n"
        "for program in json.loads(sys.argv[1]):\n"
        "    try:\n        exec(program)\n"
        "    except BaseException as error:\n        print(type(error).__name__, flush=True)"
    )
    info = ran(model, attack, json.dumps(programs), **options)
    return info["stdout"].splitlines() or [f"{info['exit_code']}: {info['stderr']}"]


@pytest.mark.bubblewrap
def test_an_isolated_program_reaches_the_endpoint(endpoint: Model) -> None:
    """Eight connections at once, each with three requests, of up to a megabyte."""
    program = """
import http.client, os, threading, urllib.parse
where = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"]).netloc
def ask(number):
    client = http.client.HTTPConnection(where)
    for size in (1, 1000, 1_000_000):
        body = bytes([65 + number]) + b"." * size
        client.request("POST", "/v1/chat/completions", body)
        assert client.getresponse().read() == body[::-1]
    print("whole", flush=True)
threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
    info = ran(endpoint, program)
    assert info == {"exit_code": 0, "stdout": "whole\n" * 8, "stderr": ""}


def test_a_program_holds_few_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a file of the training process; further ones wait until one has ended."""
    monkeypatch.setattr(process_tree, "_CONNECTIONS", 2)
    address, (channel, theirs) = ("127.0.0.1", 0), socket.socketpair()

    def forward() -> None:
        with suppress(OSError):
            process_tree._forward(channel, endpoint.getsockname()[1])

    with socket.create_server(address) as inside, socket.create_server(address) as endpoint, channel, theirs:
        socket.send_fds(theirs, [b"x"], [inside.fileno()])
        thread = threading.Thread(target=forward, daemon=True)
        thread.start()
        clients = [socket.create_connection(inside.getsockname()) for _ in range(3)]
        endpoint.settimeout(60)
        reached = [endpoint.accept()[0] for _ in range(2)]
        assert not select.select([endpoint], [], [], 0.2)[0]
        for one in clients[:2]:
            one.close()
        for one in reached:
            assert one.recv(1) == b""
            one.close()
        reached.append(endpoint.accept()[0])
        clients[2].sendall(b"later")
        assert reached[2].recv(5) == b"later"
        for one in (clients[2], reached[2]):
            one.close()
        inside.shutdown(socket.SHUT_RDWR)  # so that nothing more is accepted
        thread.join(60)
        assert not thread.is_alive()


def test_what_is_sent_in_parts_is_passed_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients send a body after its headers, and the system kept it until the other side confirmed these: 40 ms later."""
    address, create, made = ("127.0.0.1", 0), socket.create_connection, list[socket.socket]()
    with socket.create_server(address) as inside, socket.create_server(address) as endpoint:
        client = create(inside.getsockname())
        made.append(inside.accept()[0])
        monkeypatch.setattr(socket, "create_connection", lambda where: made.append(create(where)) or made[-1])
        arguments = (made[0], endpoint.getsockname()[1], threading.Semaphore())
        thread = threading.Thread(target=process_tree._connect, args=arguments, daemon=True)
        thread.start()
        reached = endpoint.accept()[0]
        for source, target in ((client, reached), (reached, client)):
            source.sendall(b"headers")
            assert target.recv(7) == b"headers"
        assert all(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for one in made) and len(made) == 2
        client.close()
        reached.close()
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.bubblewrap
def test_nothing_else_is_reached_read_or_changed(endpoint: Model, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    secret = tmp_path / "secret"
    secret.write_text("the secret")
    with socket.create_server(("127.0.0.1", 0)) as other:
        brought = attempts(
            endpoint,
            f"print('got', open({str(secret)!r}).read())",
            f"print('got', os.listdir({str(tmp_path)!r}))",
            f"open({str(tmp_path / 'new')!r}, 'w'); print('got')",
            "open('/usr/bin/new', 'w'); print('got')",
            f"open({os.__file__!r}, 'a'); print('got')",
            "print('got', open('/etc/shadow').read())",
            f"socket.create_connection(('127.0.0.1', {other.getsockname()[1]}), 5); print('got')",
            "socket.create_connection(('192.0.2.1', 80), 5); print('got')",
            f"os.kill({os.getpid()}, 0); print('got')",
            f"print('got', open('/proc/{os.getpid()}/environ').read())",
            "os.mount('a', 'b', 'tmpfs') if hasattr(os, 'mount') else os.setuid(0); print('got')",
        )
    refused = ("PermissionError", "FileNotFoundError", "OSError", "ConnectionRefusedError", "ProcessLookupError")
    assert len(brought) == 11 and set(brought) <= set(refused), brought
    assert secret.read_text() == "the secret" and sorted(tmp_path.iterdir()) == [secret]
    assert attempts(endpoint, f"print('got', open({str(secret)!r}).read())", readable=[tmp_path]) == ["got the secret"]


@pytest.mark.bubblewrap
def test_an_isolated_program_does_what_agents_do(endpoint: Model) -> None:
    """It starts processes, writes files that the score reads, and its end is told as that of others."""
    program = (
        "import os, subprocess, sys\n"
        "said = subprocess.run(['sh', '-c', 'cat given; echo $HOME'], capture_output=True, text=True).stdout\n"
        "open('answer', 'w').write(said)\n"
        "open(os.environ['HOME'] + '/notes', 'w'); open('/tmp/more', 'w'); open(os.environ['TMPDIR'] + '/x', 'w')\n"
        "print(sum(name.isdigit() for name in os.listdir('/proc')) < 9, flush=True)\n"
        "subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "os.kill(os.getpid(), int(sys.argv[1])) if int(sys.argv[1]) else sys.exit(3)"
    )  # fmt: skip

    def score(task: Task, finished: Any) -> dict[str, Any]:
        return {"reward": 1.0, "info": {"answer": (finished.folder / "answer").read_text().splitlines()[0]}}

    for number, code in ((0, 3), (9, -9)):
        info = ran(endpoint, program, str(number), score=score, prepare=lambda _, it: (it / "given").write_text("42\n"))
        assert info == {"exit_code": code, "stdout": "True\n", "stderr": "", "answer": "42"}


@pytest.mark.bubblewrap
def test_an_isolated_program_is_told_of_its_time_limit(endpoint: Model) -> None:
    polite = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(5)))\n"
        "print('ready', flush=True)\nwhile True: time.sleep(0.05)"
    )

    def begun(timeout: float) -> Any:
        info = ran(endpoint, polite, timeout=timeout)
        return info if info["stdout"].startswith("ready\n") else None

    assert at_the_first_limit(begun) == {
        "exit_code": 5, "stdout": "ready\nsaved\n", "stderr": "", "timed_out": True
    }  # fmt: skip


def test_levels_that_cannot_isolate_a_program_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> Agent:
        return Agent.command(["true"], score=lambda task, finished: 1.0, isolated=True)

    monkeypatch.setattr(isolation, "why_not", lambda name: "" if name in (LANDLOCK, NONE) else "not here")
    monkeypatch.delenv(OPTION, raising=False)
    with pytest.raises(
        IsolationError, match=r"The agent's program 'true' starts processes.*'landlock'.*Install bubblewrap"
    ):
        made()
    monkeypatch.setattr(isolation, "why_not", lambda name: "" if name == NONE else "not here")
    with pytest.raises(IsolationError, match="this machine cannot isolate it"):
        made()
    monkeypatch.setenv(OPTION, NONE)  # allowed explicitly
    assert asyncio.run(made()().play(Model("http://127.0.0.1:9/v1", "sk"), Task(None, 0)))["reward"] == 1.0


def test_a_machine_without_bubblewrap_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The program is hidden where it is installed; what else the machine offers does not matter."""
    monkeypatch.delenv(OPTION, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    isolation.why_not.cache_clear()
    try:
        with pytest.raises(IsolationError, match=r"bubblewrap is not installed \(apt install bubblewrap\)"):
            Agent.command([sys.executable], score=lambda task, finished: 1.0, isolated=True)
    finally:
        isolation.why_not.cache_clear()


def test_what_can_be_read_is_checked(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"readable is a collection of files and folders, .*nothing, which does not exist"
    ):
        Agent.command(["true"], score=lambda task, finished: 1.0, isolated=True, readable=[tmp_path / "nothing"])
