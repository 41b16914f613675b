"""Agents: programs that own their loop, which are trained through an endpoint instead of being stepped."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agile_trainers.envs.agent_calls import Model, Task, call, check_call

if TYPE_CHECKING:
    from agile_trainers.envs.agent_command import Finished

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
        self,
        solve: Solve,
        *,
        not_enforced: Collection[str] = (),
        models: Mapping[str, Endpoint] | None = None,
    ) -> None:
        _check_call(solve)
        if inspect.isgeneratorfunction(solve) or inspect.isasyncgenfunction(solve):
            raise ValueError(f"An agent returns its reward, but {solve!r} yields. Return it.")
        if isinstance(not_enforced, str) or (unknown := sorted(set(not_enforced) - set(NOT_ENFORCED))):
            raise ValueError(
                f"not_enforced={not_enforced!r} has {unknown if not isinstance(not_enforced, str) else 'a text'}; expected "
                f"a collection of {', '.join(NOT_ENFORCED)}."
            )
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
            ValueError: If the program is not found, a variable of ``env`` is not set, or an argument is out of range.
            IsolationError: If the program is to be isolated and this machine cannot do that.
        """
        from agile_trainers.envs.agent_command import CommandAgent

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


def bound_play(environment: Any, model: Model, task: Task) -> Callable[[], Any]:
    """Bind ``play`` to its arguments."""
    return partial(environment.play, model, task)


def is_agent(factory: Any) -> bool:
    """Return whether an environment's factory is an agent's."""
    return agent_of(factory) is not None


def agent_of(factory: Any) -> Agent | None:
    """Return the agent behind a factory, None if it is another environment's."""
    while isinstance(factory, partial):
        factory = factory.func
    return factory if isinstance(factory, Agent) else None


def _check_call(solve: Any, arguments: Mapping[str, Any] | None = None) -> None:
    if not callable(solve):
        raise ValueError(f"An agent is a function of (model, task), got {solve!r}.")
    check_call("An agent is called as solve", solve, ("model", "task"), arguments)
