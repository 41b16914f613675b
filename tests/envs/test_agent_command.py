"""Programs as agents: what they get, how they end, and what is left of them."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
from time_limits import at_the_first_limit

from agile_trainers.envs.agent import _STARTING, Agent, Finished, Model, Task, _Keeper
from agile_trainers.envs.isolation import process_tree
from agile_trainers.envs.isolation.process_tree import Excerpt

MODEL = Model("http://127.0.0.1:9/v1", f"sk-{uuid.uuid4()}")  # by which this run's processes are found


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the folders are made; none is left, and no process."""
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    yield place
    left = marked()
    for process in left:
        process.kill()
    assert not left and list(place.glob(f"{process_tree.PREFIX}*")) == []


def marked() -> list[psutil.Process]:
    """The processes that have the key."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("OPENAI_API_KEY") == MODEL.api_key:
                found.append(process)
        except psutil.Error:
            continue
    return found


def agent(*command: str, score: Any = lambda task, finished: 1.0, **options: Any) -> Agent:
    return Agent.command(list(command), score=score, **options)


def played(*command: str, row: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """What the agent of a command returns."""
    result: dict[str, Any] = asyncio.run(agent(*command, **options)().play(MODEL, Task(row, 7)))
    return result


def info(*command: str, **options: Any) -> dict[str, Any]:
    kept: dict[str, Any] = played(*command, **options)["info"]
    return kept


def until(happens: Any) -> None:
    """Wait, at most a minute."""
    deadline = time.monotonic() + 60
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_a_program_gets(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    for name in list(os.environ):
        if name.startswith("LC_") or name in ("LANGUAGE", "TZ", "USER", "LOGNAME", "SSL_CERT_FILE", "SSL_CERT_DIR"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_user")
    monkeypatch.setenv("SHELL", "/bin/sh")
    monkeypatch.setenv("LANG", "C.UTF-8")
    monkeypatch.setenv("LC_ALL", "C")
    program = "import json, os; print(json.dumps(dict(os.environ))); print(os.getcwd(), os.listdir())"

    def score(task: Task, finished: Finished) -> float:
        import json

        given = json.loads(finished.stdout.splitlines()[0])
        folder = finished.folder.parent
        assert finished.stdout.splitlines()[1] == f"{folder}/work []"
        assert given.pop("PATH") == os.environ["PATH"]
        assert given == {
            "OPENAI_BASE_URL": "http://127.0.0.1:9/v1", "OPENAI_API_BASE": "http://127.0.0.1:9/v1",
            "OPENAI_API_KEY": "[secret]", "OPENAI_MODEL": "policy",
            "ANTHROPIC_BASE_URL": "http://127.0.0.1:9", "ANTHROPIC_API_KEY": "[secret]", "ANTHROPIC_MODEL": "policy",
            "AGILE_SEED": "7", "HOME": f"{folder}/home", "TMPDIR": f"{folder}/tmp",
            "SHELL": "/bin/sh", "LANG": "C.UTF-8", "LC_ALL": "C",
        }  # fmt: skip
        assert folder.parent == place and (folder / "home").is_dir() and (folder / "tmp").is_dir()
        return 2.5

    assert played(sys.executable, "-c", program, score=score, row={"answer": "42"})["reward"] == 2.5


def test_variables_that_are_passed_on_and_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value under a name like a secret's is replaced in the output too; another is not."""
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_user")
    monkeypatch.setenv("COLOR", "green-and-blue")
    ran = info(
        "sh", "-c", "echo $HF_TOKEN ${#HF_TOKEN} $COLOR $TASK $HOME",
        env=["HF_TOKEN", "COLOR", "TASK={row}", "HOME=/nowhere"], row={"a": 1},
    )  # fmt: skip
    assert ran["stdout"] == '[secret] 14 green-and-blue {"a": 1} /nowhere\n'


