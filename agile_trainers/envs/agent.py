"""Agents: programs that own their loop, which are trained through an endpoint instead of being stepped."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

import psutil

from agile_trainers.envs.base import call_error
from agile_trainers.envs.checker import validate_result
from agile_trainers.envs.isolation import process_tree
from agile_trainers.envs.isolation.levels import NONE, in_namespaces, require_programs
from agile_trainers.imports import unbound

MAX_TURNS, CONTEXT_FULL = "max_turns_reached", "context_length_exceeded"
"""Codes of refusals that a limit of the run causes."""


@dataclass(frozen=True)
class Model:
    """The endpoint of one episode, as an agent gets it."""

    base_url: str
    """The base URL of OpenAI's clients; it ends with ``/v1``."""
    api_key: str = field(repr=False)
    """Key of the model's answers, valid for this episode alone."""
    name: str = "policy"
    """Answers of ``policy`` are trained, those of ``policy-frozen`` are not; both have the same weights."""
    reward_key: str = field(default="", repr=False)
    """Key of :meth:`reward`. Whoever has it sets the reward: it belongs in no program that the model may command."""

    @property
    def anthropic_base_url(self) -> str:
        """The same endpoint for Anthropic's clients, which add ``/v1`` themselves."""
        return self.base_url.removesuffix("/v1")

    def reward(self, value: float, call: str | None = None) -> None:
        """Reward one call, or without ``call`` the last one, in addition to the reward that the agent returns.

        Args:
            value: A finite number.
            call: The answer's id, ``response.id``.

        Raises:
            ValueError: If the value is not a finite number, or no answer of the episode has this id.
        """
        request = urllib.request.Request(
            f"{self.base_url}/reward",
            json.dumps({"value": value, "call": call}, default=_number).encode(),
            {"Authorization": f"Bearer {self.reward_key}", "Content-Type": "application/json"},
        )
        # A proxy of the user's environment, which reaches no loopback, would get the key.
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with direct.open(request):
                pass
        except urllib.error.HTTPError as error:
            raise ValueError(json.load(error)["error"]["message"]) from None


@dataclass(frozen=True)
class Task:
    """The task of one episode."""

    row: dict[str, Any] | None
    """The dataset row; None in a run without rows."""
    seed: int
    """The environment's seed; the members of a group share it."""


def refused_by_limit(text: str) -> bool:
    """Return whether an error's text is that of a request which a limit of the run refused."""
    return MAX_TURNS in text or CONTEXT_FULL in text


def check_call(called: str, function: Any, names: Sequence[str], arguments: Mapping[str, Any] | None = None) -> None:
    """Check that a function of the user takes the arguments that it will get.

    Args:
        called: Beginning of the error, up to the function's name: ``"An agent is called as solve"``.
        function: The function.
        names: Names of the positional arguments, for the error.
        arguments: The keyword arguments.

    Raises:
        ValueError: If it does not take them.
    """
    if (error := call_error(function, *names, **(arguments or {}))) is not None:
        given = ", ".join([*names, *(f"{name}=..." for name in arguments or {})])
        raise ValueError(f"{called}({given}), but {function!r} cannot be: {error}.")


async def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of the user, in a thread if it is no coroutine function."""
    waits = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
    result = function(*arguments) if waits else await in_thread(partial(function, *arguments))
    return await result if inspect.isawaitable(result) else result


async def in_thread(function: Callable[[], Any]) -> Any:
    """Run a function in a daemon thread of its own, which a run need not wait for."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def report(value: Any, error: BaseException | None) -> None:
        if not done.done():
            done.set_result((value, error))

    def run() -> None:
        value, error = None, None
        try:
            value = function()
        except BaseException as raised:  # raised again where it is awaited
            error = raised
        with suppress(RuntimeError):  # the loop is closed: nobody waits for it
            loop.call_soon_threadsafe(report, value, error)

    threading.Thread(target=run, daemon=True, name="agent").start()
    value, error = await done
    if error is not None:
        raise error
    return value


