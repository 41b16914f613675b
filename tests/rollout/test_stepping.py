"""Where environments run: order, concurrency, timeouts, reuse and closing of instances; events, not clocks, are asserted.

Waits have a limit of ``LONG`` seconds, so that a defect fails rather than hangs; nothing that works gets near it.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from episodes import Factory, Scripted, ScriptedSampler, end, go_on, make_engine, specs

from agile_trainers.rollout import environment_pool
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.environment_pool import EnvironmentPool, EnvironmentTimeoutError, Outcome
from agile_trainers.types import StopReason, Trajectory

LONG = 20.0
SHORT = 0.1
"""The timeout of what hangs. The clock stands still until it does."""
TERMINATED, ERROR, TIMEOUT = StopReason.TERMINATED, StopReason.ENVIRONMENT_ERROR, StopReason.ENVIRONMENT_TIMEOUT

Script = dict[str, Any]
TWO_TURNS: Script = {"answers": [go_on("up"), end(1.0)]}


class AsyncScripted(Scripted):
    """The same, awaited. A function of the script may be a coroutine function."""

    async def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return await self._awaited(super().reset(seed, options))

    async def step(self, action: str) -> Any:
        return await self._awaited(super().step(action))

    async def _awaited(self, value: Any) -> Any:
        return await value if asyncio.iscoroutine(value) else value


def reasons(trajectories: list[Trajectory]) -> list[StopReason]:
    return [trajectory.stop_reason for trajectory in trajectories]


def run(engine: RolloutEngine, *episodes: Script) -> list[StopReason]:
    return reasons(engine.run(specs(*episodes), ScriptedSampler()))


@pytest.fixture
def hang(clock: Any) -> Iterator[Callable[[str], Any]]:
    """A script entry that answers only when the test is over, or when its ``let_go`` is set."""
    let_go = threading.Event()

    def hanging(action: str) -> Any:
        clock.run_out()
        let_go.wait()
        return end(99.0)

    hanging.let_go = let_go  # type: ignore[attr-defined]
    yield hanging
    let_go.set()


def wait_for(condition: Callable[[], bool]) -> None:
    """Return as soon as it holds."""
    pause = threading.Event()
    for _ in range(int(LONG / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it never came to that")


# -------------------------------------------------------------------------------------------------------- concurrency


def test_as_many_threads_as_workers_run_at_once_and_no_more() -> None:
    """A barrier of three opens only if three steps run together; the highest count says that a fourth never does."""
    barrier, lock, counts = threading.Barrier(3), threading.Lock(), {"now": 0, "most": 0}

    def step(action: str) -> Any:
        with lock:
            counts["now"] += 1
            counts["most"] = max(counts.values())
        barrier.wait(timeout=LONG)
        with lock:
            counts["now"] -= 1
        return end()

    assert run(make_engine(workers=3), *[{"answers": [step]}] * 12) == [TERMINATED] * 12
    assert counts == {"now": 0, "most": 3}


@pytest.mark.parametrize("workers", [0, 1])
def test_async_environments_are_awaited_all_at_once(workers: int) -> None:
    """Every step waits for the last of them to begin, whatever the number of workers."""
    begun = 0
    all_begun = asyncio.Event()

    async def step() -> Any:
        nonlocal begun
        begun += 1
        if begun == 8:
            all_begun.set()
        await asyncio.wait_for(all_begun.wait(), LONG)
        return end()

    engine = make_engine(AsyncScripted, workers=workers)
    assert run(engine, *[{"answers": [lambda action: step()]}] * 8) == [TERMINATED] * 8
    engine.pool.close()


def test_awaited_calls_take_no_worker() -> None:
    """One worker, an async ``reset`` that waits for another episode's blocking ``step``."""
    stepped = threading.Event()

    class Mixed(AsyncScripted):
        async def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            if seed == 0:
                await asyncio.to_thread(stepped.wait, LONG)
            return "go", {}

        def step(self, action: str) -> Any:
            stepped.set()
            return end()

    engine = make_engine(Mixed, workers=1)
    ended: list[int] = []
    engine.run(specs({}, {}), ScriptedSampler(), lambda trajectory: ended.append(trajectory.seed))
    assert ended == [1, 0]
    engine.pool.close()


