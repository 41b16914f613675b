"""An environment that does not answer, without a timeout: it is named once, and an interrupt does not wait for it."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from agile_trainers.checkpoints.stopping import GracefulStop
from agile_trainers.rollout import environment_pool
from agile_trainers.rollout.environment_pool import EnvironmentPool, EnvironmentTimeoutError, Outcome


class Hangs:
    """Answers no step, and takes errors for temporary ones, as code that asks a server does."""

    let_go = threading.Event()
    """Set at the end of a test, so that no thread stays in the process."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return "Question", {}

    def step(self, action: str) -> Any:
        while not self.let_go.is_set():
            try:
                self.let_go.wait()
            except Exception:
                continue


class HangsAwaiting(Hangs):
    async def step(self, action: str) -> Any:
        import asyncio

        await asyncio.Event().wait()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The warnings of silent calls. Each is answered by Ctrl-C. At the end no thread is left."""
    threads = set(threading.enumerate())
    heard: list[str] = []

    def warning(text: str) -> None:
        heard.append(text)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(environment_pool, "SILENT_SECONDS", 0.01)
    monkeypatch.setattr(environment_pool.logger, "warning", warning)
    monkeypatch.setattr(Hangs, "let_go", threading.Event())
    yield heard
    Hangs.let_go.set()
    for thread in set(threading.enumerate()) - threads:
        end = time.monotonic() + 60
        while thread.is_alive() and time.monotonic() < end:
            gc.collect()  # the threads of a pool end with it, and one of another test may be in a cycle
            thread.join(0.1)
        assert not thread.is_alive(), thread.name


def outcome_of(pool: EnvironmentPool) -> Outcome:
    (outcome,) = pool.outcomes(block=True)
    return outcome


@pytest.mark.parametrize(
    ("factory", "workers", "asked"),
    [
        (Hangs, 0, "environment_timeout and environment_workers"),
        (Hangs, 2, "environment_timeout to"),
        (HangsAwaiting, 0, ""),
    ],
    ids=["inline", "thread", "async"],
)
def test_it_is_named_once_and_an_interrupt_ends_its_episode(
    factory: type[Hangs], workers: int, asked: str, said: list[str]
) -> None:
    pool, stop = EnvironmentPool(factory, workers), GracefulStop(None)  # type: ignore[arg-type]
    pool.environment(3)
    with stop.heard():
        pool.step(3, "x")
        outcome = outcome_of(pool)
    assert isinstance(outcome.error, EnvironmentTimeoutError) and "when the run was interrupted" in str(outcome.error)
    assert outcome.episode == 3 and outcome.method == "step"
    assert len(said) == 1 and f"{factory.__name__}: step() of episode 3 " in said[0] and asked in said[0]
    pool.release(3, reusable=False)
    pool.close()


def test_an_interrupt_just_before_the_call_ends_its_episode(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    watch = environment_pool._watch_inline

    def slowly(pool: EnvironmentPool) -> Any:
        watch(pool)
        while not said:  # the main thread handles the signal here
            time.sleep(0.001)
        pytest.fail("the interrupt was passed over")

    monkeypatch.setattr(environment_pool, "_watch_inline", slowly)
    pool, stop = EnvironmentPool(Hangs), GracefulStop(None)  # type: ignore[arg-type]
    pool.environment(3)
    with stop.heard():
        pool.step(3, "x")
    assert isinstance(outcome_of(pool).error, EnvironmentTimeoutError)
    pool.release(3, reusable=False)
    pool.close()


def test_calls_that_answer_are_not_named(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_pool, "SILENT_SECONDS", 3600.0)
    pool = EnvironmentPool(Hangs, 1)
    pool.reset(0, 0, None)
    environment_pool.end_silent_calls()
    assert outcome_of(pool).error is None and not said
    pool.close()
