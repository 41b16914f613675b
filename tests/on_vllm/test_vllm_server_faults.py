"""A server, or a gateway before it, that answers badly or in part: it is said, soon, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

import requests
from engines import policy, run
from generated import EOS, VOCAB, qwen2, uniforms
from peft import get_peft_model_state_dict
from serving import serving

from agile_trainers.rollout.generators import GenerationOutput, GenerationRequest, SamplingSettings
from agile_trainers.rollout.generators.vllm import server as server_module
from agile_trainers.rollout.generators.vllm.server import ServerGenerator, VllmServer
from agile_trainers.rollout.generators.vllm.servers import VllmServers


class Gateway(ThreadingHTTPServer):
    """Answers as a healthy server does, except where adapters are loaded."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.fault = ""
        self.release = threading.Event()
        self.modes: list[int] = []
        self.ends, self.asked = "stop", dict[str, Any]()


class _Handler(BaseHTTPRequestHandler):
    server: Gateway

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "base"}], "vllm_config": {"model_config": {"max_model_len": 64}}}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "lora_path" in body:
            folder = Path(body["lora_path"])
            self.server.modes = [
                stat.S_IMODE(path.stat().st_mode) for path in (folder.parent, folder, *folder.iterdir())
            ]
        if self.path == "/v1/completions":
            self.server.asked = body
            told = {"tokens": ["token_id:5", "token_id:6"], "token_logprobs": [-1.0, -2.0]}
            told["top_logprobs"] = [{token: value} for token, value in zip(*told.values())]
            choice = {"prompt_token_ids": body["prompt"][0], "token_ids": [5, 6], "logprobs": told}
            self._send(200, json.dumps({"choices": [choice | {"finish_reason": self.server.ends}]}))
        elif self.server.fault == "403":
            self._send(403, "Forbidden by the gateway", "text/plain")
        elif self.server.fault == "hang":
            self.server.release.wait(60)
        else:
            self._send(200, "{}")

    def _send(self, status: int, text: str, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    made = Gateway()
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.release.set()
    made.shutdown()
    made.server_close()
    thread.join()


@pytest.fixture
def server(gateway: Gateway, tmp_path: Path) -> VllmServers:
    return VllmServers([VllmServer(gateway.url, timeout=0, max_batch_size=2, vocab_size=VOCAB)], tmp_path)


def load(server: VllmServers) -> None:
    model = policy(1)
    server.load_adapter(get_peft_model_state_dict(model), model.peft_config["default"])


def left_in(folder: Path) -> list[Path]:
    return list(folder.glob("*/policy-*"))


def test_another_user_can_read_the_adapter(gateway, server):
    load(server)
    assert gateway.modes[:2] == [0o755, 0o755] and set(gateway.modes[2:]) == {0o644}


def test_a_refusal_in_plain_text_is_shown(gateway, server, tmp_path):
    gateway.fault = "403"
    with pytest.raises(ValueError, match=r"403 Forbidden by the gateway.*proxy"):
        load(server)
    assert left_in(tmp_path) == []


def test_a_server_that_hangs_is_given_up(gateway, server, tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "ANSWER_SECONDS", 0.2)
    gateway.fault = "hang"
    with pytest.raises(requests.exceptions.ConnectionError):
        load(server)
    assert left_in(tmp_path) == []


def test_a_server_that_is_told_to_end_and_started_again(tmp_path):
    """It holds requests open, which is noticed; released, it ends. The next one loads the adapters that requests name."""
    folder, more = tmp_path / "base", ["--skip-tokenizer-init", "--max-num-seqs", "8"]
    qwen2(hidden_size=128, intermediate_size=64).save_pretrained(folder)
    greedy = {"temperature": 0.0, "max_tokens": 8}

    def answers():
        return [servers.generate([3, 4, 5], greedy, name)[0] for name in names]

    with serving(folder, 256, more=more) as served:
        servers = VllmServers([VllmServer(served.url, timeout=0, max_batch_size=64, vocab_size=VOCAB)], tmp_path)
        weights = [(get_peft_model_state_dict(model), model.peft_config["default"]) for model in map(policy, (1, 2))]
        names = [servers.add_adapter(*one)[0] for one in weights]
        before = answers()
        with closing(ServerGenerator(servers, eos_token_ids=[], settings=SamplingSettings())) as generator:
            for episode in range(64):
                generator.submit(GenerationRequest(episode, [3, 4], 200, uniforms(episode)))
            time.sleep(1)
            os.killpg(served.process.pid, signal.SIGTERM)
            started = time.monotonic()
            with pytest.raises(requests.exceptions.ConnectionError, match=f"{served.url} does not answer any more"):
                while True:
                    generator.step()
        assert time.monotonic() - started < 120, "not the ten minutes of a request"
        served.process.wait(60)
    with serving(folder, 256, port=int(served.url.rpartition(":")[2]), more=more):
        assert answers() == before and before[0] != before[1]
        servers.close()


def test_a_dead_server_is_noticed_within_seconds():
    """By the waits between attempts, not by a clock."""
    retries = server_module.RETRIES
    assert sum(retries.backoff_factor * 2**attempt for attempt in range(retries.total)) < 10


def ask(server: VllmServers, most: int = 9) -> GenerationOutput:
    with closing(ServerGenerator(server, eos_token_ids=EOS, settings=SamplingSettings())) as generator:
        return run(generator, GenerationRequest(0, [3, 4], most, uniforms(0)))


def test_an_answer_that_is_broken_off_is_none(gateway, server):
    """A server that is told to end sends what it has by then, with status 200."""
    gateway.ends = "abort"
    with pytest.raises(
        requests.exceptions.ConnectionError, match=r"does not answer any more.*broke an answer off.*abort"
    ):
        ask(server)


@pytest.mark.parametrize("most", [9, 2])
def test_an_answer_ends_as_the_server_says(gateway, server, most):
    """A server may have a limit of its own (`--override-generation-config`)."""
    for ends in ("stop", "length"):
        gateway.ends = ends
        answer = ask(server, most)
        assert (answer.token_ids, answer.logprobs, answer.finish_reason) == ([5, 6], [-1.0, -2.0], ends)


def test_the_defaults_of_a_server_are_not_sampled_with(gateway, server):
    """Each that vLLM takes from the model's generation config is named in the request."""
    ask(server)
    expected = {
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "max_tokens": 9,
    }  # fmt: skip
    assert {name: gateway.asked.get(name) for name in expected} == expected