def test_inline_calls_stay_in_the_callers_thread() -> None:
    threads: set[threading.Thread] = set()

    def step(action: str) -> Any:
        threads.add(threading.current_thread())
        return end()

    run(make_engine(), {"answers": [step]}, {"answers": [step]})
    assert threads == {threading.current_thread()}


@pytest.mark.parametrize("kind", [Scripted, AsyncScripted])
@pytest.mark.parametrize("workers", [0, 3])
def test_the_way_of_stepping_does_not_change_the_episodes(kind: type, workers: int) -> None:
    games: list[Script] = [{"answers": [go_on("up", n)] * (n % 3) + [end(n)]} for n in range(7)]
    engine = make_engine(kind, workers=workers)
    assert engine.run(specs(*games), ScriptedSampler()) == make_engine().run(specs(*games), ScriptedSampler())
    engine.pool.close()


@pytest.mark.parametrize("kind", [Scripted, AsyncScripted])
@pytest.mark.parametrize("workers", [0, 3])
def test_no_more_episodes_play_at_once_than_allowed(kind: type, workers: int) -> None:
    """Of five instances' worth of episodes two play at a time, on two instances, and all of them as they always do."""
    games: list[Script] = [{"answers": [go_on("up", n)] * (n % 3) + [end(n)]} for n in range(9)]
    factory = Factory(kind)
    engine = make_engine(factory, workers=workers, max_environments=2)
    assert engine.run(specs(*games), ScriptedSampler()) == make_engine().run(specs(*games), ScriptedSampler())
    assert len(factory.made) == 2 and sum(environment.resets for environment in factory.made) == 9
    engine.pool.close()


def test_an_episode_that_waited_begins_when_another_has_ended() -> None:
    events: list[str] = []

    def note(name: str, answer: Any) -> Any:
        return lambda action: (events.append(name), answer)[1]

    def game(name: str) -> Script:
        return {"start": note(f"{name} begins", ("go", {})), "answers": [go_on("up"), note(f"{name} ends", end())]}

    run(make_engine(max_environments=1), game("a"), game("b"), game("c"))
    assert events == [f"{name} {what}" for name in "abc" for what in ("begins", "ends")]


def test_a_failure_lets_the_next_one_begin(hang: Any) -> None:
    engine = make_engine(workers=4, timeout=SHORT, max_environments=1)
    broken: list[Script] = [{"start": hang}, {"start": RuntimeError("x")}, {"answers": [("bad",)]}]
    assert run(engine, *broken, TWO_TURNS) == [TIMEOUT, ERROR, ERROR, TERMINATED]
    hang.let_go.set()

    def no_display() -> Scripted:
        raise OSError

    assert run(make_engine(no_display, max_environments=1), TWO_TURNS, TWO_TURNS) == [ERROR, ERROR]


def test_a_rollout_cut_off_leaves_no_episode_waiting() -> None:
    def interrupt(trajectory: Trajectory) -> None:
        raise KeyboardInterrupt

    factory = Factory()
    engine = make_engine(factory, max_environments=1)
    with pytest.raises(KeyboardInterrupt):
        engine.run(specs({"start": ("go", None)}, TWO_TURNS, TWO_TURNS), ScriptedSampler(), interrupt)
    resets = sum(environment.resets for environment in factory.made)
    assert run(engine, TWO_TURNS) == [TERMINATED]
    assert sum(environment.resets for environment in factory.made) == resets + 1


# ------------------------------------------------------------------------------------------------------------ timeouts


