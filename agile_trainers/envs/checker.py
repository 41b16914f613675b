"""Checks that an environment follows the protocol: cheap checks of every reset and step, and a longer check."""

from __future__ import annotations

import asyncio
import inspect
import math
import random
import sysconfig
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import numpy as np

from agile_trainers.envs.base import (
    Environment,
    EnvironmentFactory,
    Observation,
    ResetResult,
    StepResult,
    as_messages,
    bound,
    reads_rows,
)
from agile_trainers.envs.images import ImageError, as_content, read_part
from agile_trainers.imports import pass_on_interrupt
from agile_trainers.records.plain import TooLargeError, plain_text, whole_copy
from agile_trainers.types import Message, text_of

LONG_OBSERVATION = 100_000
"""Characters above which an observation is reported as too long: the trainers' default ``max_observation_length``."""
LARGEST_REWARD = float(np.finfo(np.float32).max)
"""Largest reward, since rewards become float32."""
_LONGEST_MESSAGE = 2000
_NOT_OWN = (Path(__file__).parents[1], Path(sysconfig.get_path("stdlib")))
_INSTALLED = Path(sysconfig.get_path("purelib"))
_IMMUTABLE = {str, int, float, bool, type(None), bytes, np.bool_, np.int64, np.float32, np.float64}
"""Types of which copies are not needed. Others are asked, which takes longer."""
_CONTAINERS = (dict, list, tuple, set, frozenset, deque, bytearray)
_STEP_ITEMS = "(observation, reward, terminated, truncated, info)"


class EnvironmentProtocolError(ValueError):
    """Raised when an environment violates the protocol."""


