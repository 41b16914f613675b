"""A server that this process starts ends with it, and with it whatever it has started. A small program stands for vLLM."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest
from processes import all_end

from agile_trainers.sampling.started_server import StartedServer

SERVER = """
import os, signal, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

def leave(*_):
    open(sys.argv[2], "w").close()
    os._exit(0)

signal.signal(signal.SIGTERM, leave)
print("hello", flush=True)
engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def command(folder: Path) -> tuple[list[str], str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [sys.executable, "-c", SERVER, str(port), str(folder / "left")], f"http://127.0.0.1:{port}"


def below(server: StartedServer) -> list[int]:
    keeper = psutil.Process(server._keeper.pid)
    return [keeper.pid, *(one.pid for one in keeper.children(recursive=True))]


def test_it_ends_with_its_process(tmp_path: Path) -> None:
    """Also while a fork of that process holds what the process held."""
    read, write = os.pipe()
    started, url = command(tmp_path)
    if (trainer := os.fork()) == 0:
        try:
            server = StartedServer(started, url, tmp_path / "server.log", environment=os.environ, timeout=30)
            if os.fork() == 0:
                ids = below(server)
                server.close()  # a fork's exit does not end what is its parent's
                os.write(write, " ".join(map(str, (os.getpid(), *ids))).encode())
            time.sleep(100)
        finally:
            os._exit(1)
    os.close(write)
    fork, *ids = map(int, os.read(read, 100).split())
    os.close(read)
    try:
        assert len(ids) == 3, "the keeper, the server and what it has started"
        gone, _ = psutil.wait_procs(list(map(psutil.Process, ids)), timeout=1)
        assert not gone
        os.kill(trainer, signal.SIGKILL)
        os.waitpid(trainer, 0)
        assert all_end(ids) and (tmp_path / "left").exists(), "it can remove what it has made"
        assert psutil.pid_exists(fork)
    finally:
        os.kill(fork, signal.SIGKILL)


def test_it_ends_when_it_is_closed_or_deleted(tmp_path: Path) -> None:
    for closes in (True, False):
        started, url = command(tmp_path)
        server = StartedServer(started, url, tmp_path / "server.log", environment=os.environ, timeout=30)
        ids = below(server)
        assert len(ids) == 3
        if closes:
            server.close()
        del server
        gc.collect()
        assert all_end(ids)
        (tmp_path / "left").unlink()


@pytest.mark.parametrize(
    ("program", "timeout", "message"),
    [
        (
            "print('no room'); raise SystemExit(3)",
            60,
            r"(?s)ended with exit code 3 before it was up.*server\.log.*no room",
        ),
        ("import os; os.abort()", 60, r"ended with exit code 134 before"),
        ("import time; time.sleep(60)", 0.3, r"is not up after vllm_server_timeout=0\.3 seconds.*server\.log"),
    ],
)
def test_a_server_that_does_not_come_up(tmp_path: Path, program: str, timeout: float, message: str) -> None:
    (tmp_path / "server.log").write_text("of an earlier run\n")
    _, url = command(tmp_path)
    with pytest.raises(RuntimeError, match=message) as error:
        StartedServer(
            [sys.executable, "-c", program], url, tmp_path / "server.log", environment=os.environ, timeout=timeout
        )
    assert "of an earlier run" not in str(error.value)
    commands = [
        one.as_dict(["cmdline"])["cmdline"] or [] for one in psutil.Process().children()
    ]  # none of one that ended
    assert not [command for command in commands if "process_tree" in " ".join(command)]
