"""Times training steps with batches ahead on a real vLLM server, and rollouts on vLLM in process (``make bench-vllm``).

On a server: sixteen episodes a batch, of two to six turns; every step of an environment takes 200 ms, and answers end where
a policy of random weights ends them. Trainer and server have a processor core each, with and without batches ahead. The bar:
a step with one batch ahead takes at most 1.15 times the longer of rollout and update without any, where the update is what
is no rollout. Balanced: the same with a larger model and long observations, which make the two about equally long.

In process: sixteen episodes of 1 to 16 turns, without waiting. The bar: with two batches ahead a rollout takes at most 0.7
of the time that it takes without.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from peft import LoraConfig
from transformers import TrainerCallback

from agile_trainers.embedded import make_embedded_model
from agile_trainers.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer

RESULTS = Path(__file__).parent / "results" / "ahead_steps.json"
BARS = {"server": 1.15, "balanced": 1.15, "process": 0.7}
STEPS, SKIPPED = 8, 2
SERVER = """--dtype float32 --logprobs-mode processed_logprobs --enable-lora --max-lora-rank 8 --max-loras 4
--max-num-seqs 32 --enforce-eager --block-size 32 --no-enable-chunked-prefill --max-num-batched-tokens 4096
--max-model-len 1024"""


class Waits:
    """Answers after 200 ms, for two to six turns by the seed."""

    turns, seconds, said = (2, 6), 0.2, "And on."

    async def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.left = random.Random(seed).randint(*self.turns)
        return "Go on.", {}

    async def step(self, action: str) -> Any:
        await asyncio.sleep(self.seconds)
        self.left -= 1
        return self.said, float(len(action) % 3), self.left == 0, False, {}


class Tells(Waits):
    """Answers after 200 ms, at length."""

    said = "And on. " * 36


class Ragged(Waits):
    """Answers at once, for 1 to 16 turns."""

    turns, seconds = (1, 16), 0.0


class Clock(TrainerCallback):
    """Keeps the wall time at which each step ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note a step's end."""
        self.ends.append(time.perf_counter())


def train(model: Path, ahead: int, environment: type, **options: Any) -> dict[str, float]:
    """Train some steps; return the seconds of a step, and in it of rollout and update."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = MultiTurnGRPOTrainer(
            str(model),
            args=MultiTurnGRPOConfig(
                folder, max_steps=STEPS, num_iterations=1, batches_ahead=ahead, num_generations=4, max_turns=16,
                max_model_length=1024,
                use_vllm=True, learning_rate=1e-6, report_to="none", save_strategy="no", disable_tqdm=True,
                logging_steps=1, bf16=False, use_cpu=True, gradient_checkpointing=False, diagnosis_interval=0,
                log_rollouts=False, max_logprob_gap=1.0, **options,
            ),
            environment=environment,
            peft_config=LoraConfig(r=8, target_modules="all-linear"),
            callbacks=[clock],
        )  # fmt: skip
        trainer.train()
    logs = [log for log in trainer.state.log_history if "time/rollout" in log][SKIPPED:]
    ends = clock.ends[SKIPPED - 1 :]
    return {
        "step": (ends[-1] - ends[0]) / (len(ends) - 1),
        "rollout": sum(log["time/rollout"] for log in logs) / len(logs),
        "update": sum(log["time/update"] for log in logs) / len(logs),
    }


@contextmanager
def serving(model: Path, core: int) -> Iterator[str]:
    """Start a server on one processor core, and end it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1"]
    switches = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--port", str(port), *SERVER.split()], env={**os.environ, **switches}, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/health").close()
                break
            except OSError:
                if process.poll() is not None:
                    raise RuntimeError("The server did not start.") from None
                time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, 15)
        process.wait()


def on_server(model: Path, repetitions: int, environment: type = Waits, tokens: int = 24) -> list[dict[str, Any]]:
    """Time steps with none and one ahead, in turns."""
    cores = sorted(os.sched_getaffinity(0))
    results = []
    with serving(model, cores[0]) as url:
        os.sched_setaffinity(0, {cores[-1]})
        options: dict[str, Any] = {
            "vllm_mode": "server", "vllm_server_base_url": url, "per_device_train_batch_size": 16,
            "max_new_tokens": tokens,
        }  # fmt: skip
        train(model, 0, environment, **options)  # warms up
        for _ in range(repetitions):
            none, one = (train(model, ahead, environment, **options) for ahead in (0, 1))
            results.append({"none": none, "one": one, "ratio": ratio(none, one)})
            print(json.dumps(results[-1]), flush=True)
    os.sched_setaffinity(0, set(cores))
    return results


def ratio(none: dict[str, float], one: dict[str, float]) -> float:
    """Return the time of a step with one ahead over the longer of rollout and update with none."""
    return one["step"] / max(none["rollout"], none["step"] - none["rollout"])


def in_process(model: Path, repetitions: int) -> list[dict[str, Any]]:
    """Time rollouts with none and two ahead, in turns."""
    options: dict[str, Any] = {"per_device_train_batch_size": 16, "max_new_tokens": 24}
    results = []
    for _ in range(repetitions):
        none, two = (train(model, ahead, Ragged, **options) for ahead in (0, 2))
        results.append({"none": none, "two": two, "ratio": two["rollout"] / none["rollout"]})
        print(json.dumps(results[-1]), flush=True)
    return results


def balanced(model: Path, repetitions: int) -> list[dict[str, Any]]:
    """Time steps whose update is about as long as their rollout."""
    larger = make_embedded_model(model.with_name("larger"), hidden_size=128, num_layers=4, intermediate_size=256)
    return on_server(larger, repetitions, Tells, tokens=8)


MEASURES = {"server": on_server, "balanced": balanced, "process": in_process}


def main() -> int:
    """Measure and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5, help="measurements of each side")
    parser.add_argument("--parts", nargs="+", choices=list(BARS), default=list(BARS), help="run only these")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        model = make_embedded_model(Path(folder) / "model")
        for part in options.parts:
            results[part] = MEASURES[part](model, options.repetitions)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    found = {part: median(one["ratio"] for one in ones) for part, ones in results.items()}
    for part, value in found.items():
        print(f"{part}: {value:.2f}, bar {BARS[part]}")
    return 0 if all(value <= BARS[part] for part, value in found.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
