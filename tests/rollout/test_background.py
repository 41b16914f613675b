"""A rollout that a thread plays: the same episodes, whatever comes when; its errors arrive, and nothing is left."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from episodes import make_engine
from pausing import SPECS, Countdown, Counting, answer, compared, whole

from agile_trainers.rollout.generators.base import GenerationOutput, GenerationRequest
from agile_trainers.rollout.generators.scripted import ScriptedGenerator
from agile_trainers.rollout.replay import RecordedEpisode
from agile_trainers.rollout.spec import Demonstration, GivenAnswer
from agile_trainers.step.ahead import BackgroundRollout
from agile_trainers.types import Trajectory


class Elsewhere:
    """Answers each request in a thread of its own after a while, and tells whoever listens, as a server's client does."""

    def __init__(self, seed: int = 0, fails_after: int | None = None) -> None:
        self.chance, self.left, self.asked, self.steps = random.Random(seed), fails_after, 0, 0
        self.released: list[int] = []
        self._under_way: dict[int, GenerationRequest] = {}
        self._answers: queue.SimpleQueue[tuple[GenerationRequest, GenerationOutput]] = queue.SimpleQueue()
        self._wake: Callable[[], None] = lambda: None

    def listen(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def submit(self, request: GenerationRequest) -> None:
        self.asked += 1
        self._under_way[request.episode] = request
        said = answer(request)
        threading.Timer(self.chance.choice([0, 0.001, 0.01]), self._answer, (request, said)).start()

    def _answer(self, request: GenerationRequest, said: GenerationOutput) -> None:
        self._answers.put((request, said))
        self._wake()

    def step(self) -> list[GenerationOutput]:
        self.steps += 1
        outputs = []
        while not self._answers.empty():
            request, said = self._answers.get()
            if self._under_way.get(request.episode) is request:
                if self.left is not None:
                    self.left -= 1
                    if self.left < 0:
                        raise ConnectionError("the server is gone")
                del self._under_way[request.episode]
                outputs.append(said)
        return outputs

    @property
    def pending(self) -> int:
        return len(self._under_way)

    def release(self, episode: int) -> None:
        self.released.append(episode)
        self._under_way.pop(episode, None)


@pytest.mark.parametrize("workers", [0, 3])
def test_the_same_episodes_whatever_comes_when(workers: int) -> None:
    for seed in range(5):
        engine = make_engine(Counting, max_turns=8, workers=workers)
        played: list[Trajectory] = []
        with engine.open(keep_instances=False) as rollout:
            background = BackgroundRollout(rollout, Elsewhere(seed))
            background.start()
            for start in range(0, 12, 3):
                keys, group = range(start, start + 3), SPECS[start : start + 3]
                background.call(lambda keys=keys, group=group: rollout.admit(keys, group))  # type: ignore[misc]
                if start:
                    played += background.wait(range(start - 3, start))
            played += background.wait(range(9, 12))
            background.close()
        assert compared(played) == whole()
        engine.pool.close()


def test_it_plays_while_nobody_waits() -> None:
    with make_engine(Counting, max_turns=8).open() as rollout:
        rollout.admit(range(12), SPECS)
        background = BackgroundRollout(rollout, Elsewhere())
        background.start()
        deadline = time.monotonic() + 60
        while not all(map(rollout.has_ended, range(12))) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert all(map(rollout.has_ended, range(12)))
        background.close()


def test_what_another_process_needs_is_read_between_two_steps() -> None:
    for seed in range(5):
        with make_engine(Counting, max_turns=8, workers=2).open() as rollout:
            rollout.admit(range(12), SPECS)
            background = BackgroundRollout(rollout, Elsewhere(seed))
            background.start()
            time.sleep(0.002 * seed)
            records: list[RecordedEpisode] = background.call(lambda: rollout.record(range(12)))
            background.close()
        known = sum(len(record.answers) for record in records)
        with make_engine(Counting, max_turns=8).open() as rollout:
            rollout.admit(range(12), SPECS, records)
            elsewhere = Elsewhere(seed)
            background = BackgroundRollout(rollout, elsewhere)
            background.start()
            played = background.wait(range(12))
            background.close()
        assert compared(played) == whole()
        assert elsewhere.asked == sum(len(one.turns) for one in played) - known


@pytest.mark.parametrize("known", [0, 1])
def test_it_sleeps_until_there_is_something_to_do(known: int) -> None:
    """Also in a resumed run, with answers that are given again: a thread that asks in a loop slows the update."""
    with make_engine(Counting, max_turns=8).open() as rollout:
        rollout.admit(range(12), SPECS)
        rollout.play_until(Countdown(3 * known), ScriptedGenerator(answer))
        records = rollout.record(range(12))
    with make_engine(Counting, max_turns=8).open() as rollout:
        rollout.admit(range(12), SPECS, records if known else None)
        elsewhere = Elsewhere()
        background = BackgroundRollout(rollout, elsewhere)
        background.start()
        played = background.wait(range(12))
        background.close()
    assert compared(played) == whole()
    assert elsewhere.asked > 6 and elsewhere.steps < 4 * sum(len(one.turns) for one in played)


def test_an_error_arrives_where_one_waits() -> None:
    with make_engine(Counting, max_turns=8).open() as rollout:
        rollout.admit(range(12), SPECS)
        background = BackgroundRollout(rollout, Elsewhere(fails_after=4))
        background.start()
        with pytest.raises(ConnectionError, match="the server is gone"):
            background.wait(range(12))
        with pytest.raises(ConnectionError, match="the server is gone"):
            background.call(lambda: None)
        background.close()
    assert not [one for one in threading.enumerate() if one.name == "rollout"]


def test_a_function_that_raises_costs_nothing_but_its_call() -> None:
    with make_engine(Counting, max_turns=8).open() as rollout:
        rollout.admit(range(12), SPECS)
        background = BackgroundRollout(rollout, Elsewhere())
        background.start()
        with pytest.raises(ZeroDivisionError):
            background.call(lambda: 1 // 0)
        assert compared(background.wait(range(12))) == whole()
        background.close()


def test_it_ends_at_once() -> None:
    """The requests that are open are given back, so that nobody waits for them."""
    generator = Elsewhere()
    with make_engine(Counting, max_turns=8).open() as rollout:
        rollout.admit(range(12), SPECS)
        background = BackgroundRollout(rollout, generator)
        background.start()
        background.close()
        assert generator.pending == 0
    assert not [one for one in threading.enumerate() if one.name == "rollout"]


def test_an_expert_goes_on_after_the_answers_that_are_known() -> None:
    """A resumed run gives each of its answers once, although a checkpoint was saved in the middle of its episodes."""
    played = make_engine(Counting, max_turns=8).run(SPECS, ScriptedGenerator(answer))
    said = [[GivenAnswer(one.completion_ids[turn.start : turn.end]) for turn in one.turns] for one in played]
    shown = [
        replace(spec, demonstration=Demonstration("here", answers, one.rewards))
        for spec, answers, one in zip(SPECS, said, played, strict=True)
    ]
    nobody = ScriptedGenerator(answer, lambda request: 10**9)
    with make_engine(Counting, max_turns=8).open() as rollout:
        rollout.admit(range(12), shown)
        rollout.play_until(Countdown(2), nobody)
        records = rollout.record(range(12))
    assert any(0 < len(record.answers) < len(one.turns) for record, one in zip(records, played, strict=True))
    with make_engine(Counting, max_turns=8).open() as rollout:
        rollout.admit(range(12), shown, records)
        again = rollout.play(range(12), nobody)
    assert [one.completion_ids for one in again] == [one.completion_ids for one in played]