def validate_reset(result: Any) -> ResetResult:
    """Check the result of ``reset``.

    Returns:
        The same two values as plain data: lone surrogates in text are replaced, ``info["anchor"]`` is text.

    Raises:
        EnvironmentProtocolError: If the result is not ``(text or messages, dict)``.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise EnvironmentProtocolError(
            f"reset() returned {_describe(result)}; expected the tuple (observation, info).{_hint(result, 2)}"
        )
    observation, info = result
    return _validate_observation(observation, "reset()"), _validate_info(info, "reset()")


def validate_step(result: Any) -> StepResult:
    """Check the result of ``step``.

    Returns:
        The same five values as plain data: see :func:`validate_reset`; the reward as ``float``, the two flags as ``bool``.

    Raises:
        EnvironmentProtocolError: If the result is not ``(text or messages, real number in float32, bool, bool, dict)``, or
            a message that the model would read has role ``assistant``. NumPy scalars are allowed. A bool as reward is
            rejected, since it is usually a misplaced flag.
    """
    if not isinstance(result, tuple) or len(result) != 5:
        raise EnvironmentProtocolError(
            f"step() returned {_describe(result)}; expected the tuple {_STEP_ITEMS}.{_hint(result, 5)}"
        )
    observation, reward, terminated, truncated, info = result
    observation = _validate_observation(observation, "step()")
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, (bool, np.bool_)):
            raise EnvironmentProtocolError(
                f"step() returned {name}={_describe(flag)}; expected a bool. The order is {_STEP_ITEMS}."
            )
    if not terminated and any(message["role"] == "assistant" for message in as_messages(observation)):
        raise EnvironmentProtocolError(
            "step() returned a message of role 'assistant', which is the model's own. The conversation is kept by the "
            'rollout: return only what is new, such as [{"role": "user", "content": "..."}].'
        )
    info = _validate_info(info, "step()")
    return observation, _validate_reward(reward, "step()"), bool(terminated), bool(truncated), info


def validate_end(result: Any) -> float | None:
    """Check the result of ``end``.

    Returns:
        The reward as ``float``; None if the environment gives none.

    Raises:
        EnvironmentProtocolError: If the result is neither None nor a reward as :func:`validate_step` takes it.
    """
    return None if result is None else _validate_reward(result, "end()")


def validate_context(result: Any, source: str) -> list[Message]:
    """Check the messages to sample the next answer after.

    Args:
        result: What a function that rewrites the context returned.
        source: Its name, for the error.

    Returns:
        The same messages as plain data.

    Raises:
        EnvironmentProtocolError: If they are no list of messages, empty, or end with an answer of the model.
    """
    if not issubclass(type(result), list):
        raise EnvironmentProtocolError(
            f"{source} returned {_describe(result)}; expected the list of chat messages that the model answers next."
        )
    try:
        messages = as_messages(_validate_observation(result, source))
    except EnvironmentProtocolError:
        raise
    except BaseException as error:
        pass_on_interrupt(error)
        raise EnvironmentProtocolError(
            f"{source} returned messages that cannot be read: {describe_error(error)}"
        ) from error
    if messages[-1]["role"] == "assistant":
        raise EnvironmentProtocolError(
            f"{source} returned messages that end with role 'assistant'; the last one must be what the model answers."
        )
    return messages


def validate_result(result: Any) -> tuple[float, dict[str, Any]]:
    """Check what an agent returned at the end of its episode.

    Returns:
        The reward, and the info with ``success`` if the agent reports it, as plain data.

    Raises:
        EnvironmentProtocolError: If it is neither a reward as :func:`validate_step` takes it nor a dictionary with one.
    """
    if not issubclass(type(result), dict):
        return _validate_reward(result, "the agent"), {}
    fields = _stored(result)
    unknown = sorted(str(name) for name in fields if name not in ("reward", "success", "info"))
    if unknown or "reward" not in fields:
        wrong = f"the unknown key {unknown[0]!r}" if unknown else "no reward"
        raise EnvironmentProtocolError(
            f"the agent returned a dictionary with {wrong}; expected `reward`, and optionally `success` and `info`."
        )
    info = _validate_info({} if fields.get("info") is None else fields["info"], "the agent")
    if fields.get("success") is not None:
        info = _validate_info({**info, "success": fields["success"]}, "the agent")
    return _validate_reward(fields["reward"], "the agent"), info


def read_success(value: Any) -> bool | None:
    """Return the success that a value reports: True, False, or 1 or 0 of any type of numbers. None if it is none of them."""
    reports = isinstance(value, (bool, np.bool_)) or (isinstance(value, Real) and value in (0, 1))
    return bool(value) if reports else None


def _validate_reward(reward: Any, method: str) -> float:
    if isinstance(reward, bool) or not isinstance(reward, Real):
        hint = (
            " Call .item() on it." if hasattr(reward, "item") else _not_awaited(reward) or " Convert it with float()."
        )
        raise EnvironmentProtocolError(f"{method} returned reward={_describe(reward)}; expected a finite number.{hint}")
    try:
        value = float(reward)
        shown = str(value)
    except OverflowError:
        value, shown = math.inf, _describe(reward)
    # Comparisons with NaN are False.
    if not abs(value) <= LARGEST_REWARD:
        raise EnvironmentProtocolError(
            f"{method} returned reward={shown}; expected a finite number up to {LARGEST_REWARD:.3g} (float32). "
            "One NaN or infinity invalidates the advantages of the whole group. Check divisions and logarithms."
        )
    return value


def _validate_observation(observation: Any, method: str) -> Observation:
    if isinstance(observation, str):
        return plain_text(observation)
    if not issubclass(type(observation), list):
        raise EnvironmentProtocolError(
            f"{method} returned the observation {_describe(observation)}; expected text or a list of chat messages."
        )
    if not observation:
        raise EnvironmentProtocolError(
            f"{method} returned an empty list of messages; expected at least one. Return '' for an empty observation."
        )
    messages = []
    for index, message in enumerate(list.__iter__(observation)):  # what is stored, whatever a subclass says it holds
        message = _stored(message)
        parted = isinstance(message, dict) and issubclass(type(message.get("content")), list) and message["content"]
        if parted and isinstance(message.get("role"), str):
            try:
                parts = [read_part(_stored(part)) for part in list.__iter__(message["content"])]
            except ImageError as error:
                raise EnvironmentProtocolError(f"{method} returned message {index} with a bad part: {error}") from error
            texts = [{**part, "text": plain_text(part["text"])} if "text" in part else part for part in parts]
            plain = _plain_message({**message, "content": ""}, f"{method} returned message {index}")
            messages.append({**plain, "content": as_content(texts)})
            continue
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise EnvironmentProtocolError(
                f"{method} returned message {index} as {_describe(message)}; expected a dict such as "
                '{"role": "user", "content": "..."}.'
            )
        messages.append(_plain_message(message, f"{method} returned message {index}"))
    return messages


def _plain_message(message: Message, source: str) -> Message:
    """Copy a message as data that can be written, sent to other processes and compared."""
    texts = {key: plain_text(value) for key, value in message.items() if type(key) is str and isinstance(value, str)}
    if len(texts) == len(message):
        return texts
    others = {key: value for key, value in message.items() if type(key) is not str or not isinstance(value, str)}
    try:
        return {**texts, **whole_copy(others)}
    except TooLargeError as error:
        names = ", ".join(repr(key) for key in others if type(key) is str)
        raise EnvironmentProtocolError(
            f"{source} whose fields besides texts ({names:.100}) {error}. They are not shortened, since a chat template may "
            "write them into the prompt: send less."
        ) from error


def _validate_info(info: Any, method: str) -> dict[str, Any]:
    if not isinstance(info, dict):
        raise EnvironmentProtocolError(f"{method} returned info={_describe(info)}; expected a dict, {{}} if empty.")
    memo: dict[int, Any] = {}
    # The environment may go on changing its own dict, and what is in it.
    info = {name: _copied(value, memo) for name, value in _stored(info).items()}
    if "success" in info:
        info["success"] = read_success(success := info["success"])
        if info["success"] is None:
            raise EnvironmentProtocolError(
                f"{method} returned info['success']={_describe(success)}; expected True or False."
            )
    if info.get("anchor") is not None:
        info["anchor"] = plain_text(str(info["anchor"]))
    return info


def _stored(value: Any) -> Any:
    """Copy what a dict stores, past the methods of a subclass, which may raise or never end. Other values stay."""
    return dict(dict.items(value)) if issubclass(type(value), dict) else value


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Copy containers and arrays. Other objects, which may be as large as a model, stay the environment's own, and so does
    what cannot be copied.

    Args:
        value: The value.
        memo: The copies by the ids of their originals, which may be held several times or hold themselves.
    """
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if id(value) in memo:
        return memo[id(value)]
    copy: Any
    try:
        stored = _as_stored(kind)
        if stored is dict:
            copy = memo[id(value)] = {}
            copy.update({key: _copied(item, memo) for key, item in list(dict.items(value))})
        elif stored is list:
            copy = memo[id(value)] = []
            copy += [_copied(item, memo) for item in list(list.__iter__(value))]
        elif stored is tuple:
            copy = memo[id(value)] = tuple([_copied(item, memo) for item in tuple.__iter__(value)])
        else:
            for one in _elements(value):
                memo[id(one)] = _copied(one, memo)
            array = hasattr(kind, "__array__") and not issubclass(kind, np.memmap)
            copy = deepcopy(value, memo) if issubclass(kind, _CONTAINERS) or array else value
            if getattr(value, "__dict__", None) is value:  # a dict whose items are its attributes
                copy.__dict__ = copy
    except BaseException as error:  # whatever its class raises, or too deep a nesting
        pass_on_interrupt(error)
        memo[id(value)] = copy = value
    return copy


