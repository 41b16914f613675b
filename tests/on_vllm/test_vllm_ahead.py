"""Batches ahead on vLLM, in this process and on a server: each by its own adapter, the same to the bit at any timing."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

import ahead_run
import requests
import torch
from chatter import Chatter, Late
from checkpointed_runs import SAVING, KillBefore, Killed, assert_same, weights
from environment_agents import Gathers, Plays
from games import make_trainer
from requests import ConnectionError
from scripted_runs import said, watched
from serving import Served, serving

from agile_trainers.envs.agent import Agent
from agile_trainers.rollout.generators.vllm.server import VllmServer

MISMATCH = "sampling/sampling_logp_difference/max"
RUN: dict[str, Any] = {
    "max_steps": 5, "per_device_train_batch_size": 8, "learning_rate": 0.3, "use_vllm": True, "stop_strings": None,
    "max_model_length": 256, "environment_workers": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def server(embedded_model: Path) -> Iterator[Served]:
    with serving(embedded_model, 256, more=["--max-loras", "8"]) as served:
        yield served


@pytest.fixture(scope="module", params=["colocate", "server"])
def where(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "colocate":
        return {"vllm_mode": "colocate"}
    return {"vllm_mode": "server", "vllm_server_base_url": request.getfixturevalue("server").url}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trained(model: Path, folder: Path, ahead: int, **changes: Any) -> tuple[Any, list[Any]]:
    trainer = make_trainer(model, folder, batches_ahead=ahead, **{**RUN, **changes})
    batches = watched(trainer)
    trainer.train()
    return trainer, [said(one) for one in batches]


@pytest.mark.parametrize("ahead", [1, 2])
def test_timing_changes_no_bit(embedded_model: Path, tmp_path: Path, where: dict[str, Any], ahead: int) -> None:
    one, batches = trained(embedded_model, tmp_path / "one", ahead, **where)
    logs = [log for log in one.state.log_history if MISMATCH in log]
    assert len(logs) == len(batches) == 5
    assert max(log[MISMATCH] for log in logs) < 1e-3, "the sampler is compared with the adapter that played"
    assert all(log["drift/kl"] > 1e-4 for log in logs[1:])
    other, others = trained(embedded_model, tmp_path / "other", ahead, environment=Late, **where)
    assert batches == others
    assert_same(weights(one), weights(other))


def test_a_killed_run_goes_on_to_the_bit(embedded_model: Path, tmp_path: Path, where: dict[str, Any]) -> None:
    whole, _ = trained(embedded_model, tmp_path / "whole", 2, **where)
    for kill in (1, 3, 99):
        again = make_trainer(
            embedded_model, tmp_path / "run", batches_ahead=2, callbacks=[KillBefore(kill)],
            **{**RUN, **SAVING, **where},
        )  # fmt: skip
        try:
            again.train(resume_from_checkpoint="auto")
        except Killed:
            assert not [one for one in threading.enumerate() if one.name == "rollout"]
    assert again.state.global_step == 5
    assert_same(weights(again), weights(whole))


def test_sigkill_beside_a_server_that_goes_on(embedded_model: Path, tmp_path: Path, server: Served) -> None:
    """While it answers, while a checkpoint is written: the next trainer plays on to the bit, and leaves nothing there."""

    def names() -> set[str]:
        answer = requests.get(f"{server.url}/v1/models").json()["data"]
        return {one["id"] for one in answer if one["parent"] is not None}

    def files() -> set[str]:
        return {path.name for path in tmp_path.glob("*/vllm/*/*")}

    before = names()
    whole = ahead_run.trainer(embedded_model, tmp_path / "whole", server.url)
    whole.train()
    script, chance = Path(ahead_run.__file__), random.Random(0)
    for step in (1, 2, 4):
        asked = [script, embedded_model, tmp_path / "run", server.url, step, chance.uniform(0.0, 0.3)]
        killed = subprocess.run([sys.executable, *map(str, asked)], capture_output=True, text=True, timeout=300)
        assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    left = {path.name for path in tmp_path.glob("run/vllm/*/*")}
    assert left and left <= names(), "what the last one was killed with"
    again = ahead_run.trainer(embedded_model, tmp_path / "run", server.url)
    assert not left & names() and not left & files()
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 6
    assert_same(weights(again), weights(whole))
    assert names() - before == files(), "of the two that live"


AGENTS: dict[str, Callable[[random.Random], Agent]] = {
    "in turn": lambda chance: Agent(Plays(Chatter, lambda task, number: chance.choice([0, 0, 0, 0.05]))),
    "at once": lambda chance: Agent(Gathers(lambda number: chance.choice([0, 0.002, 0.02]))),
}
"""Agents that wait before their calls."""


@pytest.mark.parametrize("kind", ["in turn", "at once"])
def test_agents_play_ahead(embedded_model: Path, tmp_path: Path, where: dict[str, Any], kind: str) -> None:
    """At any timing, and killed and resumed, to the bit; their clients wait through updates, or are answered meanwhile."""
    runs = []
    settings = {
        **RUN, **where, "environment_workers": 0, "max_turns": 9, "advantage_granularity": "trajectory", "batches_ahead": 2,
    }  # fmt: skip
    for name, delays in (("whole", random.Random(1)), ("late", random.Random(2))):
        trainer = make_trainer(embedded_model, tmp_path / name, environment=AGENTS[kind](delays), **settings)
        batches = watched(trainer)
        trainer.train()
        logs = [log for log in trainer.state.log_history if MISMATCH in log]
        assert len(logs) == len(batches) == 5 and max(log[MISMATCH] for log in logs) < 1e-3
        assert not [one.error for batch in batches for one in batch if one.error]
        assert [{one.version for one in batch} for batch in batches] == [{0}, {0}, {0}, {1}, {2}]
        runs.append(([[(*said([one]), one.paths) for one in batch] for batch in batches], weights(trainer)))
    for kill in (1, 3, 99):
        again = make_trainer(
            embedded_model, tmp_path / "run", environment=AGENTS[kind](random.Random(kill)), callbacks=[KillBefore(kill)],
            **{**settings, **SAVING},
        )  # fmt: skip
        try:
            again.train(resume_from_checkpoint="auto")
        except Killed:
            assert not [one for one in threading.enumerate() if one.name in ("rollout", "agent-server")]
    assert runs[0][0] == runs[1][0]
    assert_same(runs[0][1], runs[1][1])
    assert_same(weights(again), runs[0][1])


def test_a_server_is_used_during_updates(embedded_model: Path, tmp_path: Path, server: Served) -> None:
    trainer = make_trainer(
        embedded_model, tmp_path, batches_ahead=1, vllm_mode="server", vllm_server_base_url=server.url,
        **{**RUN, "max_turns": 4},
    )  # fmt: skip
    loss, ended = trainer._compute_loss, []

    def slowly(*args: Any, **kwargs: Any) -> Any:
        ahead = trainer.rollouts.ahead
        keys = [key for batch in ahead._open.values() for key in batch.keys]
        before = sum(map(ahead._rollout.has_ended, keys))
        deadline = time.monotonic() + 60
        while keys and not all(map(ahead._rollout.has_ended, keys)) and time.monotonic() < deadline:
            time.sleep(0.01)
        ended.append(sum(map(ahead._rollout.has_ended, keys)) - before)
        return loss(*args, **kwargs)

    trainer._compute_loss = slowly
    trainer.train()
    assert len(ended) == 5 and sum(ended) > 0
    assert all(trainer.rollouts.ahead.versions.get(5) is None for _ in ended)


def test_a_server_that_dies_is_named_within_seconds(embedded_model: Path, tmp_path: Path) -> None:
    with serving(embedded_model, 256, more=["--max-loras", "8"]) as served:
        trainer = make_trainer(
            embedded_model, tmp_path, batches_ahead=1, vllm_mode="server",
            vllm_server_base_url=served.url, **{**RUN, "max_steps": 50},
        )  # fmt: skip
        loss, died = trainer._compute_loss, []

        def dies(*args: Any, **kwargs: Any) -> Any:
            if trainer.state.global_step == 2 and not died:
                served.kill()
                died.append(time.monotonic())
            return loss(*args, **kwargs)

        trainer._compute_loss = dies
        with pytest.raises(ConnectionError, match=f"The vLLM server at {served.url} does not answer"):
            trainer.train()
    assert trainer.state.global_step == 3
    assert not [one for one in threading.enumerate() if one.name == "rollout"]


def test_a_server_of_two_that_dies_costs_no_token(embedded_model: Path, tmp_path: Path, server: Served) -> None:
    with serving(embedded_model, 256, more=["--max-loras", "8"]) as other:
        where = {"vllm_mode": "server", "vllm_server_base_url": f"{server.url},{other.url}"}
        whole, batches = trained(embedded_model, tmp_path / "whole", 1, **where)
        assert whole.sampler.vllm.engine.used == (0, 1)
        trainer = make_trainer(embedded_model, tmp_path / "killed", batches_ahead=1, **{**RUN, **where})
        answer, killed = VllmServer.generate, []

        def kills(self: VllmServer, *args: Any, **kwargs: Any) -> Any:
            """When the server has just been asked for the third batch."""
            if self.url == other.url and trainer.state.global_step == 2 and not killed:
                killed.append(threading.Timer(0, other.kill))
                killed[0].start()
            return answer(self, *args, **kwargs)

        VllmServer.generate = kills  # type: ignore[method-assign]
        try:
            others = watched(trainer)
            trainer.train()
        finally:
            VllmServer.generate = answer  # type: ignore[method-assign]
        assert killed and trainer.sampler.vllm.engine.used == (0,)
    assert batches == [said(one) for one in others]
    assert_same(weights(whole), weights(trainer))
