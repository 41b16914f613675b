"""Environments in processes of their own: they play alike, at the same time, and die alone."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from elsewhere import AsyncElsewhere, AsyncToy, Elsewhere, Toy, Unread
from episodes import ScriptedSampler, make_engine, specs

from agile_trainers.imports import outliving_readers
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.environment_pool import EnvironmentPool
from agile_trainers.rollout.process_environment import _modules, pickled
from agile_trainers.types import StopReason

TERMINATED, ERROR, TIMEOUT = StopReason.TERMINATED, StopReason.ENVIRONMENT_ERROR, StopReason.ENVIRONMENT_TIMEOUT


@pytest.fixture
def engine() -> Iterator[RolloutEngine]:
    made = make_engine(Elsewhere, processes=3, timeout=60.0)
    yield made
    made.pool.close()


def test_episodes_are_the_same_and_somewhere_else(engine: RolloutEngine) -> None:
    episodes = engine.run(specs(*[{}] * 7), ScriptedSampler())
    here = make_engine(Elsewhere).run(specs(*[{}] * 7), ScriptedSampler())
    assert [e.rewards for e in episodes] == [e.rewards for e in here] == [[1.0, 2.0]] * 7
    assert [e.seed for e in episodes] == [e.reset_info["seed"] for e in episodes] == list(range(7))
    processes = {turn.info["process"] for episode in episodes for turn in episode.turns}
    assert len(processes) == 3 and os.getpid() not in processes
    again = engine.run(specs({}, {}), ScriptedSampler())
    assert {episode.reset_info["process"] for episode in again} <= processes, "instances are played again"


@pytest.mark.parametrize(
    ("environment", "where"), [(Toy, {}), (Toy, {"workers": 1}), (AsyncToy, {}), (Toy, {"processes": 1})]
)
def test_options_may_be_left_out_and_the_action_named_otherwise(environment: Any, where: dict[str, int]) -> None:
    engine = make_engine(environment, **where)
    (episode, with_row) = engine.run([*specs(None), *specs({"row": 1})], ScriptedSampler())  # type: ignore[arg-type]
    engine.pool.close()
    assert (episode.rewards, episode.stop_reason, episode.reset_info) == ([1.0], TERMINATED, {"seed": 0})
    assert with_row.stop_reason is ERROR and "options" in str(with_row.error), "a row is never dropped"


def test_what_goes_wrong_costs_its_own_episode(engine: RolloutEngine) -> None:
    games = [{"what": what} for what in ("raise", None, "die", None, "unsendable", None)]
    episodes = engine.run(specs(*games), ScriptedSampler())
    assert [episode.stop_reason for episode in episodes] == [ERROR, TERMINATED] * 3
    assert re.fullmatch(r"EnvironmentProcessError: KeyError: 'a bug' \(elsewhere.py, line \d+\)", episodes[0].error)
    assert "process died in step (exit code 7)" in str(episodes[2].error)
    assert "the result of step cannot be sent" in str(episodes[4].error)


def test_an_output_that_nothing_reads_costs_no_episode() -> None:
    """All episodes failed, until the end of the run, where an environment printed to a log that nothing took any more."""
    engine = make_engine(Unread, processes=1, timeout=60.0)
    (episode,) = engine.run(specs(None), ScriptedSampler())
    engine.pool.close()
    assert (episode.rewards, episode.error) == ([1.0], None)


@pytest.mark.parametrize("where", [{}, {"workers": 1}])
def test_programs_of_environments_write_to_no_output_that_is_lost(where: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Looks(Toy):
        def step(self, text: str) -> Any:
            assert stat.S_ISCHR(os.fstat(sys.stderr.fileno()).st_mode), "/dev/null, which a program inherits"
            return super().step(text)

    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with outliving_readers():
            os.close(reader)
            engine = make_engine(Looks, **where)
            (episode,) = engine.run(specs(None), ScriptedSampler())
            engine.pool.close()
    assert (episode.rewards, episode.error) == ([1.0], None)


def test_a_hang_is_killed(clock: Any, tmp_path: Path) -> None:
    """Its time is over when the other episode ends, which waits until it hangs."""
    engine, hangs = make_engine(Elsewhere, processes=2, timeout=0.1), str(tmp_path / "hangs")
    games = specs({"what": "hang", "hangs": hangs}, {"hangs": hangs})
    episodes = engine.run(games, ScriptedSampler(), lambda over: setattr(clock, "pace", 1e6))
    assert [episode.stop_reason for episode in episodes] == [TIMEOUT, TERMINATED]
    hung = episodes[0].reset_info["process"]
    for _ in range(1000):
        if not _alive(hung):
            break
        time.sleep(0.02)
    assert not _alive(hung)
    engine.pool.close()


def test_async_environments_are_awaited_over_there() -> None:
    engine = make_engine(AsyncElsewhere, processes=1, timeout=60.0)
    assert [episode.rewards for episode in engine.run(specs({}, {}), ScriptedSampler())] == [[1.0, 2.0]] * 2
    engine.pool.close()


def test_lambdas_and_closures_are_sent_by_value() -> None:
    start = "up"

    class Local(Elsewhere):
        def reset(self, seed: int | None = None, options: Any = None) -> Any:
            return start, super().reset(seed, options)[1]

    engine = make_engine(lambda: Local(), processes=1, timeout=60.0)
    (episode,) = engine.run(specs({}), ScriptedSampler())
    engine.pool.close()
    assert episode.prompt[0]["content"] == "up" and episode.rewards == [1.0, 2.0]
    assert episode.reset_info["process"] != os.getpid()


def test_an_environment_of_the_script_itself_is_sent_without_running_the_script_again(tmp_path: Path) -> None:
    """Neither a guard nor a module of its own is needed. What it uses is imported once for all processes."""
    (tmp_path / "script.py").write_text(SCRIPT)
    for name in ("used", "held"):
        (tmp_path / f"{name}.py").write_text(f'print("{name}", flush=True)\nclass It: pass')
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    shown = subprocess.run(
        [sys.executable, "script.py"], capture_output=True, text=True, timeout=300, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    imports, played = shown.stdout.split("playing")
    assert imports.split() == ["used", "held", "main"], shown.stderr
    assert sorted(played.split()) == ["1.0", "1.0", "2.0", "2.0", "held", "used"]


SCRIPT = """
import asyncio
import used
from functools import partial
from elsewhere import Elsewhere
from held import It
from agile_trainers.rollout.process_environment import ProcessEnvironment
print("main playing", flush=True)
class Mine(Elsewhere):
    def __init__(self, it):
        super().__init__()
        self.used = used.It
async def play():
    environments = [ProcessEnvironment(partial(Mine, It())) for _ in range(2)]
    for environment in environments:
        await environment.reset()
        print(*[(await environment.step("go"))[1] for _ in range(2)])
        await environment.close()
asyncio.run(play())
"""


def test_modules_are_found_wherever_a_frame_of_the_pickle_ends() -> None:
    """A frame is 64 KiB; the name of the environment's module is the last string of one, or the first of the next."""
    for length in range(65_400, 65_500):
        assert _modules(pickled(partial(print, ["x" * length], Elsewhere))) == {"builtins", "functools", "elsewhere"}


def test_a_factory_that_cannot_be_sent_is_refused() -> None:
    lock = threading.Lock()
    with pytest.raises(ValueError, match=r"environment_processes.*cannot pickle.*lock"):
        EnvironmentPool(lambda: Elsewhere() if lock else None, processes=1)


def _alive(process: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(process).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False