def test_a_hang_costs_its_own_episode_and_frees_its_worker(hang: Any) -> None:
    """One worker; the clock of a call that waits for the worker does not run yet, or the others would time out too."""
    engine = make_engine(workers=1, timeout=SHORT)
    trajectories = engine.run(
        specs({"answers": [go_on("up", 0.5), hang]}, TWO_TURNS, {"start": hang}, TWO_TURNS), ScriptedSampler()
    )
    assert reasons(trajectories) == [TIMEOUT, TERMINATED, TIMEOUT, TERMINATED]
    assert trajectories[0].rewards == [0.5, 0.0] and len(trajectories[0].turns) == 2
    assert trajectories[0].turns[1].observation is None and len(trajectories[0].completion_ids) == 2 + 10 + 2
    assert trajectories[0].error == "EnvironmentTimeoutError: step took longer than environment_timeout=0.1 s"
    assert trajectories[2].turns == [] and trajectories[2].error is not None
    assert trajectories[2].error.startswith("EnvironmentTimeoutError: reset took")
    assert trajectories[1].rewards == trajectories[3].rewards == [0.0, 1.0]


def test_a_late_answer_is_ignored_and_its_instance_never_played_again(hang: Any) -> None:
    factory = Factory()
    engine = make_engine(factory, workers=1, timeout=SHORT)
    assert run(engine, {"answers": [hang]}) == [TIMEOUT]
    (hung,) = factory.made
    hang.let_go.set()
    # The same key, so that the late answer would find an episode to spoil.
    for _ in range(3):
        (trajectory,) = engine.run(specs(TWO_TURNS), ScriptedSampler())
        assert (trajectory.stop_reason, trajectory.rewards) == (TERMINATED, [0.0, 1.0])
    wait_for(lambda: bool(engine.pool.outcomes(block=False)) or hung.closed == 1)
    assert [environment.resets for environment in factory.made] == [1, 3]
    assert [environment.closed for environment in factory.made] == [1, 0]


def test_an_answer_that_comes_while_others_are_awaited_does_not_stand_for_theirs(hang: Any) -> None:
    """Pool level: reset 0 hangs and is given up; its late answer comes during the second reset of the same key."""
    second = threading.Event()

    def wait_for_second(action: str) -> Any:
        second.wait(LONG)
        return "second", {}

    pool = EnvironmentPool(Scripted, workers=2, timeout=SHORT)
    pool.reset(0, 0, {"start": hang})
    (outcome,) = pool.outcomes(block=True)
    assert isinstance(outcome.error, EnvironmentTimeoutError)
    pool.release(0, reusable=False)
    pool.timeout = LONG
    pool.reset(0, 0, {"start": wait_for_second})
    hang.let_go.set()
    wait_for(lambda: not pool._answers.empty())
    assert pool.outcomes(block=False) == []
    second.set()
    assert pool.outcomes(block=True) == [Outcome(0, "reset", ("second", {}))]


def test_hung_coroutines_are_cancelled_and_cost_only_their_own_episodes(clock: Any) -> None:
    cancelled = threading.Event()

    async def forever() -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    hanging: Script = {"answers": [lambda action: forever()]}
    factory = Factory(AsyncScripted)
    engine = make_engine(factory, timeout=SHORT)
    trajectories = engine.run(
        specs(hanging, TWO_TURNS, hanging), ScriptedSampler(), lambda over: setattr(clock, "pace", 1e6)
    )
    assert reasons(trajectories) == [TIMEOUT, TERMINATED, TIMEOUT]
    clock.pace = 0.0
    assert cancelled.wait(LONG)
    assert run(engine, TWO_TURNS, TWO_TURNS, TWO_TURNS) == [TERMINATED] * 3
    assert sorted(environment.resets for environment in factory.made) == [1, 1, 1, 1, 2]
    engine.pool.close()


