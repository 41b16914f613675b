"""Several servers that serve the same adapters; those that do not answer are left out. No vLLM is needed."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("requests", reason="requests is not installed: pip install 'agile-trainers[vllm]'")

import requests
import torch
from peft import LoraConfig
from requests import ConnectionError

from agile_trainers.rollout.generators.vllm.servers import NotServed, VllmServers


class Server(ThreadingHTTPServer):
    """Loads, unloads and answers as vLLM's does, and with the adapter's name for an answer."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.adapters: dict[str, bool] = {}
        """Name to whether its files were there when it was loaded."""
        self.asked: list[int] = []
        self.loads = 0
        self.refuses, self.meanwhile = False, threading.Event()
        self.meanwhile.set()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def end(self) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        adapters, status = self.server.adapters, 200
        if self.path == "/load":
            again = body["name"] in adapters
            adapters[body["name"]] = (Path(body["folder"]) / "adapter_model.safetensors").exists()
            self.server.loads += 1
            status = 409 if again else 400 if self.server.refuses else 200
        elif self.path == "/unload":
            status = 200 if adapters.pop(body["name"], None) else 404
        else:
            self.server.asked.append(body["ids"][0])
            self.server.meanwhile.wait(20)
            status = 200 if body["model"] in adapters else 404
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class Client:
    """What `VllmServer` does, without TRL's client, which needs vLLM."""

    def __init__(self, server: Server, length: int) -> None:
        self.url = server.url
        self.max_batch_size, self.vocab_size, self.max_model_length = 8, 40, length

    def _post(self, route: str, **body: Any) -> None:
        status = requests.post(f"{self.url}/{route}", json=body).status_code
        if status == 404 and route == "generate":
            raise NotServed
        if status != 200:
            raise ValueError(f"{route}: {status}{' has already been loaded' if status == 409 else ''}")

    def load(self, name: str, folder: Path) -> None:
        self._post("load", name=name, folder=str(folder))

    def unload(self, name: str) -> None:
        self._post("unload", name=name)

    def generate(self, ids: list[int], fields: dict[str, Any], adapter: str | None) -> Any:
        self._post("generate", ids=ids, model=adapter)
        return ids, [0.0], "stop", None


@pytest.fixture
def running() -> Iterator[list[Server]]:
    made = [Server() for _ in range(3)]
    yield made
    for server in made:
        server.meanwhile.set()
        server.end()


@pytest.fixture
def servers(running: list[Server], tmp_path: Path) -> VllmServers:
    clients: list[Any] = [Client(server, 64 + place) for place, server in enumerate(running)]
    return VllmServers(clients, tmp_path)


def load(servers: VllmServers) -> str:
    return servers.add_adapter({"weight": torch.ones(2)}, LoraConfig())[0]


def test_an_adapter_is_loaded_on_each_and_an_episode_stays(running: list[Server], servers: VllmServers) -> None:
    name = load(servers)
    assert [server.adapters for server in running] == [{name: True}] * 3
    for _ in range(2):
        for episode in range(7):
            servers.generate([episode], {}, name, episode)
    assert [server.asked for server in running] == [[0, 3, 6] * 2, [1, 4] * 2, [2, 5] * 2]
    assert servers.max_model_length == 64
    assert servers.files.names() == [name]
    servers.drop_adapter(name)
    assert [server.adapters for server in running] == [{}] * 3 and servers.files.names() == []


def test_the_adapter_of_requests_that_name_none(running: list[Server], servers: VllmServers) -> None:
    for _ in range(2):
        servers.load_adapter({"weight": torch.ones(2)}, LoraConfig())
        servers.generate([1], {}, None, 1)
    assert [list(server.adapters) for server in running] == [[servers.adapter]] * 3


def test_a_server_that_was_started_again_knows_no_adapter(running: list[Server], servers: VllmServers) -> None:
    """Between two rollouts, of which the next one loads its own on all of them."""
    servers.load_adapter({"weight": torch.ones(2)}, LoraConfig())
    running[1].adapters.clear()
    servers.load_adapter({"weight": torch.ones(2)}, LoraConfig())
    assert [list(server.adapters) for server in running] == [[servers.adapter]] * 3
    assert servers.files.names() == [servers.adapter]


