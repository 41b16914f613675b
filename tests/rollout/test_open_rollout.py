"""Episodes that are played with one generator after the other, or in another process, are those of one generator."""

from __future__ import annotations

import random
from dataclasses import asdict
from typing import Any

import pytest
from episodes import TOKENIZER, Factory, go_on, ids, make_engine
from pausing import SPECS, WORDS, Countdown, Counting, Listening, answer, compared, slowly, whole

from agile_trainers.rollout.generators.base import GenerationOutput
from agile_trainers.rollout.generators.scripted import ScriptedGenerator
from agile_trainers.rollout.replay import RecordedAnswer, RecordedEpisode
from agile_trainers.types import StopReason, Trajectory


@pytest.mark.parametrize("workers", [0, 3])
def test_pauses_change_nothing(workers: int) -> None:
    """Batches that end one after another, with a generator each and answers of any duration."""
    chance = random.Random(workers)
    for _ in range(5):
        engine = make_engine(Counting, max_turns=8, workers=workers)
        played: list[Trajectory] = []
        with engine.open() as rollout:
            rollout.admit(range(12), SPECS)
            for start in range(0, 12, 3):
                played += rollout.play(range(start, start + 3), slowly(chance))
        assert compared(played) == whole()
        engine.pool.close()


def test_episodes_begin_at_any_time() -> None:
    engine, chance = make_engine(Counting, max_turns=8), random.Random(3)
    played: list[Trajectory] = []
    with engine.open(keep_instances=False) as rollout:
        for start in range(0, 12, 3):
            rollout.admit(range(100 + start, 103 + start), SPECS[start : start + 3])
            if start:
                played += rollout.play(range(97 + start, 100 + start), slowly(chance))
        played += rollout.play(range(109, 112), slowly(chance))
    assert compared(played) == whole()
    assert all(one.environment is None for one in played), "they play other episodes"
    assert len(engine.pool._idle[None]) < 12


def test_an_answer_that_was_being_sampled_is_sampled_again() -> None:
    engine, listening = make_engine(Counting, max_turns=8), Listening()
    with engine.open() as rollout:
        rollout.admit(range(2), SPECS[3:5])
        generator = ScriptedGenerator(listening, lambda request: 1 if request.episode == 0 else 1000)
        (first,) = rollout.play([0], generator)
        assert generator.pending == 0, "the paused episode is forgotten there"
        before = len([one for one in listening.asked if one.episode == 1])
        (second,) = rollout.play([1], ScriptedGenerator(listening))
    again = [one.token_ids for one in listening.asked if one.episode == 1][before - 1 : before + 1]
    assert again[0] == again[1]
    assert compared([first, second]) == whole()[3:5]


def test_nobody_waits_for_an_answer_after_the_last_episode() -> None:
    """A step of a generator may take as long as an answer, of episodes that nobody waits for yet."""

    class Counted(ScriptedGenerator):
        steps = 0

        def step(self) -> list[GenerationOutput]:
            self.steps += 1
            return super().step()

    with make_engine(Counting, max_turns=8).open() as rollout:
        rollout.admit(range(12), SPECS)
        generator = Counted(answer, lambda request: 1 if request.episode in (0, 4) else 1000)
        first, second = rollout.play([0, 4], generator)
        assert generator.steps == max(len(first.turns), len(second.turns))
        rollout.play([1], ScriptedGenerator(answer))


