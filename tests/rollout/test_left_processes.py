"""What an environment in a process of its own has started ends with it, however that ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import current_process, forkserver
from pathlib import Path

import psutil
import pytest
from elsewhere import Leaving
from episodes import ScriptedSampler, make_engine, specs

from agile_trainers.envs.isolation import process_tree
from agile_trainers.rollout.process_environment import ProcessEnvironment
from agile_trainers.types import StopReason


def alive(processes: dict[str, int]) -> list[str]:
    """The kinds of those that still run."""
    return [kind for kind, process in processes.items() if _runs(process)]


def _runs(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def all_end(processes: dict[str, int]) -> None:
    """Wait until none of them runs any more; an assertion with those that go on after a minute."""
    deadline = time.monotonic() + 60
    while (left := alive(processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in processes.values():
        if _runs(process):
            os.kill(process, signal.SIGKILL)
    assert not left


def test_what_it_started_lives_as_long_as_the_instance() -> None:
    """Over all its episodes; nothing is left when the pool is closed."""
    engine = make_engine(Leaving, processes=1, timeout=60.0)
    first, second = engine.run(specs({"what": "exit slowly"}, {}), ScriptedSampler())
    started, temporary = first.reset_info["left"], first.reset_info["temporary"]
    assert second.reset_info["left"] == started and alive(started) == list(started)
    engine.pool.close()
    try:
        assert not alive(started) and not os.path.exists(temporary)
    finally:
        all_end(started)


@pytest.mark.parametrize("what", ["die", "raise", "hang", "hang_up_its_group"])
def test_nothing_outlives_an_instance_that_failed(what: str, request: pytest.FixtureRequest) -> None:
    """It exits while others hold its connection, raises, is killed at the time limit, or hangs up its group.

    Then too the keeper goes on: it ends those that are in other groups.
    """
    clock = request.getfixturevalue("clock") if what == "hang" else None
    engine = make_engine(Leaving, processes=1, timeout=0.1 if clock else 60.0)
    (before,) = engine.run(specs({}), ScriptedSampler())
    if clock:
        clock.pace = 1e6
    (episode,) = engine.run(specs({"what": what}), ScriptedSampler())
    if clock:  # the answer may have come just after the time limit: then the instance is closed with the pool
        engine.pool.close()
    all_end(before.reset_info["left"])
    engine.pool.close()
    shutil.rmtree(before.reset_info["temporary"], ignore_errors=True)  # what died could not remove it
    expected = StopReason.ENVIRONMENT_TIMEOUT if what == "hang" else StopReason.ENVIRONMENT_ERROR
    assert episode.stop_reason is expected


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder whose name is short enough for a socket in it, whatever pytest's is called."""
    with tempfile.TemporaryDirectory(prefix="left-") as folder:
        yield Path(folder)


@pytest.mark.parametrize("ends", ["kill", "exit", "exit_with_it", "exit_too_early", "hang_up"])
def test_nothing_outlives_the_trainer(ends: str, tmp_path: Path, temporary: Path) -> None:
    """It is killed during a call, or returns without closing its environments, held or not: they exit slowly, or never."""
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    trainer = subprocess.Popen(
        [sys.executable, str(script), ends],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(temporary)},
        start_new_session=True,
    )
    assert trainer.stdout is not None
    names = trainer.stdout.readline().strip().split(";")
    started = {name: int(process) for name, process in (one.split("=") for one in names)}
    assert len(started) == 8, "with the environment's own"
    if ends == "hang_up":  # a terminal tells every process of its group
        os.killpg(trainer.pid, signal.SIGHUP)
    elif ends == "kill":
        assert trainer.stdout.readline() == "inside\n"
        trainer.kill()
    trainer.wait(60)
    with suppress(subprocess.TimeoutExpired):  # then some go on, with the other end of the pipe
        trainer.communicate(timeout=60)  # until the server of processes has ended too
    trainer.stdout.close()
    all_end(started)
    left = os.listdir(temporary)
    if ends in ("exit", "exit_with_it"):
        assert not left
    elif ends != "hang_up":  # the environment could not remove its own folder; the server's is removed
        assert len(left) == 1 and not left[0].startswith("pymp-")


def test_a_signal_to_the_group_leaves_environments_to_a_trainer_that_goes_on(tmp_path: Path) -> None:
    """torchrun sends SIGTERM so, and the trainer finishes its step and saves."""
    (script := tmp_path / "trainer.py").write_text(SIGNALLED)
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
        start_new_session=True, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "[15] True 1\n"), "none is active where the server has ended"


def test_a_temporary_folder_with_a_long_name_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (long := tmp_path / ("x" * 100)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setitem(current_process()._config, "tempdir", str(long))  # type: ignore[attr-defined]
    monkeypatch.setattr(forkserver, "connect_to_new_process", forkserver.ForkServer().connect_to_new_process)
    with pytest.raises(ValueError, match=r"x{100} has a name too long.*TMPDIR"):
        ProcessEnvironment(Leaving)


TRAINER = """
import asyncio, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored if the tests run under nohup
from elsewhere import Leaving
from agile_trainers.rollout import process_environment

WHAT = {"exit": "exit slowly", "exit_with_it": "exit slowly", "exit_too_early": "never exit"}

async def main(ends):
    environment = process_environment.ProcessEnvironment(Leaving)
    _, info = await environment.reset(options={"what": WHAT.get(ends, "hang")})
    print(";".join(f"{kind}={process}" for kind, process in {**info["left"], "itself": info["process"]}.items()), flush=True)
    if ends not in WHAT:
        call = asyncio.ensure_future(environment.step("go"))
        await asyncio.sleep(0)
        print("inside", flush=True)
        await call
    return environment

if __name__ == "__main__":
    ended = asyncio.run(main(sys.argv[1]))
    if sys.argv[1] == "exit":
        del ended
    elif sys.argv[1] == "exit_too_early":
        process_environment._CLOSING_SECONDS = 0.1
"""


SIGNALLED = """
import asyncio, multiprocessing, os, signal
from elsewhere import Elsewhere
from agile_trainers.envs.isolation import process_tree
from agile_trainers.rollout.process_environment import ProcessEnvironment

async def main():
    environment = ProcessEnvironment(Elsewhere)
    _, before = await environment.reset()
    heard = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(int(number)))
    os.killpg(0, signal.SIGTERM)
    *_, after = await environment.step("go")
    await asyncio.sleep(0.2)
    print(heard, before["process"] == after["process"], len(multiprocessing.active_children()))
    await environment.close()

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_a_clock_that_is_set_hides_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The age of a process is that of the system's start and its own; a child can seem older than its parent."""
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: -float(process.pid))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in [process.pid for process in process_tree._below()]
        child.communicate(b"\n")