def test_a_timeout_of_the_environments_own_is_an_error() -> None:
    engine = make_engine(AsyncScripted, timeout=LONG)
    (trajectory,) = engine.run(specs({"answers": [TimeoutError("its own")]}), ScriptedSampler())
    assert trajectory.stop_reason is ERROR and trajectory.error.startswith(
        "TimeoutError: its own (test_stepping.py, line "
    )


# -------------------------------------------------------------------------------------------- what environments raise


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Scripted, AsyncScripted])
def test_errors_cost_only_their_own_episodes(kind: type, workers: int) -> None:
    engine = make_engine(kind, workers=workers)
    broken: list[Script] = [{"start": RuntimeError("x")}, {"answers": [go_on("up"), asyncio.CancelledError()]}]
    assert run(engine, TWO_TURNS, *broken, TWO_TURNS) == [TERMINATED, ERROR, ERROR, TERMINATED]
    engine.pool.close()


class Leaving(BaseException):
    """A library's own, such as trio's ``Cancelled``."""


EXITS = [SystemExit(0), GeneratorExit(), Leaving(), BaseExceptionGroup("several", [SystemExit(0), ValueError()])]


@pytest.mark.parametrize("exit_", EXITS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["start", "answers"])
@pytest.mark.parametrize("kind, workers", [(Scripted, 0), (Scripted, 2), (AsyncScripted, 0)])
def test_an_exit_of_an_environment_costs_its_episode(
    kind: type, workers: int, where: str, exit_: BaseException
) -> None:
    engine = make_engine(kind, workers=workers)
    bad: Script = {"start": exit_} if where == "start" else {"answers": [exit_]}
    trajectories = engine.run(specs(TWO_TURNS, bad, TWO_TURNS), ScriptedSampler())
    assert reasons(trajectories) == [TERMINATED, ERROR, TERMINATED]
    assert str(trajectories[1].error).startswith(type(exit_).__name__)
    engine.pool.close()


GROUP = BaseExceptionGroup("several", [ValueError(), BaseExceptionGroup("inner", [KeyboardInterrupt()])])


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), GROUP], ids=["alone", "in a group"])
@pytest.mark.parametrize("where", ["start", "answers"])
def test_ctrl_c_during_an_inline_call_ends_the_rollout(interrupt: BaseException, where: str) -> None:
    """The instance that it ends is closed with the others; the pool waited for its answer, and closed without it."""
    factory = Factory()
    engine = make_engine(factory)
    bad: Script = {"start": interrupt} if where == "start" else {"answers": [interrupt]}
    with pytest.raises(type(interrupt)):
        run(engine, TWO_TURNS, bad, TWO_TURNS)
    assert run(engine, TWO_TURNS, TWO_TURNS) == [TERMINATED] * 2
    engine.pool.close()
    assert {environment.closed for environment in factory.made} == {1}


@pytest.mark.parametrize("kind, workers", [(Scripted, 2), (AsyncScripted, 0)])
def test_outside_the_main_thread_an_interrupt_is_not_the_users(kind: type, workers: int) -> None:
    engine = make_engine(kind, workers=workers)
    assert run(engine, TWO_TURNS, {"answers": [KeyboardInterrupt()]}) == [TERMINATED, ERROR]
    engine.pool.close()


def _leave_in_a_task() -> None:
    async def leave() -> None:
        raise SystemExit(0)

    _TASKS.append(asyncio.get_running_loop().create_task(leave()))


def _leave_in_a_callback() -> None:
    asyncio.get_running_loop().call_soon(lambda: sys.exit(0))


_TASKS: list[Any] = []


