"""A trainer that is closed, deleted or not even made frees what it has begun: threads, processes, descriptors, tensors."""

from __future__ import annotations

import multiprocessing
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from games import Chatter, make_trainer
from ten_trainers import check_tenth, held, maker, outside

from agile_trainers.rollout import environment_pool
from agile_trainers.rollout.environment_pool import EnvironmentPool
from agile_trainers.trainers.trainer import MultiTurnTrainer

OUTSIDE = ("threads", "processes")
"""What ends with ``close()``; the rest is the model's."""

OTHERS: set[Any] = set()
"""Threads and processes of the tests before these, which may end at any time: they are not counted."""


def left_as(expected: dict[str, int], names: tuple[str, ...] = (*OUTSIDE, "descriptors", "trainers")) -> dict[str, int]:
    """Check that no more is held, once processes and threads that are ending have ended; others may end too."""
    until = time.monotonic() + 60
    while any((now := held(OTHERS))[name] > expected[name] for name in names) and time.monotonic() < until:
        time.sleep(0.05)
    more = [name for name in names if now[name] > expected[name]]
    assert more == [], (now, expected, outside() - OTHERS)
    return now


def begun(model: Path, folder: Path, kinds: list[str]) -> MultiTurnTrainer:
    """A trainer that has trained, or, by hand, is in the middle of a run."""
    trainer = maker(kinds, model)(folder)
    if "ahead" in kinds:
        trainer.train()
    else:
        trainer.update(trainer.rollout())
        trainer.start()
        trainer.rollout()
    return trainer


@pytest.fixture(scope="module")
def before(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """What is held after a first trainer: the server that starts processes stays."""
    held()  # what earlier tests left to the garbage collector may begin threads when it goes
    OTHERS.update(outside())
    others = set(multiprocessing.active_children())
    begun(embedded_model, tmp_path_factory.mktemp("first"), ["processes"]).close()
    for process in set(multiprocessing.active_children()) - others:
        process.join()
    until = time.monotonic() + 60
    while (now := held(OTHERS))["threads"] and time.monotonic() < until:
        time.sleep(0.05)
    assert now["threads"] == 0, "all threads of a closed trainer end"
    return now


@pytest.mark.parametrize(
    ("kinds", "how"),
    [
        (["processes"], "closed"),
        (["processes"], "deleted"),
        (["agents", "processes", "ahead"], "closed"),
        (["critic", "ahead"], "deleted"),
        pytest.param(["agents", "processes", "ahead"], "deleted", marks=pytest.mark.slow),
        pytest.param(["critic", "ahead"], "closed", marks=pytest.mark.slow),
    ],
)
def test_what_a_trainer_holds(
    kinds: list[str], how: str, embedded_model: Path, tmp_path: Path, before: dict[str, int]
) -> None:
    trainer = begun(embedded_model, tmp_path, kinds)
    during = held(OTHERS)
    assert during["bytes"] > before["bytes"] and during["trainers"] == before["trainers"] + 1
    if kinds == ["processes"]:
        assert during["processes"] > before["processes"] and during["threads"] > before["threads"]
    if how == "closed":
        trainer.close()
        left_as(before, OUTSIDE)
        trainer.close()
    del trainer
    freed = during["bytes"] - left_as(before)["bytes"]
    assert freed > 0.95 * (during["bytes"] - before["bytes"]), "caches of libraries may stay"


def test_a_closed_trainer_says_so_and_can_be_saved(embedded_model: Path, tmp_path: Path) -> None:
    with make_trainer(embedded_model, tmp_path, max_steps=1) as trainer:
        episodes = trainer.rollout()
        trainer.update(episodes)  # the last one
    calls: list[Any] = [
        trainer.train, trainer.evaluate, lambda: trainer.predict([{"row": 1}]), trainer.rollout, trainer.start,
        lambda: trainer.update(episodes),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(RuntimeError, match=r"^This trainer is closed: .*make a trainer from the saved model\.$"):
            call()
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "adapter_config.json").is_file()
    make_trainer(embedded_model, tmp_path).train()  # the folder is locked no longer


@pytest.mark.parametrize("reason", ["nowhere", "not found in the base model", "trained whole"])
def test_a_trainer_that_fails_holds_nothing(
    embedded_model: Path, tmp_path: Path, before: dict[str, int], reason: str
) -> None:
    """Before it has environments, while TRL loads the model, and among its parts; the error holds what was made of it."""
    model = tmp_path / "nowhere" if reason == "nowhere" else embedded_model
    lora = {"target_modules": ["other"]} if reason == "not found in the base model" else False
    with pytest.raises((ValueError, OSError), match=reason) as caught:
        make_trainer(model, tmp_path, lora=lora, environment_processes=2, batches_ahead=1)
    left_as(before, OUTSIDE)
    assert caught.tb is not None


@pytest.mark.parametrize("workers", [0, 2])
def test_the_threads_of_a_pool_end_with_it(workers: int, before: dict[str, int]) -> None:
    pool = EnvironmentPool(Chatter, workers) if workers else EnvironmentPool(Chatter, processes=1)
    pool.reset(0, 0, None)
    assert pool.outcomes(block=True)[0].error is None
    assert held(OTHERS)["threads"] > before["threads"]
    del pool
    left_as(before)


class ClosesLate(Chatter):
    may_close = threading.Event()

    def close(self) -> None:
        self.may_close.wait()


def test_the_thread_that_names_silent_environments_ends_with_its_pool(
    before: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_pool, "SILENT_SECONDS", 3600.0)
    pool = EnvironmentPool(Chatter)
    pool.reset(0, 0, None)
    assert held(OTHERS)["threads"] > before["threads"]
    del pool
    left_as(before)


def test_a_thread_that_outlasts_its_pool_ends_too(before: dict[str, int]) -> None:
    pool = EnvironmentPool(ClosesLate, 1)
    pool.reset(0, 0, None)
    assert pool.outcomes(block=True)[0].error is None
    pool.release(0, reusable=False)
    del pool
    assert held(OTHERS)["threads"] > before["threads"]
    ClosesLate.may_close.set()
    left_as(before)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [["plain"], ["agents", "processes", "ahead"], ["critic", "ahead"]], ids="+".join)
def test_the_tenth_leaves_what_the_second_left(kinds: list[str], embedded_model: Path, tmp_path: Path) -> None:
    """Of each two trainers one is deleted, the other closed."""
    check_tenth(embedded_model, tmp_path, kinds)