def _number(value: Any) -> Any:
    """Make of a number that JSON does not know, such as NumPy's, one that it does."""
    return float(value) if isinstance(value, Real) else repr(value)


NOT_ENFORCED = ("tool_choice", "response_format")
"""Settings of a request that an agent can declare as not enforced."""


Solve = Callable[[Model, Task], Any]


class Agent:
    """An environment of episodes that a program of yours drives.

    ``solve(model, task)`` runs one episode. It gets the address of an endpoint that speaks the dialects of OpenAI's and
    Anthropic's clients, lets its agent work with that, and returns the episode's reward, or a dictionary with ``reward``
    and optionally ``success`` and ``info``. A plain function runs in a thread of its own, a coroutine function in an event
    loop that it shares with the other episodes and must not block.

    Args:
        solve: The function, with two parameters.
        not_enforced: Settings that requests may have although they are not enforced: ``"tool_choice"`` (other than auto
            and none) and ``"response_format"`` (other than text). The run decides the distribution, so that requests with
            others are refused.
        models: Further model names to the endpoints that answer them, untrained: ``{"judge": Endpoint(...)}``.

    Raises:
        ValueError: If ``solve`` cannot be called with two arguments, or ``not_enforced`` has an unknown setting.
    """

    def __init__(
        self, solve: Solve, *, not_enforced: Collection[str] = (), models: Mapping[str, Endpoint] | None = None
    ) -> None:
        _check_call(solve)
        if inspect.isgeneratorfunction(solve) or inspect.isasyncgenfunction(solve):
            raise ValueError(f"An agent returns its reward, but {solve!r} yields. Return it.")
        if unknown := sorted(set(not_enforced) - set(NOT_ENFORCED)):
            raise ValueError(f"not_enforced has {unknown}; expected a collection of {', '.join(NOT_ENFORCED)}.")
        self.solve = solve
        self.not_enforced = frozenset(not_enforced)
        self.models = dict(models or {})
        self.__name__ = getattr(solve, "__name__", type(solve).__name__)

    @classmethod
    def command(
        cls,
        command: Sequence[str],
        *,
        score: Callable[[Task, Finished], Any],
        env: Collection[str] = (),
        stdin: str = "",
        prepare: Callable[[Task, Path], Any] | None = None,
        timeout: float | None = None,
        max_output: int = 20_000,
        isolated: bool = False,
        readable: Collection[str | Path] = (),
        not_enforced: Collection[str] = (),
        models: Mapping[str, Endpoint] | None = None,
    ) -> Agent:
        """Make an agent of a program, which runs once an episode in a new, empty folder.

        The program finds the endpoint in ``OPENAI_BASE_URL``, ``OPENAI_API_KEY`` and ``OPENAI_MODEL``, and in
        ``ANTHROPIC_BASE_URL``, ``ANTHROPIC_API_KEY`` and ``ANTHROPIC_MODEL``. It gets ``PATH``, the language and the
        certificates of this process, ``AGILE_SEED``, and a ``HOME`` and ``TMPDIR`` of its own; no other variable. When it
        ends, or the episode does, every process that it has started is killed, and its folders are removed.

        Args:
            command: The program and its arguments. ``{question}`` stands for the column ``question`` of the row, and
                ``{row}`` (JSON), ``{seed}``, ``{base_url}`` and ``{model}`` for what they say; ``{{question}}`` is the text
                itself. No column is passed on that is not named, as the row may hold the answer.
            score: Called as ``score(task, finished)`` after the end, whatever it was, with a :class:`Finished`. Returns what
                an agent returns.
            env: Further variables: ``"HF_TOKEN"`` passes on this process's, ``"TASK={row}"`` sets one.
            stdin: Standard input, with placeholders. Default: empty.
            prepare: Called as ``prepare(task, folder)`` before the start, to put files into the working folder.
            timeout: Seconds until the program gets SIGTERM, and two seconds later SIGKILL, and is scored with
                ``finished.timed_out``. None: none. ``environment_timeout``, in contrast, ends the episode as failed.
            max_output: Bytes that are kept of standard output, and of standard error: the first and the last half. They are
                in the episode's info, with ``exit_code``, and the key is replaced in them.
            isolated: True runs the program in namespaces of bubblewrap (Linux): it sees the system's programs and libraries,
                this Python installation and its own folder, no other file, no process outside, and no network but the
                endpoint.
            readable: Further files and folders that an isolated program may read.
            not_enforced: As of :class:`Agent`.
            models: As of :class:`Agent`.

        Raises:
            ValueError: If the program or a file of ``readable`` is not found, or a variable of ``env`` is not set.
            IsolationError: If the program is to be isolated and this machine cannot do that.
        """
        solve = CommandAgent(
            command, score, env=env, stdin=stdin, prepare=prepare, timeout=timeout, max_output=max_output,
            isolated=isolated, readable=readable,
        )  # fmt: skip
        return cls(solve, not_enforced=not_enforced, models=models)

    def with_arguments(self, **arguments: Any) -> Agent:
        """Return the same agent with keyword arguments for ``solve``.

        Raises:
            ValueError: If ``solve`` does not take them.
        """
        if not arguments:
            return self
        _check_call(self.solve, arguments)
        solve = partial(self.solve, **arguments)
        solve.__name__ = self.__name__  # type: ignore[attr-defined]
        return type(self)(solve, not_enforced=self.not_enforced, models=self.models)

    def check_row(self, row: dict[str, Any] | None) -> None:
        """Check what can be checked of a dataset row before a run: that it has the columns that a command names.

        Raises:
            ValueError: If it lacks one.
        """
        check = getattr(self.solve, "check_row", None)
        if check is not None:
            check(row)

    def __call__(self) -> Any:  # so that type checkers take an agent where an environment's factory is expected
        """Make the :class:`AgentEnvironment` of one episode."""
        return AgentEnvironment(self.solve)