def _elements(value: Any) -> Iterable[Any]:
    """Return what a container holds that copies itself."""
    if isinstance(value, np.ndarray):
        return value.flat if value.dtype == object else ()
    if isinstance(value, dict):
        return dict.values(value)
    return value if isinstance(value, (list, tuple, set, frozenset, deque)) else ()


def _as_stored(kind: type) -> type | None:
    """Return the built-in container by whose methods a class is copied: itself, or that of a subclass with methods of its
    own, which may never end. None for classes that copy themselves, such as named tuples.
    """
    base: type | None = next((one for one in (dict, list, tuple) if issubclass(kind, one)), None)
    if base is None or kind is base:
        return base
    own = any(getattr(kind, name, None) is not getattr(base, name, None) for name in ("__iter__", "items"))
    return base if own and kind.__module__ != "collections" else None


def describe_error(error: BaseException) -> str:
    """Describe an exception by its type and message in at most 2,000 characters, even if its ``__str__`` raises."""
    message = _said(str, error)
    message = message if len(message) <= _LONGEST_MESSAGE else message[:_LONGEST_MESSAGE] + "..."
    return f"{type(error).__name__}: {message}"


def _said(write: Callable[[Any], str], value: Any) -> str:
    """Return what ``str`` or ``repr`` says of a value of a user's class, even if it raises."""
    try:
        return plain_text(write(value))
    except BaseException as error:
        pass_on_interrupt(error)
        return f"<its {write.__name__} raises {type(error).__name__}>"