def test_a_server_that_was_started_again_loads_what_a_request_names(
    running: list[Server], servers: VllmServers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With batches ahead earlier policies play; other processes of the run write no adapters, and ask for them too."""
    first, second = load(servers), load(servers)
    other = VllmServers([Client(server, 64) for server in running], tmp_path)  # type: ignore[misc]
    running[1].adapters.clear()
    with ThreadPoolExecutor(12) as threads:
        asked = [(which, one, place) for which in (servers, other) for one in (first, second) for place in range(6)]
        answers = list(threads.map(lambda it: it[0].generate([it[2]], {}, it[1], it[2])[0], asked))
    assert answers == [[place] for _, _, place in asked]
    assert [server.adapters for server in running] == [{first: True, second: True}] * 3
    assert [server.loads for server in (running[0], running[2])] == [2, 2] and servers.used == (0, 1, 2)
    assert {record.getMessage().partition(" was started again")[0] for record in caplog.records} == {
        f"The vLLM server at {running[1].url}"
    }
    running[1].adapters.clear()
    running[1].refuses = True
    with pytest.raises(ValueError, match="load: 400"):
        servers.generate([1], {}, first, 1)
    running[1].adapters.clear()
    servers.files.delete(first)
    with pytest.raises(ValueError, match=f"{running[1].url} does not know the adapter {first}, and its files are gone"):
        servers.generate([1], {}, first, 1)
    running[1].adapters.clear()
    with pytest.raises(NotServed):
        servers.generate([1], {}, None, 1)


def test_what_a_killed_process_has_left_is_dropped(running: list[Server], servers: VllmServers, tmp_path: Path) -> None:
    """Of one that lives, begins or ran on another machine nothing is. A server that was started since knows none of it."""
    kept, (place,) = load(servers), tmp_path.iterdir()
    begins = Path(tempfile.mkdtemp(prefix=f"{place.name.rpartition('-')[0]}-", dir=tmp_path))
    elsewhere = tmp_path / "vllm-policy-elsewhere-x"
    (elsewhere / "policy-1").mkdir(parents=True)
    gone = place.with_name(f"{begins.name}-gone")  # what lists the others finds it, and it is removed meanwhile
    gone.symlink_to(tmp_path / "nothing")
    stays = {place, begins, elsewhere, gone}
    killed = os.fork()
    if killed == 0:
        try:
            others = VllmServers([Client(server, 64) for server in running[:2]], tmp_path)  # type: ignore[misc]
            load(others)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(killed, 0)
    assert [len(server.adapters) for server in running] == [2, 2, 1] and len(list(tmp_path.iterdir())) == 5
    resumed = VllmServers([Client(server, 64) for server in running], tmp_path)  # type: ignore[misc]
    resumed.drop_left()
    assert [list(server.adapters) for server in running] == [[kept]] * 3
    assert {*tmp_path.iterdir()} == stays and servers.files.names() == [kept]
    load(resumed)
    servers.drop_left()
    assert [len(server.adapters) for server in running] == [2] * 3


def test_requests_of_a_server_that_ends_go_elsewhere(
    running: list[Server], servers: VllmServers, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of the others stay where they are; several requests find it dead at the same time."""
    name = load(servers)
    running[1].end()
    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(lambda episode: servers.generate([episode], {}, name, episode), range(12)))
    assert [ids for ids, *_ in answers] == [[episode] for episode in range(12)]
    assert servers.used == (0, 2) and running[1].asked == []
    assert Counter(running[0].asked) == Counter([0, 3, 6, 9, 4, 10]) and Counter(running[2].asked) == Counter(
        [2, 5, 8, 11, 1, 7]
    )
    (warned,) = [record.getMessage() for record in caplog.records]
    assert f"{running[1].url} does not answer" in warned and running[0].url in warned and running[2].url in warned
    servers.drop_adapter(name)
    again = load(servers)
    assert [list(running[place].adapters) for place in (0, 2)] == [[again]] * 2


def test_a_server_that_is_gone_before_an_adapter_is_loaded(running: list[Server], servers: VllmServers) -> None:
    running[0].end()
    name = load(servers)
    assert servers.used == (1, 2) and running[2].adapters == {name: True}
    servers.generate([0], {}, name, 0)


def test_the_last_server_is_not_left_out(running: list[Server], servers: VllmServers) -> None:
    name = load(servers)
    for server in running:
        server.end()
    for _ in range(2):
        with pytest.raises(ConnectionError):
            servers.generate([0], {}, name, 0)
        assert len(servers.used) == 1
    with pytest.raises(ConnectionError):
        load(servers)
    assert servers.files.names() == [name]


def test_an_adapter_that_one_refuses_is_left_on_none(running: list[Server], servers: VllmServers) -> None:
    running[1].refuses = True
    with pytest.raises(ValueError, match="load: 400"):
        load(servers)
    assert running[0].adapters == {} and running[2].adapters == {} and servers.files.names() == []