@dataclass(frozen=True)
class Endpoint:
    """Another endpoint, whose answers are not trained."""

    base_url: str
    """The base URL of OpenAI's clients, ending with ``/v1``."""
    api_key: str = field(default="", repr=False)
    model: str | None = None
    """Name of the model there. None: the name that the agent uses."""


class AgentEnvironment:
    """Plays one episode at a time of an agent."""

    def __init__(self, solve: Solve) -> None:
        self.solve = solve

    async def play(self, model: Model, task: Task) -> Any:
        """Run the agent, in a thread if it is a plain function."""
        return await call(self.solve, model, task)


def is_agent(factory: Any) -> bool:
    """Return whether an environment's factory is an agent's."""
    return agent_of(factory) is not None


def agent_of(factory: Any) -> Agent | None:
    """Return the agent behind a factory, None if it is another environment's."""
    made = unbound(factory)
    return made if isinstance(made, Agent) else None


def _check_call(solve: Any, arguments: Mapping[str, Any] | None = None) -> None:
    check_call("An agent is called as solve", solve, ("model", "task"), arguments)


_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}|\{(\w+)\}")
_OWN = ("base_url", "model", "row", "seed")
"""Placeholders that are no columns."""
_PASSED_ON = ("PATH", "LANG", "LANGUAGE", "TZ", "USER", "LOGNAME", "SHELL", "SSL_CERT_FILE", "SSL_CERT_DIR")
"""Variables of this process that a program gets, beside ``LC_*``."""
_FOLDERS = {"HOME": "home", "TMPDIR": "tmp"}
"""Variables that name a folder of the episode, so that no episode finds what another has written."""
_VARIABLE = re.compile(r"[A-Za-z_]\w*")
_STARTING = threading.Lock()
"""Held while a process is started, which holds the interpreter: between one start and the next the event loop goes on."""
_SECRET = re.compile("key|token|secret|password", re.IGNORECASE)


@dataclass(frozen=True)
class Finished:
    """A program's end, as ``score`` gets it."""

    exit_code: int
    """Minus the number of the signal that ended the program, if one did."""
    stdout: str
    """Beginning and end of what it printed, without the key."""
    stderr: str
    """Beginning and end of its errors, without the key."""
    folder: Path
    """Its working folder, which is removed after scoring. No process of the program runs any more."""
    timed_out: bool = False
    """True if it was ended at ``timeout``."""