def describe_failure(error: BaseException) -> str:
    """Describe an exception of a user's code as :func:`describe_error` does, and where in this code it was raised."""
    frames = traceback.walk_tb(error.__traceback__)
    places = [(Path(frame.f_code.co_filename), line) for frame, line in frames]
    own = [place for place in places if _is_own(place[0])]
    if not own:
        return describe_error(error)
    # In the file that was called first: what it calls may be deep in libraries.
    path, line = [place for place in own if place[0] == own[0][0]][-1]
    return f"{describe_error(error)} ({path.name}, line {line})"


def _is_own(path: Path) -> bool:
    package, standard = _NOT_OWN
    return package not in path.parents and (standard not in path.parents or _INSTALLED in path.parents)


def _describe(value: Any) -> str:
    text = _said(repr, value)
    text = text if len(text) <= 80 else text[:77] + "..."
    kind = f"tuple of {len(value)} items" if isinstance(value, tuple) else type(value).__name__
    return f"{text} ({kind})"


def _hint(result: Any, items: int) -> str:
    """Return advice on a result that is no tuple of so many items."""
    if hint := _not_awaited(result):
        return hint
    if inspect.isgenerator(result):
        return " Replace yield by return."
    if isinstance(result, list) and len(result) == items:
        return " It is a list: return the same items as a tuple, without the brackets."
    if isinstance(result, tuple) and len(result) == 4:
        return " Replace the old Gym's `done` by terminated (the task is over) and truncated (a limit stopped it)."
    if isinstance(result, (str, list)) and items == 2:
        return " Return an info dict with the observation, {} if empty."
    return ""


def _not_awaited(result: Any) -> str:
    return " It was not awaited: define the method with `async def`." if inspect.isawaitable(result) else ""


@dataclass(frozen=True)
class CheckFinding:
    """One finding of the checker."""

    level: Literal["error", "warning"]
    """``"error"``: training would fail or be wrong. ``"warning"``: possibly unintended."""
    message: str
    name: str = ""
    """Name by which a run's diagnosis reports it; empty if only the checker does."""


@dataclass
class CheckReport:
    """Findings of :func:`check_environment`; empty if there are none."""

    environment: str = "the environment"
    """Name of the checked environment: its class, or the factory if construction failed."""
    findings: list[CheckFinding] = field(default_factory=list)

    @property
    def errors(self) -> list[str]:
        """Messages of the errors."""
        return [finding.message for finding in self.findings if finding.level == "error"]

    @property
    def warnings(self) -> list[str]:
        """Messages of the warnings."""
        return [finding.message for finding in self.findings if finding.level == "warning"]

    def warn(self, message: str, name: str = "") -> None:
        """Add a warning."""
        self.findings.append(CheckFinding("warning", message, name))

    def raise_for_errors(self) -> None:
        """Raise an ``EnvironmentProtocolError`` that lists every error, if there is one."""
        if self.errors:
            raise EnvironmentProtocolError(f"{self.environment} cannot be trained on:\n- " + "\n- ".join(self.errors))

    def __str__(self) -> str:
        lines = (f"{finding.level} in {self.environment}: {finding.message}" for finding in self.findings)
        return "\n".join(lines) or f"no findings in {self.environment}"


@dataclass
class _Watch:
    """The current call and its start time."""

    call: str = "the factory"
    since: float = field(default_factory=lambda: time.monotonic())

    def begin(self, call: str) -> None:
        self.call, self.since = call, time.monotonic()


Actions = Sequence[str] | Callable[[Observation], str]
"""Texts sent in a cycle, or a function of the latest observation."""


