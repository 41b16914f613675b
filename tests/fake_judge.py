"""A judge behind HTTP whose answers and faults the content of a request decides, and episodes to judge."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from agile_trainers.types import StopReason, Trajectory, Turn

FAULTS = ("status 500", "status 429", "no completion", "no answer")
"""Faults of a try; after them the same question is answered."""
BAD = ("out of scale", "no number", "as text", "quoted", "more", "none", "cut")
"""Answers that are none, however often one asks."""
BAD_ANSWERS = {
    "out of scale": '{"reason": "", "score": 1.5}',
    "no number": '{"reason": "", "score": NaN}',
    "as text": '{"reason": "", "score": "1.0"}',
    "quoted": 'The model says {"reason": "", "score": 1.0}, which I doubt.',
    "more": '{"reason": "", "score": 1.0, "bonus": 5}',
    "none": "null",
    "cut": '{"reason": "so it goes o',
}


def draw(text: str, salt: str = "") -> float:
    """A number from 0 to 1 that a text decides."""
    return int(sha256(f"{salt}{text}".encode()).hexdigest()[:8], 16) / 16**8


def record_of(body: dict[str, Any]) -> Any:
    """What a question shows."""
    return json.loads(body["messages"][1]["content"])


def said_by_model(record: Any) -> list[str]:
    return [line["content"] for line in record["conversation"] if "turn" in line]


def score_of(answers: list[str]) -> float:
    """The score that the fake judge gives to the answers of an episode."""
    return round(draw("|".join(answers), "score"), 6)


def truth(body: dict[str, Any]) -> dict[str, Any]:
    """The answer to a question, whatever the episode says."""
    record = record_of(body)
    if "conversations" in record:
        scores = {one["number"]: score_of(said_by_model(one)) for one in record["conversations"]}
        return {"reason": "ranked", "ranking": [[n] for n in sorted(scores, key=scores.__getitem__, reverse=True)]}
    answers = said_by_model(record)
    if "scores" in body["response_format"]["json_schema"]["schema"]["properties"]:
        return {"reason": "turn by turn", "scores": [score_of([answer]) for answer in answers]}
    return {"reason": "since " + answers[-1], "score": score_of(answers)}


class FakeJudge:
    """The server.

    Args:
        fault: Returns the fault of a try, given the request and how often it was made before; None for none. ``status 429 7
            words`` has ``Retry-After`` and words in its body; ``body text`` is a response of that text.
        answer: Returns the answer to a request, as text or as data.
    """

    def __init__(
        self,
        fault: Callable[[dict[str, Any], int], str | None] = lambda body, before: None,
        answer: Callable[[dict[str, Any]], Any] = truth,
    ) -> None:
        self.fault, self.answer = fault, answer
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.asked, self.ended = threading.Event(), threading.Event()
        self.most, self._now = 0, 0
        self._tries: Counter[str] = Counter()
        self._lock = threading.Lock()

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        text = json.dumps(body["messages"])
        with self._lock:
            before = self._tries[text]
            self._tries[text] += 1
            self._now += 1
            self.most = max(self.most, self._now)
            self.requests.append(body)
            self.keys.append(handler.headers.get("Authorization"))
        self.asked.set()
        fault = self.fault(body, before)
        status, content, after = 200, "", ""
        if fault == "no answer":
            self.ended.wait(20)
            handler.close_connection = True
        elif fault is not None and fault.startswith("status"):
            _, number, *after_words = fault.split()
            status, content = int(number), f"busy: {self.keys[-1]} {' '.join(after_words[1:])}"
            after = "".join(after_words[:1])
        elif fault == "no completion":
            content = "<html>gateway</html>"
        elif fault is not None and fault.startswith("body "):
            content = fault.removeprefix("body ")
        elif fault in BAD_ANSWERS:
            content = completion(BAD_ANSWERS[fault])
        else:
            answer = self.answer(body)
            content = completion(answer if isinstance(answer, str | None) else json.dumps(answer))
        with self._lock:
            self._now -= 1
        if fault != "no answer":
            sent = content.encode()
            handler.send_response(status)
            handler.send_header("Content-Length", str(len(sent)))
            if after:
                handler.send_header("Retry-After", after)
            handler.end_headers()
            handler.wfile.write(sent)


def completion(content: str | None) -> str:
    usage = {"prompt_tokens": 100, "completion_tokens": 10}
    choice = {"message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
    return json.dumps({"choices": [choice], "usage": usage})


@contextmanager
def serving(fake: FakeJudge) -> Iterator[str]:
    """The address of a server, inside a ``with`` block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # a body would wait 40 ms for an answer to its headers

        def do_POST(self) -> None:
            fake.handle(self)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128

        def handle_error(self, *_: Any) -> None:
            """A judge that gave up has closed its connection."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        fake.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


def episode(*answers: str, seed: int = 0, **changes: Any) -> Trajectory:
    """An episode of some answers, one token each."""
    turns = [Turn(k, k + 1, answer, "stop", observation=f"so {k}") for k, answer in enumerate(answers)]
    prompt = [{"role": "user", "content": "begin"}]
    size = len(answers)
    return Trajectory([1], [2] * size, [0.0] * size, turns, StopReason.TERMINATED, prompt, seed=seed, **changes)