Score = Callable[[Task, Finished], Any]


class CommandAgent:
    """Plays an episode by running a program; see :meth:`~agile_trainers.envs.agent.Agent.command`."""

    def __init__(
        self,
        command: Sequence[str],
        score: Score,
        *,
        env: Collection[str] = (),
        stdin: str = "",
        prepare: Callable[[Task, Path], Any] | None = None,
        timeout: float | None = None,
        max_output: int = 20_000,
        isolated: bool = False,
        readable: Collection[str | Path] = (),
    ) -> None:
        if isinstance(command, str) or not all(isinstance(one, str) for one in command) or not command:
            raise ValueError(
                f"An agent's command is a list of texts, the program first, got {command!r}. Split it, or let a shell run "
                'it: ["sh", "-c", "..."].'
            )
        check_call("score is called as score", score, ("task", "finished"))
        if prepare is not None:
            check_call("prepare is called as prepare", prepare, ("task", "folder"))
        if missing := [str(path) for path in readable if not os.path.exists(path)]:
            raise ValueError(f"readable is a collection of files and folders, got {missing[0]}, which does not exist.")
        self.command = [_found(command[0]), *command[1:]]
        self.isolated = isolated and require_programs(f"The agent's program {command[0]!r}") != NONE
        self.readable = [str(path) for path in readable]
        self.env = list(env)
        self.stdin, self.score, self.prepare = stdin, score, prepare
        self.timeout, self.max_output = timeout, max_output
        self.__name__ = os.path.basename(command[0])
        texts = (*command[1:], stdin, *self._variables().values())
        named = {name for text in texts for _, name in _PLACEHOLDER.findall(text)}
        self.columns = sorted(named - {"", *_OWN})

    def check_row(self, row: Mapping[str, Any] | None) -> None:
        """Check that a row has the columns that the command names.

        Raises:
            ValueError: If it lacks one, or there are no rows.
        """
        missing = [name for name in self.columns if name not in (row or {})]
        if missing:
            there = f"the rows have the columns {', '.join(map(str, row))}" if row else "there are no rows"
            raise ValueError(
                f"The command of {self.__name__!r} names {{{missing[0]}}}, but {there}. Placeholders are columns and "
                f"{', '.join(f'{{{name}}}' for name in _OWN)}; {{{{{missing[0]}}}}} is the text itself."
            )

    async def __call__(self, model: Model, task: Task) -> dict[str, Any]:
        """Run the program, and score its end."""
        self.check_row(task.row)
        keeper = _Keeper(self._spec(model, task))
        try:
            folder = Path(await in_thread(keeper.start))
            if self.prepare is not None:
                await call(self.prepare, task, folder)
            ended = await in_thread(keeper.run)
            if "error" in ended:
                raise RuntimeError(f"{self.__name__} did not start: {ended['error']}")
            finished = Finished(ended["status"], ended["stdout"], ended["stderr"], folder, ended["timed_out"])
            reward, info = validate_result(await call(self.score, task, finished))
        finally:
            keeper.end()
            await asyncio.shield(in_thread(keeper.ended))
        kept = {"exit_code": finished.exit_code, "stdout": finished.stdout, "stderr": finished.stderr}
        limit = {"timed_out": True} if finished.timed_out else {}
        return {"reward": reward, "info": {**kept, **limit, **info}}

    def _spec(self, model: Model, task: Task) -> dict[str, Any]:
        row = json.dumps(task.row, ensure_ascii=False, default=str)
        values = {
            **{str(name): value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
               for name, value in (task.row or {}).items()},
            "base_url": model.base_url, "model": model.name, "row": row, "seed": str(task.seed),
        }  # fmt: skip
        own = {name: _filled(text, values) for name, text in self._variables().items()}
        endpoint = {
            "OPENAI_BASE_URL": model.base_url, "OPENAI_API_BASE": model.base_url, "OPENAI_API_KEY": model.api_key,
            "OPENAI_MODEL": model.name, "ANTHROPIC_BASE_URL": model.anthropic_base_url,
            "ANTHROPIC_API_KEY": model.api_key, "ANTHROPIC_MODEL": model.name,
        }  # fmt: skip
        passed_on = {name: value for name, value in os.environ.items() if name in _PASSED_ON or name.startswith("LC_")}
        port = urllib.parse.urlsplit(model.base_url).port or 80
        return {
            "command": [self.command[0], *(_filled(text, values) for text in self.command[1:])],
            "env": {**passed_on, "AGILE_SEED": str(task.seed), **own, **endpoint},
            "folders": {name: folder for name, folder in _FOLDERS.items() if name not in own},
            "stdin": _filled(self.stdin, values),
            "isolated": in_namespaces(self.command[0], self.readable, port=port) if self.isolated else [],
            "port": port,
            "timeout": self.timeout,
            "limit": self.max_output,
            "secrets": [
                model.api_key,
                *(value for name, value in own.items() if _SECRET.search(name) and len(value) > 7),
            ],
            "parent": os.getpid(),
            "place": tempfile.gettempdir(),
            "path": [str(Path(psutil.__file__).parents[1])],
        }

    def _variables(self) -> dict[str, str]:
        """The variables of ``env``.

        Raises:
            ValueError: If one has no name, or is to be passed on and not set.
        """
        found = {}
        for one in self.env:
            name, given, value = one.partition("=") if isinstance(one, str) else ("", "", "")
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f'env has {name!r}; expected names and values such as "HF_TOKEN" or "MODE=fast".')
            if not given and name not in os.environ:
                raise ValueError(
                    f'env passes on {name}, which is not set in this process. Set it, remove it, or write "{name}=value".'
                )
            found[name] = value if given else os.environ[name]
        return found