@pytest.mark.parametrize(
    "attack", [_leave_in_a_task, _leave_in_a_callback, lambda: asyncio.get_running_loop().stop()],
    ids=["a task exits", "a callback exits", "stops the loop"],
)  # fmt: skip
def test_the_event_loop_outlives_its_environments(attack: Callable[[], None]) -> None:
    def answer(action: str) -> Any:
        attack()
        return go_on("up")

    engine = make_engine(AsyncScripted)
    assert run(engine, TWO_TURNS, {"answers": [answer, go_on("up")]}, TWO_TURNS)[::2] == [TERMINATED] * 2
    assert run(engine, TWO_TURNS) == [TERMINATED]
    engine.pool.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_failing_construction_costs_only_its_own_episode(workers: int) -> None:
    made: list[Scripted] = []

    def factory() -> Scripted:
        made.append(Scripted())
        if len(made) == 2:
            raise OSError("no display")
        return made[-1]

    engine = make_engine(factory, workers=workers)
    trajectories = engine.run(specs(TWO_TURNS, TWO_TURNS, TWO_TURNS), ScriptedSampler())
    assert reasons(trajectories) == [TERMINATED, ERROR, TERMINATED]
    assert (
        trajectories[1].error.startswith("OSError: no display (test_stepping.py, line ")
        and trajectories[1].prompt_ids == []
    )


def test_a_failed_construction_does_not_outlive_a_rollout_that_was_cut_off() -> None:
    """Episode 2's interrupt comes before episode 1's failure is taken; the next rollout has no episode 1."""
    errors: list[BaseException | None] = [None, OSError(), KeyboardInterrupt()]

    def factory() -> Scripted:
        if errors and (error := errors.pop(0)) is not None:
            raise error
        return Scripted()

    engine = make_engine(factory)
    with pytest.raises(KeyboardInterrupt):
        run(engine, TWO_TURNS, TWO_TURNS, TWO_TURNS)
    assert run(engine, TWO_TURNS) == [TERMINATED]


def test_an_environment_without_the_methods_is_an_error() -> None:
    (trajectory,) = make_engine(object).run(specs({}), ScriptedSampler())
    assert trajectory.error == "AttributeError: 'object' object has no attribute 'reset'"


def test_a_rollout_cut_off_starts_no_call_that_was_waiting(hang: Any) -> None:
    """One worker, which hangs; the interrupt comes from the callback, while two calls wait for the worker."""
    factory = Factory()
    engine = make_engine(factory, workers=1)

    def interrupt(trajectory: Trajectory) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.run(specs({"start": ("go", None)}, {"start": hang}, TWO_TURNS, TWO_TURNS), ScriptedSampler(), interrupt)
    wait_for(lambda: [environment.resets for environment in factory.made] == [1, 1, 0, 0])
    hang.let_go.set()
    assert run(engine, TWO_TURNS) == [TERMINATED]
    assert [environment.resets for environment in factory.made] == [1, 1, 0, 0, 1]


# ----------------------------------------------------------------------------------------------------------- instances


@pytest.mark.parametrize("kind", [Scripted, AsyncScripted])
@pytest.mark.parametrize("workers", [0, 2])
def test_instances_are_made_once_reset_often_and_closed_at_the_end(kind: type, workers: int) -> None:
    factory = Factory(kind)
    engine = make_engine(factory, workers=workers)
    for _ in range(4):
        run(engine, TWO_TURNS, TWO_TURNS, TWO_TURNS)
    assert [environment.resets for environment in factory.made] == [4, 4, 4]
    assert [environment.closed for environment in factory.made] == [0, 0, 0]
    engine.pool.close()
    engine.pool.close()
    assert [environment.closed for environment in factory.made] == [1, 1, 1]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("bad", [RuntimeError("broken"), ("up", float("inf"), False, False, {})])
def test_an_instance_that_failed_is_closed_and_not_played_again(bad: Any, workers: int) -> None:
    factory = Factory()
    engine = make_engine(factory, workers=workers)
    run(engine, TWO_TURNS, {"answers": [bad]})
    wait_for(lambda: [environment.closed for environment in factory.made] == [0, 1])
    run(engine, TWO_TURNS, TWO_TURNS)
    assert [environment.resets for environment in factory.made] == [2, 1, 1]


