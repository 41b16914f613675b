"""Defines what an agent gets for an episode, and calls the functions that users write for agents."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any


@dataclass(frozen=True)
class Model:
    """The endpoint of one episode, as an agent gets it."""

    base_url: str
    """The base URL of OpenAI's clients; it ends with ``/v1``."""
    api_key: str = field(repr=False)
    """Valid for this episode alone."""
    name: str = "policy"
    """Answers of ``policy`` are trained, those of ``policy-frozen`` are not; both have the same weights."""

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
            {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"},
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
    try:
        inspect.signature(function).bind(*names, **(arguments or {}))
    except TypeError as error:
        given = ", ".join([*names, *(f"{name}=..." for name in arguments or {})])
        raise ValueError(f"{called}({given}), but {function!r} cannot be: {error}.") from None
    except ValueError:  # a builtin without a signature
        pass


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