def check_environment(
    factory: EnvironmentFactory,
    *,
    seed: int = 0,
    episodes: int = 1,
    max_turns: int = 1,
    actions: Actions = ("0",),
    options: dict[str, Any] | None = None,
    timeout: float | None = None,
    with_context: bool = True,
) -> CheckReport:
    """Play an environment and report problems for training.

    Every episode is played twice, on two instances. Results must follow the protocol, instances must be reusable, and
    the same seed must give the same first observation (members of a group share it). The defaults are quick; for a
    thorough check, increase ``episodes`` and ``max_turns`` and pass sensible ``actions``.

    Args:
        factory: Makes an instance; called twice.
        seed: Seed of the first episode; the following ones count up.
        episodes: Number of episodes.
        max_turns: Turns per episode at most.
        actions: The answers.
        options: The dataset row passed to ``reset``.
        timeout: Seconds per call; a longer call is an error and ends the check. None waits forever.
        with_context: False if a history replaces the environment's own ``context``, which is then not checked.

    Returns:
        The findings. The environment's exceptions are findings too; see :meth:`CheckReport.raise_for_errors`.
    """
    report, watch = CheckReport(getattr(factory, "__name__", "the environment")), _Watch()
    seeds = range(seed, seed + episodes)

    async def check() -> None:
        instances: list[Environment] = []
        before = random_state()
        try:
            for _ in range(2):
                watch.begin("the factory")
                instances.append(factory())
                report.environment = type(instances[-1]).__name__
                check_methods(instances[-1], with_rows=options is not None, with_context=with_context)
            for seed in seeds:
                first, second = [
                    await _play(instance, seed, max_turns, actions, options, watch) for instance in instances
                ]
                _compare(first, second, seed, report)
                _check_lengths(first, seed, report)
            if before != random_state():
                report.warn(
                    "the environment draws from or seeds the global random state (random or numpy.random), so episodes "
                    "depend on other code in the process; use a separate random.Random or numpy Generator"
                )
        except BaseException as error:
            pass_on_interrupt(error)
            raised = f"{watch.call} raised {describe_error(error)}"
            message = str(error) if isinstance(error, EnvironmentProtocolError) else raised
            report.findings.append(CheckFinding("error", message))
        for instance in instances:
            watch.begin("close()")
            try:
                if (close := getattr(instance, "close", None)) is not None:
                    await _call(close)
            except BaseException as error:
                pass_on_interrupt(error)
                report.warn(f"close() raised {describe_error(error)}")

    _wait_for(check(), report, watch, timeout)
    return report


def check_methods(environment: Any, *, with_rows: bool = False, with_context: bool = True) -> None:
    """Check that ``reset`` and ``step`` exist, and that these, ``end`` and ``context`` have the protocol's signatures.

    Args:
        environment: The instance.
        with_rows: True if dataset rows are passed to ``reset``, which must then take ``options``.
        with_context: False if ``context`` is not asked, since the run has a history.

    Raises:
        EnvironmentProtocolError: If a method is missing or its signature does not fit.
    """
    name = type(environment).__name__
    for method, signature in (("reset", "reset(seed, options)"), ("step", "step(action)")):
        if not callable(getattr(environment, method, None)):
            raise EnvironmentProtocolError(f"{name} has no method {signature}.{_as_of_trl(environment)}")
    rows = {"options": None} if with_rows or reads_rows(environment.reset) else {}
    takes = inspect.signature(environment.reset).parameters
    hint = " Define it as reset(self, seed=None, options=None)."
    if with_rows and "seed" in takes and "options" not in takes:
        hint = " Dataset rows are passed to reset as options: add the parameter options=None, or pass no rows."
    _check_call(environment, "reset", f"reset({', '.join(['seed', *rows])})", hint, seed=0, **rows)
    _check_call(environment, "step", "step(action)", " Define it as step(self, action).", "")
    if getattr(environment, "end", None) is not None:
        hint = " It is called when a limit ends an episode, and returns a reward; give another method another name."
        if not callable(environment.end):
            raise EnvironmentProtocolError(f"{name}.end is {_describe(environment.end)}; expected a method.{hint}")
        _check_call(environment, "end", "end(reason)", hint, "max_turns")
    if with_context:
        hint = " It rewrites what the model sees; give another method another name, or pass history='full'."
        try:
            rewrites = callable(getattr(environment, "context", None))
        except BaseException as error:
            pass_on_interrupt(error)
            raise EnvironmentProtocolError(f"{name}.context raised {describe_error(error)}.{hint}") from error
        if rewrites:
            _check_call(environment, "context", "context(messages)", hint, [])


def _as_of_trl(environment: Any) -> str:
    """Return advice for an object of TRL's ``environment_factory``: ``reset``, and public methods that are tools."""
    kind = type(environment)
    tools = [name for name, _ in inspect.getmembers(kind, inspect.isfunction) if name[0] != "_" and name != "reset"]
    if not callable(getattr(environment, "reset", None)) or not tools or "step" in tools:
        return ""
    return (
        f" It looks like an environment_factory of TRL, whose methods are tools ({', '.join(tools[:3])}). Pass "
        f"environment=trl_environment({kind.__name__}), which is in agile_trainers.envs.libraries.trl_tools, or the id "
        f"'trl:{kind.__module__}:{kind.__qualname__}'."
    )