class _Keeper:
    """Handle of the process that keeps a program, see :mod:`~agile_trainers.envs.isolation.process_tree`."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec, self._ending = spec, False
        self._started = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> str:
        """Start the process, and return the program's folder."""
        try:
            with _STARTING:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-B", process_tree.__file__], env={}, cwd="/", stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the training process
                )  # fmt: skip
        finally:
            self._started.set()
        if self._ending:  # which came before there was a process
            self._process.terminate()
        content = json.dumps(self._spec).encode()
        self._write(len(content).to_bytes(8, "big") + content)
        said = self._said()
        if "error" in said:
            raise RuntimeError(f"the agent's program has no folder: {said['error']}")
        return str(said["folder"])

    def run(self) -> dict[str, Any]:
        """Run the program to its end."""
        self._write(b"\n")
        return self._said()

    def end(self) -> None:
        """End what runs, without waiting. The process then removes the folder."""
        self._ending = True
        if self._process is not None:
            self._process.terminate()  # another thread may be writing, so that nothing is closed here

    def ended(self) -> None:
        """Wait for the end of the keeper, and with that of all that the program has started."""
        self._started.wait()
        if self._process is None:
            return
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]

    def _write(self, content: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None
        with suppress(BrokenPipeError):  # a dead keeper does not answer
            self._process.stdin.write(content)
            self._process.stdin.flush()

    def _said(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            if not self._ending:
                self._kill_orphans()
            raise RuntimeError("the process that keeps the agent's program was ended")
        said: dict[str, Any] = json.loads(line)
        return said

    def _kill_orphans(self) -> None:
        """Kill the processes of the program, by the key in their environment."""
        left = True
        while left:
            left = False
            for process in psutil.process_iter():
                with suppress(psutil.Error):
                    if self._spec["env"]["OPENAI_API_KEY"] in process.environ().values():
                        process.kill()
                        left = True


def _filled(text: str, values: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda it: f"{{{it[1]}}}" if it[1] else values[it[2]], text)


def _found(program: str) -> str:
    found = shutil.which(program)
    if found is None:
        where = "no program that can be run" if os.path.dirname(program) else "not on PATH"
        raise ValueError(f"The agent's program {program!r} is {where}. Install it, or give its whole path.")
    return os.path.abspath(found)