def test_placeholders() -> None:
    row = {"question": "What is {model}?", "number": 3, "row": "a column"}
    ran = info(
        "printf", "%s|", "{question}", "-{number}-", "{row}", "{seed}", "{model}", "{base_url}", "{{question}}", '{"a": {}}',
        row=row,
    )  # fmt: skip
    assert ran["stdout"].split("|")[:-1] == [
        "What is {model}?", "-3-", '{"question": "What is {model}?", "number": 3, "row": "a column"}', "7", "policy",
        MODEL.base_url, "{question}", '{"a": {}}',
    ]  # fmt: skip
    assert info("cat", stdin="{question}\n{{number}}", row=row)["stdout"] == "What is {model}?\n{number}"
    assert info("cat")["stdout"] == ""
    whole = "x" * 3_000_000  # more than pipes hold and the kernel takes as one argument
    assert info("wc", "-c", stdin="{text}", row={"text": whole})["stdout"] == f"{len(whole)}\n"


@pytest.mark.parametrize(
    "command,options,said",
    [
        (["no-such-program"], {}, "'no-such-program' is not on PATH"),
        (["/dev/null"], {}, "'/dev/null' is no program that can be run"),
        ("echo hi", {}, "is a list of texts, the program first, got 'echo hi'"),
        ([], {}, "is a list of texts"),
        (["echo"], {"env": ["NOT_SET_ANYWHERE"]}, "env passes on NOT_SET_ANYWHERE, which is not set"),
        (["echo"], {"env": ["=3"]}, "expected names and values"),
        (["echo"], {"score": lambda task: 1.0}, r"score is called as score\(task, finished\)"),
        (["echo"], {"prepare": lambda: None}, r"prepare is called as prepare\(task, folder\)"),
        (["echo"], {"score": 1.0}, "score is called as"),
    ],
)
def test_errors_at_construction(command: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Agent.command(command, **{"score": lambda task, finished: 1.0, **options})


@pytest.mark.parametrize("row,there", [({"text": "x"}, "the rows have the columns text"), (None, "there are no rows")])
def test_a_column_that_is_not_there(row: dict[str, Any] | None, there: str) -> None:
    said = rf"names \{{question\}}, but {there}.*\{{\{{question\}}\}} is the text itself"
    with pytest.raises(ValueError, match=said):
        played("echo", "{question}", "{seed}", row=row)


def test_exit_codes_and_signals() -> None:
    assert info("sh", "-c", "echo out; echo err >&2; exit 7") == {"exit_code": 7, "stdout": "out\n", "stderr": "err\n"}
    assert info("sh", "-c", "kill -9 $$")["exit_code"] == -9
    assert info("true") == {"exit_code": 0, "stdout": "", "stderr": ""}


def test_a_program_that_does_not_start(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    with pytest.raises(RuntimeError, match=r"script did not start: .*No such file"):
        played(str(script))


def test_a_program_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(RuntimeError, match=r"the agent's program has no folder: .*No such file.*nowhere"):
        played("true")


def test_what_scoring_returns() -> None:
    def score(task: Task, finished: Finished) -> dict[str, Any]:
        return {"reward": 1, "success": True, "info": {"lines": 2, "stdout": "shorter"}}

    expected = {"exit_code": 0, "stdout": "shorter", "stderr": "", "success": True, "lines": 2}
    assert played("echo", "hi", score=score) == {"reward": 1.0, "info": expected}

    async def later(task: Task, finished: Finished) -> float:
        await asyncio.sleep(0)
        return float(task.row["n"] + finished.exit_code)  # type: ignore[index]

    assert played("sh", "-c", "exit 3", score=later, row={"n": 4})["reward"] == 7.0
    with pytest.raises(ZeroDivisionError):
        played("true", score=lambda task, finished: 1 / 0)
    with pytest.raises(Exception, match="the agent returned reward=None"):
        played("true", score=lambda task, finished: None)


def test_files_are_prepared_and_scored() -> None:
    ran = played(
        "sh", "-c", "wc -c < given > counted",
        prepare=lambda task, folder: (folder / "given").write_text(task.row["text"]),
        score=lambda task, finished: int((finished.folder / "counted").read_text()), row={"text": "four"},
    )  # fmt: skip
    assert ran["reward"] == 4.0


def test_a_flood_of_output() -> None:
    """A gigabyte is read as it comes; its two ends are kept."""
    ran = info("sh", "-c", "printf begin; head -c 1000000000 /dev/zero; printf end", max_output=12)
    assert ran["stdout"] == "begin\0\n[... 999999996 bytes left out ...]\n\0\0\0end"


@pytest.mark.parametrize("limit", [2, 5, 64])
def test_no_part_of_a_secret_is_kept_wherever_the_output_is_split_or_cut(limit: int) -> None:
    text = b"abKEYcKEKEYKEKEY"
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            excerpt = Excerpt(limit, ["KEY"])
            for part in (text[:first], text[first:second], text[second:]):
                excerpt.add(part)
            whole = "ab[secret]cKE[secret]KE[secret]"
            said = excerpt.text()
            if limit == 64:
                assert said == whole
            else:
                kept = limit - limit // 2, limit // 2
                left = len(whole) - limit
                assert said == f"{whole[: kept[0]]}\n[... {left} bytes left out ...]\n{whole[-kept[1] :]}"


def test_programs_at_their_time_limit_and_a_killed_script() -> None:
    """SIGTERM comes first, so that one that listens may write what it has; the score says what that is worth.

    The parts of a script are killed after it: one that died first would let a shell run the next line.
    """
    deaf = "trap '' TERM; echo on; sleep 600"
    polite = "trap 'echo saved; exit 5' TERM; echo on; sleep 600 & wait"
    script = "trap '' TERM; for _ in $(seq 40); do (sleep 600; echo went on) & done; echo on; wait; exit 3"

    async def all_of_them(timeout: float) -> list[dict[str, Any]]:
        agents = [
            agent(
                "sh", "-c", f"exec 2>/dev/null; {program}", timeout=timeout,
                score=lambda _, it: 0.5 if it.timed_out else 1,
            )
            for program in (deaf, polite, script)
        ]  # fmt: skip
        return await asyncio.gather(*(one().play(MODEL, Task(None, 0)) for one in agents))

    def begun(timeout: float) -> list[dict[str, Any]] | None:
        """All results, if each program was as far as it should be at the limit."""
        ran = asyncio.run(all_of_them(timeout))
        return ran if all(one["info"]["stdout"].startswith("on\n") for one in ran) else None

    assert at_the_first_limit(begun) == [
        {"reward": 0.5, "info": {"exit_code": code, "stdout": said, "stderr": "", "timed_out": True}}
        for code, said in ((-9, "on\n"), (5, "on\nsaved\n"), (-9, "on\n"))
    ]


def test_a_program_that_closes_its_outputs_and_lives_on() -> None:
    ran = played(
        "sh", "-c", "exec >&- 2>&-; sleep 0.2; : > done", score=lambda _, it: float((it.folder / "done").exists())
    )
    assert ran["reward"] == 1.0


FORKS_TWICE = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open("started", "w").close()
        time.sleep(600)
    os._exit(0)
while not os.path.exists("started"):
    time.sleep(0.01)
"""


def test_what_a_program_leaves_ends_with_it() -> None:
    """A grandchild that left the session and holds the outputs open is dead before the score is asked for."""

    def score(task: Task, finished: Finished) -> float:
        assert (finished.folder / "started").exists() and not marked()
        return 1.0

    assert played(sys.executable, "-c", FORKS_TWICE, score=score)["reward"] == 1.0


def test_a_cancelled_episode_ends_its_program() -> None:
    """Whatever it is doing: starting, being prepared, running, or being scored."""

    async def cancelled_when(happens: Any, *command: str, **options: Any) -> None:
        playing = asyncio.create_task(agent(*command, **options)().play(MODEL, Task(None, 0)))
        await asyncio.to_thread(until, happens)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(playing, 60)
        assert not marked()

    asyncio.run(cancelled_when(lambda: True, "sleep", "600"))
    asyncio.run(cancelled_when(lambda: True, "sleep", "600", stdin="x" * 10_000_000))
    forever = FORKS_TWICE + "time.sleep(600)"
    asyncio.run(cancelled_when(lambda: len(marked()) == 2, sys.executable, "-c", forever))
    scoring: list[int] = []

    async def score(task: Task, finished: Finished) -> None:
        scoring.append(1)
        await asyncio.sleep(600)

    asyncio.run(cancelled_when(lambda: scoring, "true", score=score))


def test_a_program_that_kills_what_keeps_it(place: Path) -> None:
    """The episode fails, and what is left is found by the key in its environment."""
    with pytest.raises(RuntimeError, match="the process that keeps the agent's program was ended"):
        played("sh", "-c", "sleep 600 & kill -9 $PPID; sleep 600")
    (left,) = place.glob(f"{process_tree.PREFIX}*")
    os.utime(left, (0, 0))
    played("true")  # the next episode removes its folder


def test_a_killed_training_process_leaves_nothing(place: Path) -> None:
    script = (
        "import asyncio, sys, tempfile\n"
        "from agile_trainers.envs.agent import Agent, Model, Task\n"
        f"agent = Agent.command([sys.executable, '-c', {FORKS_TWICE + 'time.sleep(600)'!r}], score=lambda *_: 1.0)\n"
        f"asyncio.run(agent().play(Model({MODEL.base_url!r}, {MODEL.api_key!r}), Task(None, 0)))\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "TMPDIR": str(place)})
    until(lambda: len(marked()) == 2)
    trainer.kill()
    trainer.wait()
    until(lambda: not marked() and not list(place.iterdir()))


def test_folders_that_nobody_holds_are_removed(place: Path, tmp_path: Path) -> None:
    """A young one may not be locked yet, a locked one is played in, and what a link points to stays."""
    outside = tmp_path / "outside"
    outside.mkdir()
    outside.chmod(0o755)
    names = {name: place / f"{process_tree.PREFIX}{name}" for name in ("old", "young", "held", "link")}
    for name in ("old", "young", "held"):
        (names[name] / "work").mkdir(parents=True)
        (names[name] / "work" / "link").symlink_to(outside)
    (names["old"] / "work").chmod(0)
    names["link"].symlink_to(outside)
    for name in ("old", "held"):
        os.utime(names[name], (0, 0))
    os.utime(outside, (0, 0))
    held = os.open(names["held"], os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        played("true")
    finally:
        os.close(held)
    assert sorted(path.name for path in place.iterdir()) == sorted(names[n].name for n in ("young", "held", "link"))
    assert outside.is_dir() and outside.stat().st_mode & 0o777 == 0o755
    for name in ("young", "held"):
        os.utime(names[name], (0, 0))
    played("true")
    names["link"].unlink()


def test_a_folder_of_any_depth_is_removed_and_costs_no_other_program(place: Path) -> None:
    """It has more levels than a process has files and Python calls, and its paths are longer than the system takes; neither
    the program's own keeper nor the next one stumbles over it."""
    deep = (
        "import os\nfor _ in range(1200):\n    os.mkdir('deep'); os.chdir('deep')\nopen('file', 'w'); os.chmod('.', 0)"
    )
    try:
        assert played(sys.executable, "-c", deep)["info"]["exit_code"] == 0
        assert list(place.iterdir()) == []
        (abandoned := place / f"{process_tree.PREFIX}1-deep").mkdir()
        subprocess.run([sys.executable, "-c", deep], cwd=abandoned, check=True)
        os.utime(abandoned, (0, 0))
        played("true")
        assert list(place.iterdir()) == []
    finally:
        subprocess.run(["rm", "-rf", *place.iterdir()], check=True)  # pytest's own removal fails at this depth


def test_the_folder_of_another_user_stays(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (planted := place / f"{process_tree.PREFIX}1-planted").mkdir()
    os.utime(planted, (0, 0))
    user = os.geteuid()
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: user + 1)
        process_tree.remove_abandoned(str(place))
    assert planted.is_dir()
    process_tree.remove_abandoned(str(place))
    assert not planted.exists()


def test_a_folder_without_rights_is_removed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program can take them, and kill its keeper. Only root opens such a folder: it is refused here as to others."""
    (left := place / f"{process_tree.PREFIX}1-left").mkdir()
    opened = os.open

    def open_as_user(path: str | Path, *arguments: int, **named: int) -> int:
        if not named and not os.lstat(path).st_mode & 0o400:
            raise PermissionError(path)
        return opened(path, *arguments, **named)

    left.chmod(0)
    (outside := place / "outside").mkdir()
    outside.chmod(0o755)
    (link := place / f"{process_tree.PREFIX}1-link").symlink_to(outside)
    monkeypatch.setattr(os, "open", open_as_user)
    process_tree.remove_abandoned(str(place), 1)
    assert not left.exists() and outside.stat().st_mode & 0o777 == 0o755
    link.unlink()
    outside.rmdir()


def test_whatever_ends_the_keeper_is_said() -> None:
    """An error of any kind, not of the system's alone."""
    keeper = _Keeper({"path": [], "env": {"OPENAI_API_KEY": MODEL.api_key}})
    with pytest.raises(RuntimeError, match="has no folder: 'place'"):
        keeper.start()
    keeper.end()
    keeper.ended()


def test_more_programs_at_once_than_an_event_loop_has_threads(tmp_path: Path) -> None:
    """They wait at a pipe that opens once all have started, so that one that kept the event loop, or one of its threads (32
    at most), would wait forever."""
    meeting = tmp_path / "meeting"
    os.mkfifo(meeting)
    started = tmp_path / "started"
    started.mkdir()
    waits = agent("sh", "-c", f": > {started}/$$; : < {meeting}; echo met")

    async def all_of_them() -> list[Any]:
        playing = [asyncio.create_task(waits().play(MODEL, Task(None, seed))) for seed in range(34)]
        await asyncio.to_thread(until, lambda: len(list(started.iterdir())) == 34)
        descriptor = os.open(meeting, os.O_RDWR)
        try:
            return await asyncio.gather(*playing)
        finally:
            os.close(descriptor)

    assert [one["info"]["stdout"] for one in asyncio.run(all_of_them())] == ["met\n"] * 34


def test_programs_are_started_outside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """One at a time: a start holds the interpreter, and two hundred in a row held the event loop for seconds."""
    started: list[bool] = []

    class Watched(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *given: Any, **named: Any) -> None:
            started.append(threading.current_thread() is threading.main_thread() or not _STARTING.locked())
            super().__init__(*given, **named)

    monkeypatch.setattr("agile_trainers.envs.agent.subprocess.Popen", Watched)
    played("true")
    assert started == [False]


def test_an_agent_of_a_command_is_sent_to_another_process() -> None:
    sent = cloudpickle.loads(cloudpickle.dumps(agent("echo", "{x}")))
    assert sent.__name__ == "echo"
    assert asyncio.run(sent().play(MODEL, Task({"x": "y"}, 0)))["info"]["stdout"] == "y\n"


def test_an_interrupt_of_the_terminal_does_not_reach_a_program() -> None:
    """Programs are not in the process group that Ctrl-C is sent to."""
    before = signal.getsignal(signal.SIGINT)  # a shell's background jobs ignore it
    assert info("sh", "-c", "ps -o pgid= -p $$")["stdout"].strip() not in ("", str(os.getpgid(0)))
    assert signal.getsignal(signal.SIGINT) is before