@pytest.mark.parametrize("ended", [0, 3, 9])
def test_another_process_plays_on(ended: int) -> None:
    """What an episode was answered is given again, without a generator; then it draws the numbers that it would have."""
    chance = random.Random(ended)
    for _ in range(10):
        with make_engine(Counting, max_turns=8).open() as rollout:
            rollout.admit(range(12), SPECS)
            rollout.play_until(Countdown(chance.randint(0, 30)), slowly(chance))
            recorded = [asdict(one) for one in rollout.record(range(12))]
        counting = Listening()
        with make_engine(Counting, max_turns=8).open() as rollout:
            known = [RecordedEpisode([RecordedAnswer(**it) for it in one["answers"]], one["noise"]) for one in recorded]
            answers = sum(len(one.answers) for one in known)
            rollout.admit(range(12), SPECS, known)
            first = rollout.play(range(ended), ScriptedGenerator(counting)) if ended else []
            again = [asdict(one) for one in rollout.record(range(ended, 12))]
            rest = rollout.play(range(ended, 12), ScriptedGenerator(counting))
        assert compared([*first, *rest]) == whole()
        turns = sum(len(one.turns) for one in [*first, *rest])
        asked = {(one.episode, len(one.token_ids)) for one in counting.asked}  # once more after the pause between both
        assert len(asked) == turns - answers
        assert all(len(now["answers"]) >= len(then["answers"]) for now, then in zip(again, recorded[ended:]))


def test_an_error_of_the_generator_costs_no_recorded_answer() -> None:
    """Such as memory that runs out, after which the episodes are played on with fewer at once."""

    class Full(ScriptedGenerator):
        def step(self) -> list[GenerationOutput]:
            raise MemoryError

    with make_engine(Counting, max_turns=8).open() as rollout:
        rollout.admit(range(6), SPECS[:6])
        rollout.play_until(Countdown(9), ScriptedGenerator(answer))
        recorded = rollout.record(range(6))
    known, listening = sum(len(one.answers) for one in recorded), Listening()
    with make_engine(Counting, max_turns=8).open() as rollout:
        rollout.admit(range(12), SPECS, [*recorded, *[RecordedEpisode()] * 6])
        for _ in range(3):
            with pytest.raises(MemoryError):
                rollout.play(range(12), Full(answer))
        played = rollout.play(range(12), ScriptedGenerator(listening))
    assert known > 6 and compared(played) == whole()
    assert len(listening.asked) == sum(len(one.turns) for one in played) - known


def test_an_environment_that_does_not_repeat_itself(caplog: pytest.LogCaptureFixture) -> None:
    """From where it says something else, new answers are sampled, with a warning."""

    class Fickle(Counting):
        times = 0

        def step(self, action: str) -> Any:
            type(self).times += 1
            return go_on("down" if type(self).times > 2 else "up")

    with make_engine(Fickle, max_turns=4).open() as rollout:
        rollout.admit([0], SPECS[:1])
        rollout.play_until(lambda: rollout.has_ended(0), ScriptedGenerator(answer))
        (recorded,) = rollout.record([0])
        (first,) = rollout.take([0])
    with make_engine(Fickle, max_turns=4).open() as rollout:
        rollout.admit([0], SPECS[:1], [recorded])
        (second,) = rollout.play([0], ScriptedGenerator(answer))
    assert first.action_of(0) == second.action_of(0)
    assert [turn.observation for turn in first.turns[:2]] == ["up", "up"]
    assert [turn.observation for turn in second.turns[:2]] == ["down", "down"]
    assert len(second.turns) == 4 and second.stop_reason is StopReason.MAX_TURNS
    assert "did not repeat itself" in caplog.text


def test_what_is_under_way_at_the_end_is_given_up() -> None:
    factory = Factory(Counting)
    engine = make_engine(factory, max_turns=8)
    with engine.open() as rollout:
        rollout.admit(range(12), SPECS)
        rollout.play([0], slowly(random.Random(0)))
    assert not engine.pool._playing and not engine.pool._running
    assert compared(engine.run(SPECS, ScriptedGenerator(answer))) == whole()


def test_an_engine_beside_plays_while_a_rollout_is_open() -> None:
    engine = make_engine(Counting, max_turns=8, workers=2)
    with engine.open() as rollout:
        rollout.admit(range(6), SPECS[:6])
        rollout.play([0], slowly(random.Random(0)))
        beside = engine.beside()
        assert compared(beside.run(SPECS, ScriptedGenerator(answer))) == whole()
        rest = rollout.play(range(1, 6), ScriptedGenerator(answer))
    assert compared(rest) == whole()[1:6]
    for one in (engine, beside):
        one.pool.close()


def test_the_words_are_words() -> None:
    assert {TOKENIZER.decode(ids(word)) for word in WORDS} == set(WORDS)