def test_truncated_episodes_leave_a_good_instance() -> None:
    factory = Factory()
    engine = make_engine(factory, max_turns=1)
    assert run(engine, {"answers": [go_on("up")]}) == run(engine, {"answers": [go_on("up")]}) == [StopReason.MAX_TURNS]
    assert [environment.resets for environment in factory.made] == [2]


def test_async_close_is_awaited() -> None:
    closed: list[Any] = []

    class Closing(AsyncScripted):
        async def close(self) -> None:  # type: ignore[override]
            await asyncio.sleep(0)
            closed.append(self)

    engine = make_engine(Closing)
    run(engine, TWO_TURNS, TWO_TURNS)
    engine.pool.close()
    assert len(set(closed)) == len(closed) == 2


@pytest.mark.parametrize("workers", [0, 1])
def test_what_close_raises_is_dropped(workers: int) -> None:
    class Closing(Scripted):
        def close(self) -> None:
            raise OSError("already gone")

    engine = make_engine(Closing, workers=workers)
    assert run(engine, {"answers": [RuntimeError()]}, TWO_TURNS) == [ERROR, TERMINATED]
    engine.pool.close()


def test_a_hanging_close_holds_up_nobody(hang: Any) -> None:
    class Closing(Scripted):
        def close(self) -> None:
            hang.let_go.wait()

    engine = make_engine(Closing, workers=1, timeout=SHORT)
    assert run(engine, {"answers": [RuntimeError()]}, TWO_TURNS) == [ERROR, TERMINATED]
    engine.pool.close()


@pytest.mark.parametrize("kind", ["inline", "thread", "async"])
def test_without_a_timeout_close_has_a_limit_too(hang: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    closed, said = [], list[str]()

    class Closing(Scripted):
        hangs = True

        def close(self) -> None:
            if Closing.hangs:
                Closing.hangs = False
                hang.let_go.wait(3)  # so that a defect fails
            closed.append(self)

    class ClosingLater(AsyncScripted):
        async def close(self) -> None:  # type: ignore[override]
            if Closing.hangs:
                Closing.hangs = False
                await asyncio.sleep(3)
            closed.append(self)

    monkeypatch.setattr(environment_pool, "SILENT_SECONDS", SHORT)
    monkeypatch.setattr(environment_pool.logger, "warning", said.append)
    handler = signal.getsignal(signal.SIGALRM)
    made = ClosingLater if kind == "async" else Closing
    engine = make_engine(made, workers=int(kind == "thread"))
    assert run(engine, TWO_TURNS, TWO_TURNS, TWO_TURNS) == [TERMINATED] * 3
    engine.pool.close()
    (text,) = (one for one in said if "close" in one)
    assert made.__name__ in text and "1 of 3 instances" in text and len(closed) == 2
    assert signal.getsignal(signal.SIGALRM) == handler and signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_each_inline_close_has_the_whole_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    engine = make_engine(Scripted)
    assert run(engine, TWO_TURNS, TWO_TURNS) == [TERMINATED] * 2
    monkeypatch.setattr(environment_pool, "_interrupted_after", lambda limit: nullcontext(limits.append(limit)))
    engine.pool.close()
    assert limits == [environment_pool.SILENT_SECONDS] * 2


def test_a_timer_of_the_caller_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_pool.time, "monotonic", iter([10.0, 40.0]).__next__)
    before = signal.setitimer(signal.ITIMER_REAL, 1000.0, 7.0)
    with environment_pool._interrupted_after(500.0):
        pass
    left, interval = signal.setitimer(signal.ITIMER_REAL, *before)
    assert 900.0 < left <= 970.0 and interval == pytest.approx(7.0)