def _check_call(environment: Any, method: str, call: str, hint: str, *given: Any, **named: Any) -> None:
    signature = inspect.signature(getattr(environment, method))
    try:
        signature.bind(*given, **named)
    except TypeError as error:
        raise EnvironmentProtocolError(
            f"{type(environment).__name__}.{method}{signature} cannot be called as {call}: {error}.{hint}"
        ) from error


async def _play(
    environment: Environment, seed: int, max_turns: int, actions: Actions, options: dict[str, Any] | None, watch: _Watch
) -> tuple[Observation, list[StepResult]]:
    """Play one episode; return its first observation and its steps."""
    watch.begin(f"reset(seed={seed})")
    # A copy, as in a rollout: an environment may change its row.
    start, _ = validate_reset(await _call(bound(environment, "reset", seed, deepcopy(options))))
    observation, steps = start, list[StepResult]()
    for turn in range(max_turns):
        action = actions(observation) if callable(actions) else actions[turn % len(actions)]
        watch.begin(f"step() of turn {turn + 1} after reset(seed={seed})")
        steps.append(validate_step(await _call(bound(environment, "step", action))))
        observation, _, terminated, truncated, _ = steps[-1]
        if terminated or truncated:
            break
    else:
        watch.begin(f"end() of turn {max_turns} after reset(seed={seed})")
        reward = validate_end(await _call(bound(environment, "end", "max_turns")))
        if reward is not None:
            steps[-1] = (observation, steps[-1][1] + reward, *steps[-1][2:])
    return start, steps


def _compare(
    first: tuple[Observation, list[StepResult]],
    second: tuple[Observation, list[StepResult]],
    seed: int,
    report: CheckReport,
) -> None:
    start, other_start = first[0], second[0]
    if start != other_start:
        report.warn(
            f"reset(seed={seed}) gave {_describe(start)} and then, on another instance, {_describe(other_start)}: "
            "a group would not start from the same state; let reset depend on its seed alone",
            "environment_ignores_seed",
        )
    elif [step[:4] for step in first[1]] != [step[:4] for step in second[1]]:
        report.warn(
            f"the same actions after reset(seed={seed}) gave different results on two instances: members of a group would "
            "not play the same task; let results depend on the seed and the answers alone"
        )
    if start == "":
        report.warn(f"reset(seed={seed}) gave an empty observation: the model sees nothing")


def _check_lengths(episode: tuple[Observation, list[StepResult]], seed: int, report: CheckReport) -> None:
    texts = [_text(observation) for observation in (episode[0], *(step[0] for step in episode[1]))]
    longest = max(texts, key=len)
    if len(longest) > LONG_OBSERVATION:
        message = (
            f"an observation after reset(seed={seed}) has {len(longest):,} characters: a rollout cuts observations "
            "longer than max_observation_length; return only the text that the model needs"
        )
        report.warn(message)
    elif len(texts) > 3 and all(20 < len(a) < len(b) and a in b for a, b in pairwise(texts[1:])):
        message = (
            f"each observation after reset(seed={seed}) repeats the previous one: the conversation contains it "
            "already, and its length grows with the square of the turns; return only new text"
        )
        report.warn(message)


def _text(observation: Observation) -> str:
    if isinstance(observation, str):
        return observation
    return "\n".join(map(text_of, observation))


def random_state() -> tuple[Any, ...]:
    """Return the state of the process's random generators."""
    numpy_state = np.random.get_state(legacy=False)["state"]
    return random.getstate(), numpy_state["pos"], numpy_state["key"].tobytes()


async def _call(method: Callable[[], Any]) -> Any:
    """Call a method as a rollout does: only ``async def`` methods are awaited."""
    value = method()
    return await value if inspect.iscoroutinefunction(method) else value


def _wait_for(coroutine: Coroutine[Any, Any, None], report: CheckReport, watch: _Watch, timeout: float | None) -> None:
    """Run a coroutine, also inside a running event loop (in a notebook), where ``asyncio.run`` is not allowed."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        if timeout is None:
            return asyncio.run(coroutine)
    thread = threading.Thread(target=asyncio.run, args=(coroutine,), daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(None if timeout is None else 0.02)
        if timeout is not None and thread.is_alive() and time.monotonic() - watch.since > timeout:
            report.findings.append(CheckFinding("error", f"{watch.call} did not return within {timeout:g} s"))
            return None
    return None
