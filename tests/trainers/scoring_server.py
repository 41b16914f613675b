"""A server that scores prompts as vLLM's does, with a transformers model, for tests without vLLM."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@dataclass
class Scoring:
    """A server under way."""

    url: str
    scored: int = 0
    breaks_off: bool = False
    """As vLLM's does when it is told to end: with status 200."""


def changed_model(base: Path, folder: Path) -> Path:
    """Save a model with the tokenizer of another, and other weights."""
    model, noise = AutoModelForCausalLM.from_pretrained(base), torch.Generator().manual_seed(1)
    for name, parameter in sorted(model.named_parameters()):
        if name.endswith("q_proj.weight"):
            parameter.data += torch.randn(parameter.shape, generator=noise) * 0.1
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


class Server(HTTPServer):
    """One that lets all connections of a batch wait: one that is dropped is tried again a second later."""

    request_queue_size = 128


@contextmanager
def teaching(folder: Path, longest: int = 4096) -> Iterator[Scoring]:
    """Serve the model of a folder."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)

    def scores(ids: list[int]) -> list[Any]:
        with torch.no_grad():
            log_probs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        served.scored += 1
        return [None, *({str(i): {"logprob": float(row[i])}} for i, row in zip(ids[1:], log_probs))]

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def answer(self, content: dict[str, Any]) -> None:
            body = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self.answer({"data": [{"id": "teacher", "max_model_len": longest}]})

        def do_POST(self) -> None:
            given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/detokenize":
                return self.answer({"prompt": tokenizer.decode(given["tokens"])})
            assert given["prompt_logprobs"] == 0 and given["model"] == "teacher"
            told = None if served.breaks_off else scores(given["prompt"])
            self.answer({"choices": [{"prompt_logprobs": told, "finish_reason": "length" if told else "abort"}]})

    server = Server(("127.0.0.1", 0), Handler)
    served = Scoring(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