def test_an_inline_close_that_hangs_does_not_hold_up_the_other_episodes(
    hang: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closing(Scripted):
        def close(self) -> None:
            interrupted.append(not hang.let_go.wait(3))

    interrupted = list[bool]()
    monkeypatch.setattr(environment_pool, "SILENT_SECONDS", SHORT)
    assert run(make_engine(Closing), {"answers": [RuntimeError()]}, TWO_TURNS) == [ERROR, TERMINATED]
    assert not interrupted


# ----------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("workers", "timeout", "message"),
    [
        (-1, None, "environment_workers.*-1"),
        (1, 0.0, "environment_timeout.*0.0"),
        (1, -1.0, "environment_timeout must be a positive"),
        (1, float("nan"), "environment_timeout must be a positive"),
    ],
)
def test_arguments_are_checked(workers: int, timeout: float | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EnvironmentPool(Scripted, workers, timeout)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_environments": 0}, "max_environments.* 0"),
        ({"processes": -1}, r"environment_processes.*-1"),
        ({"processes": 2, "workers": 1}, "environment_processes=2.*environment_workers"),
        ({"processes": 2, "max_environments": 2}, "environment_workers and max_environments"),
    ],
)
def test_limits_are_checked(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EnvironmentPool(Scripted, **options)


def test_an_inline_call_cannot_have_a_timeout() -> None:
    with pytest.raises(ValueError, match=r"environment_timeout=1.0.*environment_workers"):
        make_engine(timeout=1.0).run(specs({}), ScriptedSampler())
    assert run(make_engine(timeout=float("inf"), workers=1), {}) == [TERMINATED]


def test_outcomes_of_an_idle_pool_do_not_wait() -> None:
    pool = EnvironmentPool(Scripted)
    assert pool.outcomes(block=True) == pool.outcomes(block=False) == []
    pool.release(3, reusable=True)


@pytest.mark.parametrize("answers", [False, True], ids=["cancelled", "answers all the same"])
def test_an_instance_whose_call_was_given_up_is_closed(answers: bool) -> None:
    """Also one whose call was cancelled before it had begun, and one that answers when the rollout is over."""
    closed: list[int] = []

    class Waiting:
        async def reset(self, seed: int | None = None, options: Any = None) -> Any:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                if not answers:
                    raise
            return "too late", {}

        async def step(self, action: str) -> Any:
            raise NotImplementedError

        async def close(self) -> None:
            closed.append(1)

    for _ in range(20):
        pool = EnvironmentPool(Waiting)
        for episode in range(3):
            pool.reset(episode, 0, None)
        pool.abandon()
        pool.close()
    assert len(closed) == 60


def test_a_call_begins_before_it_is_cancelled() -> None:
    """So that what it holds is given back, such as the process that an environment runs in."""
    ended: list[str] = []

    class Holding:
        async def reset(self, seed: int | None = None, options: Any = None) -> Any:
            try:
                await asyncio.sleep(600)
            finally:
                ended.append("reset")

        async def step(self, action: str) -> Any:
            raise NotImplementedError

    for _ in range(20):
        pool = EnvironmentPool(Holding)
        pool.reset(0, 0, None)
        pool.abandon()
        pool.close()
    assert len(ended) == 20


def test_an_instance_that_is_closed_as_the_pool_is_closes_all_the_same() -> None:
    """Both reach the event loop while another environment keeps it busy."""
    busy, free, closed = threading.Event(), threading.Event(), threading.Event()

    class Closing:
        async def reset(self, seed: int | None = None, options: Any = None) -> Any:
            return "start", {}

        async def step(self, action: str) -> Any:
            busy.set()
            free.wait(LONG)
            return "", 0.0, True, False, {}

        async def close(self) -> None:
            closed.set()

    pool = EnvironmentPool(Closing)
    for episode in range(2):
        pool.reset(episode, 0, None)
        pool.outcomes(block=True)
    pool.step(1, "")
    assert busy.wait(LONG)
    pool.release(0, reusable=False)
    pool.close()
    free.set()
    assert closed.wait(LONG)
