"""Rollouts of agents that pause, and that another process plays on: the same episodes as those of one generator."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import aiohttp
import faulty
import pytest
from environment_agents import Gathers, post
from leftovers import nothing_is_left

from agile_trainers.embedded import make_tokenizer
from agile_trainers.envs.agent import Agent, Model, Task
from agile_trainers.rollout import environment_pool
from agile_trainers.rollout.chat.renderer import ChatRenderer
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.environment_pool import EnvironmentPool
from agile_trainers.rollout.generators.base import GenerationOutput, GenerationRequest
from agile_trainers.rollout.generators.scripted import ScriptedGenerator
from agile_trainers.rollout.replay import RecordedAnswer, RecordedEpisode
from agile_trainers.rollout.spec import EpisodeSpec, Limits
from agile_trainers.step.ahead import BackgroundRollout
from agile_trainers.types import StopReason, Trajectory

TOKENIZER = make_tokenizer()
SPECS = [EpisodeSpec(seed, (seed, 7), {"number": seed}) for seed in range(6)]
LIMITS = Limits(max_turns=20, max_new_tokens=20, max_model_length=1000)


def say(request: GenerationRequest) -> GenerationOutput:
    """Letters that depend on the noise."""
    draws = request.uniforms(6)
    ids = [*TOKENIZER.encode("".join("abcdefgh"[int(draw * 8)] for draw in draws)), TOKENIZER.eos_token_id]
    return GenerationOutput(request.episode, ids, [-0.5 - draw for draw in [*draws, 0.5]][: len(ids)], "stop")


def slowly(chance: random.Random, asked: list[GenerationRequest] | None = None) -> ScriptedGenerator:
    """A generator whose answers take from one step to twelve; the requests are kept in ``asked``."""

    def heard(request: GenerationRequest) -> GenerationOutput:
        if asked is not None:
            asked.append(request)
        return say(request)

    return ScriptedGenerator(heard, lambda request: chance.randint(1, 12))


class Counted(ScriptedGenerator):
    """Counts its answers."""

    answered = 0

    def step(self) -> list[GenerationOutput]:
        outputs = super().step()
        self.answered += len(outputs)
        return outputs


def steps(count: int) -> Callable[[], bool]:
    """Return whether it was asked more often than ``count``."""
    asked = iter(range(count))
    return lambda: next(asked, None) is None


class Talks:
    """Talks for two to four turns, asks a judge the same at once, and waits before each call as ``delays`` says."""

    def __init__(self, delays: Callable[[int], float] = lambda number: 0.0) -> None:
        self.delays = delays

    async def __call__(self, model: Model, task: Task) -> dict[str, Any]:
        messages, judged = [{"role": "user", "content": f"start {task.seed}"}], ""
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {model.api_key}"}) as client:

            async def ask(name: str, number: int) -> str:
                await asyncio.sleep(self.delays(number))
                answer = await post(client, model, {"model": name, "messages": messages})
                return str(answer["choices"][0]["message"]["content"])

            for number in range(2 + task.seed % 3):
                text, judge = await asyncio.gather(ask("policy", number), ask("policy-frozen", number))
                judged += judge
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"you said {text}"}]
        return {"reward": len(judged) / 100 + ord(judged[-1]), "info": {"judged": judged}}


def delayed(seed: int) -> Callable[[int], float]:
    chance = random.Random(seed)
    return lambda number: chance.choice([0, 0, 0.002, 0.005])


AGENTS: dict[str, Callable[..., Any]] = {"in turn": Talks, "at once": Gathers}


@contextmanager
def engine_of(solve: Any, **options: Any) -> Iterator[RolloutEngine]:
    with nothing_is_left():
        pool = EnvironmentPool(Agent(solve), **{"timeout": 30.0, **options})  # a request that is lost ends
        try:
            yield RolloutEngine(pool, ChatRenderer(TOKENIZER, on_rewrite="fork"), LIMITS)
        finally:
            pool.close()


def compared(episodes: list[Trajectory]) -> list[dict[str, Any]]:
    """All but what an update does not read: ids and numbers of requests, and tokens that were read again."""
    found = [{**asdict(one), "read_again": 0, "environment": None} for one in episodes]
    for one in found:
        one["prompt"] = None  # of calls at once it is that of the first to arrive
        for turn in one["turns"]:
            turn["info"].pop("call"), turn.pop("messages"), turn.pop("fork")
    return found


@pytest.fixture(scope="module", params=[*AGENTS])
def agent(request: pytest.FixtureRequest) -> tuple[Callable[..., Any], list[dict[str, Any]], int]:
    """An agent, its episodes without pauses, and how many answers they have."""
    make, asked = AGENTS[request.param], list[GenerationRequest]()
    with engine_of(make()) as engine:
        episodes = engine.run(SPECS, slowly(random.Random(0), asked))
    assert not [one.error for one in episodes if one.error] and len(asked) > 20
    return make, compared(episodes), len(asked)


def test_pauses_change_nothing(agent: Any) -> None:
    """Rollouts end one after another, with a generator each; clients wait meanwhile, and others begin."""
    make, whole, _ = agent
    for seed in range(4):
        chance, played = random.Random(seed), list[Trajectory]()
        with engine_of(make(delayed(seed))) as engine, engine.open(keep_instances=False) as rollout:
            for start in range(0, 6, 2):
                rollout.admit(range(start, start + 2), SPECS[start : start + 2])
                if start:
                    played += rollout.play(range(start - 2, start), slowly(chance))
                time.sleep(0.01)
            rollout.play_until(steps(chance.randint(1, 8)), slowly(chance))
            played += rollout.play(range(4, 6), slowly(chance))
        assert compared(played) == whole, seed


def test_agents_in_processes_pause_too() -> None:
    """Two at once; the others begin when one of them has ended, in whichever rollout that is."""
    with engine_of(faulty.sound) as engine:
        whole = compared(engine.run(SPECS, slowly(random.Random(0))))
    chance, played = random.Random(1), list[Trajectory]()
    with engine_of(faulty.sound, processes=2) as engine, engine.open(keep_instances=False) as rollout:
        rollout.admit(range(6), SPECS)
        for start in range(0, 6, 2):
            rollout.play_until(steps(chance.randint(1, 8)), slowly(chance))
            played += rollout.play(range(start, start + 2), slowly(chance))
    assert compared(played) == whole


def test_another_process_plays_on(agent: Any) -> None:
    """With other keys, another port and another order: what was answered is given again, the rest has the same noise."""
    make, whole, answers = agent
    for seed in range(4):
        chance = random.Random(seed)
        with engine_of(make(delayed(seed))) as engine, engine.open(keep_instances=False) as rollout:
            rollout.admit(range(6), SPECS)
            generator = Counted(say, lambda request: chance.randint(1, 12))  # noqa: B023
            rollout.play_until(steps(chance.randint(20, 60)), generator)
            recorded = json.loads(json.dumps([asdict(one) for one in rollout.record(range(6))]))
            assert sum(len(one["answers"]) for one in recorded) == generator.answered > 0
        for again in range(2):
            known = [RecordedEpisode([RecordedAnswer(**it) for it in one["answers"]], one["noise"]) for one in recorded]
            count, asked = sum(len(one.answers) for one in known), list[GenerationRequest]()
            with engine_of(make(delayed(seed + 100))) as engine, engine.open(keep_instances=False) as rollout:
                rollout.admit(range(6), SPECS, known)
                if again == 0:  # what is saved while it is being played again is whole, too
                    chosen = chance.randrange(6)
                    rollout.play_until(lambda chosen=chosen: rollout.has_ended(chosen), slowly(chance))  # type: ignore[misc]
                    later = json.loads(json.dumps([asdict(one) for one in rollout.record(range(6))]))
                    assert all(len(now["answers"]) >= len(then["answers"]) for now, then in zip(later, recorded))
                    recorded = later
                    continue
                played = rollout.play(range(6), slowly(chance, asked))
            assert compared(played) == whole, seed
            assert len(asked) == answers - count


def test_a_background_rollout_is_recorded_between_two_steps(agent: Any) -> None:
    make, whole, answers = agent
    for seed in range(3):
        with engine_of(make(delayed(seed))) as engine, engine.open(keep_instances=False) as rollout:
            rollout.admit(range(6), SPECS)
            background = BackgroundRollout(rollout, slowly(random.Random(seed)))
            background.start()
            time.sleep(0.02 * seed)
            records: list[RecordedEpisode] = background.call(lambda: rollout.record(range(6)))
            background.close()
        count, asked = sum(len(one.answers) for one in records), list[GenerationRequest]()
        with engine_of(make(delayed(seed + 9))) as engine, engine.open(keep_instances=False) as rollout:
            rollout.admit(range(6), SPECS, records)
            background = BackgroundRollout(rollout, slowly(random.Random(seed), asked))
            background.start()
            played = background.wait(range(6))
            background.close()
        assert compared(played) == whole and len(asked) == answers - count


def test_an_agent_that_does_not_repeat_itself(caplog: pytest.LogCaptureFixture) -> None:
    """What it asks that it had not asked before is sampled, and a warning says so."""
    times = [0]

    def solve(model: Model, task: Task) -> float:
        times[0] += 1
        said = [faulty.ask(model, f"call {number} of {times[0] if number else 1}") for number in range(3)]
        return len("".join(said)) / 10

    asked: list[GenerationRequest] = []
    with engine_of(solve) as engine:
        with engine.open() as rollout:
            rollout.admit([0], SPECS[:1])
            rollout.play_until(lambda: rollout.has_ended(0), ScriptedGenerator(say))
            (record,), (first,) = rollout.record([0]), rollout.take([0])
        with engine.open() as rollout:
            rollout.admit([0], SPECS[:1], [record])
            (second,) = rollout.play([0], slowly(random.Random(0), asked))
    assert len(record.answers) == 2 and len(asked) == 2
    shared = [turn.text for turn in first.turns if turn.text in {one.text for one in second.turns}]
    assert len(shared) == 1 and len(second.turns) == 3
    assert "did not repeat itself" in caplog.text and "without 2 of the answers" in caplog.text


# ------------------------------------------------------------------------------------------------- clients that wait


def held(requests: int = 1) -> tuple[Callable[[], bool], ScriptedGenerator]:
    """A generator that answers nothing, and whether it was asked so often."""
    asked: list[GenerationRequest] = []

    def heard(request: GenerationRequest) -> GenerationOutput:
        asked.append(request)
        return say(request)

    return lambda: len(asked) >= requests, ScriptedGenerator(heard, 10**9)


@pytest.mark.parametrize("marked", [True, False])
def test_a_client_that_gives_up_while_the_rollout_waits_finds_its_answer(marked: bool) -> None:
    gave_up = threading.Event()

    def solve(model: Model, task: Task) -> float:
        connection = faulty.raw(model, faulty.body_of("patience"))
        assert waits.wait(60)
        connection.close()
        gave_up.set()
        said = faulty.ask(model, "patience", **({"x_stainless_retry_count": "1"} if marked else {}))
        return len(said) / 10

    waits, asked = threading.Event(), list[GenerationRequest]()
    with engine_of(solve) as engine, engine.open() as rollout:
        rollout.admit([0], SPECS[:1])
        was_asked, generator = held()
        rollout.play_until(was_asked, generator)
        waits.set()
        assert gave_up.wait(60)
        time.sleep(0.05)
        (episode,) = rollout.play([0], slowly(random.Random(1), asked))
    assert episode.error is None and len(episode.turns) == 1 and len(asked) == 1


@pytest.mark.parametrize("update", [True, False])
@pytest.mark.parametrize("late", [True, False])
def test_an_update_does_not_count_as_an_agents_time(monkeypatch: pytest.MonkeyPatch, update: bool, late: bool) -> None:
    """What passes while its answer is sampled counts, after an update too."""
    later = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later[0])
    monkeypatch.setattr(environment_pool, "time", clock)

    def solve(model: Model, task: Task) -> float:
        return len(faulty.ask(model, "how long?")) / 10

    class Late(ScriptedGenerator):
        def step(self) -> list[GenerationOutput]:
            later[0] += 1000.0 * late
            return super().step()

    with engine_of(solve, timeout=600.0) as engine, engine.open() as rollout:
        rollout.admit([0], SPECS[:1])
        was_asked, generator = held()
        rollout.play_until(was_asked, generator)
        later[0] += 10_000.0 * update
        (episode,) = rollout.play([0], Late(say, 10 if late else 1))
    assert episode.stop_reason is (StopReason.ENVIRONMENT_TIMEOUT if late else StopReason.TERMINATED)


def test_clients_that_wait_when_a_rollout_is_closed_are_refused() -> None:
    told: list[Any] = []

    def solve(model: Model, task: Task) -> float:
        try:
            told.append(faulty.post(model, faulty.body_of("wait")))
        except (OSError, http.client.HTTPException) as error:
            told.append(error)
        return 0.0

    with engine_of(solve) as engine:
        for _ in range(3):
            with engine.open() as rollout:
                rollout.admit(range(6), SPECS)
                was_asked, generator = held(6)
                rollout.play_until(was_asked, generator)
            deadline = time.monotonic() + 60
            while len(told) < 6 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert [(status, answer["error"]["code"]) for status, answer in told] == [(400, "episode_over")] * 6
            told.clear()


def test_an_engine_beside_plays_agents_while_clients_wait(agent: Any) -> None:
    make, whole, _ = agent
    with engine_of(make()) as engine, engine.open(keep_instances=False) as rollout:
        rollout.admit(range(6), SPECS)
        was_asked, generator = held(6)
        rollout.play_until(was_asked, generator)
        beside = engine.beside()
        assert compared(beside.run(SPECS, slowly(random.Random(2)))) == whole
        beside.pool.close()
        assert compared(rollout.play(range(6), slowly(random.Random(3)))) == whole


def test_ended_episodes_leave_nothing_in_an_open_rollout() -> None:
    """A run's rollout stays open until its last step."""
    keys: list[Model] = []
    statuses: list[Any] = []

    def solve(model: Model, task: Task) -> float:
        for one in keys:
            status, answer = faulty.post(one, faulty.body_of("late"))
            statuses.append((status, answer["error"]["code"]))
        keys.append(model)
        return len(faulty.ask(model, "hello")) / 10

    with engine_of(solve) as engine, engine.open(keep_instances=False) as rollout:
        for key in range(4):
            rollout.admit([key], SPECS[:1])
            rollout.play([key], ScriptedGenerator(say))
        (agents,) = rollout._kinds
        assert not agents._exchange._episodes and not agents._exchange.keys  # type: ignore[attr-defined]
        assert not rollout._playing and not rollout._finished and rollout.under_way == 0
    assert statuses == [(400, "episode_over")] * 6


def test_an_agent_that_waits_for_an_answer_is_not_busy() -> None:
    """Else environments would seem to be what a run waits for."""

    def solve(model: Model, task: Task) -> float:
        return len(faulty.ask(model, "hello")) / 10

    with engine_of(solve) as engine, engine.open() as rollout:
        rollout.admit([0], SPECS[:1])
        was_asked, generator = held()
        rollout.play_until(was_asked, generator)
        assert not engine.pool.busy._active
        rollout.play([0], ScriptedGenerator(say))
        assert not engine.pool.busy._active
