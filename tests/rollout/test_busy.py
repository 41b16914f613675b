"""Shares of the time in which trainer, sampler and environments are busy: by hand, with clocks that stand in between."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from episodes import Scripted, end, go_on, make_engine
from pausing import answer

from agile_trainers.rollout.environment_pool import BusyMeter
from agile_trainers.rollout.generators.base import GenerationOutput, GenerationRequest
from agile_trainers.rollout.generators.scripted import ScriptedGenerator
from agile_trainers.rollout.spec import EpisodeSpec
from agile_trainers.step.ahead import BackgroundRollout


class Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


def test_overlapping_activities_count_once() -> None:
    clock = Clock()
    meter = BusyMeter(clock)
    assert meter.take() == 0.0
    for now, call, key in [
        (11, meter.begin, "a"), (12, meter.begin, "b"), (13, meter.begin, "a"), (14, meter.end, "a"), (15, meter.end, "b"),
        (16, meter.end, "b"), (17, meter.begin, "c"), (18, meter.end, "never begun"), (19, meter.end, "c"),
    ]:  # fmt: skip
        clock.now = now
        call(key)
    clock.now = 20
    assert meter.take() == pytest.approx(6 / 10)  # 11 to 15 and 17 to 19
    assert meter.take() == 0.0


def test_an_activity_counts_in_each_period_that_it_lasts() -> None:
    clock = Clock()
    meter = BusyMeter(clock)
    clock.now = 12
    meter.set("a", True)
    clock.now = 14
    assert meter.take() == pytest.approx(1 / 2)
    clock.now = 16
    with meter.active():
        meter.set("a", False)
        clock.now = 17
    clock.now = 18
    assert meter.take() == pytest.approx(3 / 4)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of all meters that are made in the test."""
    clock = Clock()
    monkeypatch.setattr(BusyMeter.__init__, "__defaults__", (clock,))
    return clock


def test_a_sampler_of_this_process_and_environments_take_turns(clock: Clock) -> None:
    """Six calls of 2 seconds, some while an answer is due; six steps of 5 seconds; 58 seconds in which nothing is played."""

    class Timed(Scripted):
        def _do(self, what: Any, action: str) -> Any:
            clock.now += 2
            return super()._do(what, action)

    class Sampler(ScriptedGenerator):
        def step(self) -> list[GenerationOutput]:
            clock.now += 5 if self.pending else 0
            return super().step()

    engine = make_engine(Timed)
    clock.now += 58
    specs = [EpisodeSpec(index, (index,), {"answers": [go_on("up"), end()]}) for index in range(2)]
    engine.run(specs, Sampler(answer, lambda request: 2 + request.episode))
    assert engine.busy() == pytest.approx({"busy/trainer": 0.58, "busy/sampler": 0.3, "busy/environments": 0.12})


def test_a_sampler_elsewhere_is_busy_until_it_answers(clock: Clock) -> None:
    """What this process does meanwhile is no time without requests: the trainer waits for 3 and computes for 7 seconds."""
    asked, go = threading.Event(), threading.Event()

    class Far:
        """Answers one request when it may, and tells whoever listens."""

        pending = 0

        def listen(self, wake: Any) -> None:
            self.wake = wake

        def submit(self, request: GenerationRequest) -> None:
            self.pending, self.request, self.done = 1, request, threading.Event()
            threading.Thread(target=self._later).start()

        def _later(self) -> None:
            asked.set()
            assert go.wait(60)
            self.done.set()
            self.wake()

        def step(self) -> list[GenerationOutput]:
            if not (self.pending and self.done.is_set()):
                return []
            self.pending = 0
            return [answer(self.request)]

        def release(self, episode: int) -> None:
            self.pending = 0

    engine = make_engine(Scripted)
    with engine.open() as rollout:
        player = BackgroundRollout(rollout, Far())
        player.start()
        player.call(lambda: rollout.admit([0], [EpisodeSpec(0, (0,), {"answers": [end()]})]))
        assert asked.wait(60)
        player.call(lambda: None)  # it has noticed the request by then
        clock.now += 7
        with engine.waiting.active():
            clock.now += 3
            go.set()
            player.wait([0])
        player.close()
    clock.now += 10
    assert engine.busy() == pytest.approx({"busy/trainer": 0.85, "busy/sampler": 0.5, "busy/environments": 0.0})


@pytest.mark.parametrize("workers", [0, 2])
def test_calls_that_end_and_calls_that_are_given_up_are_over(clock: Clock, workers: int) -> None:
    hangs, began = threading.Event(), threading.Event()

    def hang(action: str) -> Any:
        began.set()
        hangs.wait(60)
        return end()

    engine = make_engine(Scripted, workers=workers)
    pool = engine.pool
    pool.reset(0, 0, {"start": RuntimeError("broken")})
    (failed,) = pool.outcomes(block=True)
    assert failed.error is not None
    clock.now += 1
    assert engine.busy()["busy/environments"] == 0.0
    pool.reset(2, 0, {})
    while pool._answers.empty():
        time.sleep(0.001)
    clock.now += 1  # it was answered, and nobody has looked yet
    assert engine.busy()["busy/environments"] == 0.0
    assert pool.outcomes(block=True)
    if workers:
        pool.reset(1, 0, {"start": hang})
        assert began.wait(60)
        clock.now += 3
        pool.release(1, reusable=False)
        clock.now += 1
        assert engine.busy()["busy/environments"] == pytest.approx(3 / 4)
        hangs.set()
    assert engine.beside().busy().keys() == engine.busy().keys()
    other = engine.beside()
    other.pool.busy.begin("call")
    clock.now += 1
    assert engine.busy()["busy/environments"] == 1.0
