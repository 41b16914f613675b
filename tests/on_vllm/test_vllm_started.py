"""A server that the trainer starts: it trains, ends with the trainer however that ends, and says why it did not start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

import started_run
from games import Chatter, make_trainer
from launched_runs import distance, launch, weights
from requests import ConnectionError

from agile_trainers.sampling.started_server import _is_up

RUN: dict[str, Any] = {
    "max_steps": 2, "per_device_train_batch_size": 8, "use_vllm": True, "vllm_mode": "server", "vllm_server_start": True,
    "stop_strings": None, "max_model_length": 256, "batches_ahead": 1,
}  # fmt: skip
HERE = Path(__file__).parent


def tree(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def ended(processes: list[psutil.Process]) -> bool:
    _, left = psutil.wait_procs(processes, timeout=60)
    return all(one.status() == psutil.STATUS_ZOMBIE for one in left if one.is_running())


def test_the_trainer_starts_a_server_and_ends_it(embedded_model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(embedded_model, tmp_path, environment=Chatter, **RUN)
    policy: Any = trainer.sampler.vllm
    server = tree(psutil.Process(policy._started._keeper.pid))
    assert len(server) >= 3, "the keeper, the server, its engine"
    assert policy.engine.servers[0].info["lora_config"]["max_loras"] == 3
    trainer.train()
    mismatches = [log["sampling/sampling_logp_difference/max"] for log in trainer.state.log_history if "loss" in log]
    assert len(mismatches) == 2 and max(mismatches) < 1e-3
    policy.close()
    assert ended(server)
    with pytest.raises(
        ConnectionError, match=r"The trainer started it, and its output is in .*vllm/server\.log\. Resume"
    ):
        policy.engine.generate([3], {})


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, "exits"])
def test_no_server_outlives_the_trainer(embedded_model: Path, tmp_path: Path, how: Any) -> None:
    """Also while a fork of the trainer holds what the trainer held."""
    command = [sys.executable, str(HERE / "run_with_server.py"), str(embedded_model), str(tmp_path), str(how)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    assert run.stdout is not None and run.stdin is not None
    keeper, fork = map(int, next(line for line in run.stdout if line.startswith("ids ")).split()[1:])
    server = tree(psutil.Process(keeper))
    try:
        if how == "exits":
            run.stdin.write("\n")
            run.stdin.flush()
        else:
            run.send_signal(how)
        run.wait()
        assert ended(server)
        assert psutil.pid_exists(fork)
    finally:
        os.kill(fork, signal.SIGKILL)


def test_a_server_that_does_not_start(embedded_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "nonsense")
    with pytest.raises(RuntimeError, match=r"(?s)ended with exit code 1 before it was up.*server\.log.*nonsense"):
        make_trainer(embedded_model, tmp_path, environment=Chatter, **RUN)
    with pytest.raises(RuntimeError, match=r"is not up after vllm_server_timeout=0\.5 seconds"):
        make_trainer(embedded_model, tmp_path, environment=Chatter, **RUN, vllm_server_timeout=0.5)
    assert not [one for one in psutil.Process().children() if "process_tree" in " ".join(one.cmdline())]


def test_two_processes_have_one_server(embedded_model: Path, tmp_path: Path) -> None:
    """The first starts it, the other waits for its address; they play and train as one process does."""
    (one := tmp_path / "one").mkdir()
    (two := tmp_path / "two").mkdir()
    done = launch("cpu/ddp", Path(started_run.__file__), embedded_model, two)
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [json.loads((two / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert [rank["started"] for rank in ranks] == [True, False] and ranks[0]["url"] == ranks[1]["url"]
    until = time.monotonic() + 60
    while _is_up(ranks[0]["url"]):
        assert time.monotonic() < until, "it ends with its trainer"
        time.sleep(0.1)
    started_run.play(embedded_model, one)
    single = json.loads((one / "rank-0.json").read_text())
    assert single["said"] == [first + second for first, second in zip(*(rank["said"] for rank in ranks), strict=True)]
    assert distance(weights(one / "end"), weights(two / "end")) < 1e-5
