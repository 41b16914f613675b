"""Adapts TRL's ``tools``, and objects of its ``environment_factory``, whose public methods are tools, to the protocol."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import NoneType
from typing import Any, Literal

from agile_trainers.envs.agent import is_agent
from agile_trainers.envs.base import EnvironmentFactory, ResetResult, StepResult
from agile_trainers.envs.context import with_text
from agile_trainers.envs.images import is_image
from agile_trainers.envs.tools.toolbox import (
    CallFormat,
    MalformedCall,
    Toolbox,
    ToolCall,
    as_observation,
    count_failed,
    describe_tools,
    dropping_results,
    is_async,
    parse_tool_calls,
)
from agile_trainers.imports import load_named
from agile_trainers.types import Content, Message, parts_of

UNREWARDED = "agile_trainers.unrewarded"
"""Name in the info of a last step, there if nothing of the environment rewards the episode. No other environment has it."""
_OWN_METHODS = ("reset", "get_reward")
_OF_TRAINERS = ("completion_ids", "trainer_state", "log_extra", "log_metric", "trajectories")
"""Arguments of reward functions that only a trainer gives."""
_CALL = re.compile(r"<tool_call>.*?</tool_call>", re.DOTALL)


def make_factory(path: str, **kwargs: Any) -> EnvironmentFactory:
    """Make a factory for ``module.path:Name``.

    Raises:
        ValueError: If there is no such name; see also :func:`trl_environment`.
    """
    return trl_environment(load_named(path), **kwargs)


class _NoObject:
    """Stands in for the object where there are functions only; the prompt is the row's."""

    def reset(self, **row: Any) -> None:
        return None


def trl_environment(factory: Callable[[], Any] | None = None, **kwargs: Any) -> EnvironmentFactory:
    """Convert the ``environment_factory`` and the ``tools`` of TRL's ``GRPOTrainer`` to an environment factory.

    Args:
        factory: Makes one object; called without arguments. None if there are ``tools`` only.
        kwargs: See :class:`TRLEnvironment`.

    Raises:
        ValueError: See :class:`TRLEnvironment`.
    """
    if factory is None and not kwargs.get("tools"):
        raise ValueError("trl_environment() needs a factory, TRL's environment_factory, or tools=[...], its tools.")
    factory = _NoObject if factory is None else factory
    methods = _tools(first := factory())
    last = [*methods.values(), getattr(first, "get_reward", None)]
    last += [one for name in ("tools", "reward_funcs") for one in _as_list(kwargs.get(name, ()))]
    kind = AsyncTRLEnvironment if any(map(is_async, last)) else TRLEnvironment
    kind(factory, **kwargs)
    return functools.partial(kind, factory, **kwargs)


def from_environment_factory(given: Any, tools: Sequence[Callable[..., Any]] | None = None) -> Any:
    """Return what ``environment=`` takes for TRL's argument ``environment_factory``.

    Args:
        given: A factory of objects whose methods are tools, or several by name, as in TRL; or already an environment: an id,
            an agent, or a factory of what has ``step`` and a ``reset`` that takes ``options``.
        tools: TRL's argument of that name; tools of every object.

    Raises:
        ValueError: See :class:`TRLEnvironment`.
    """
    if isinstance(given, Mapping):
        return {name: from_environment_factory(one, tools) for name, one in given.items()}
    if isinstance(given, str) or is_agent(given) or not callable(given):
        return given
    made = given()
    reset = getattr(made, "reset", None)
    ours = hasattr(made, "step") and callable(reset) and "options" in inspect.signature(reset).parameters
    if not ours:
        return trl_environment(given, tools=tools or ())
    if tools:
        raise ValueError(
            "`tools` are added to objects of TRL's environment_factory, and this one makes an environment."
        )
    return given


class TRLEnvironment:
    """Plays an object of TRL's ``environment_factory`` as an environment.

    As in TRL, its public methods are the tools. The result of ``reset(**row)``, text or parts with images, is appended
    to the last message of the row's ``prompt`` (or is the prompt), which shows the columns ``image`` and ``images``. The
    first answer without a tool call, or a limit of the trainer, ends the episode, which is then rewarded: by the
    object's ``get_reward()`` and by ``reward_funcs``, which get the object as ``environments``, and the conversation in
    TRL's form (``tool_calls``; results by ``name``). Rewards add up, without those that are None. Without either, all
    rewards are those of the trainer's own ``reward_funcs``. An episode whose rewards are all None is left
    out of the update if no other function rewards it; its info says ``agile_trainers.unrewarded``.

    Unlike in TRL, calls are read in Hermes' and in Llama 3's format for every chat template, and ``reset`` also gets
    ``seed`` if it takes one (``**kwargs`` takes one). An object with random numbers should seed itself from it, since all
    members of a group must start in the same state.

    ``info`` counts ``calls`` and ``failed_calls`` of the episode, and has ``success`` if the object has such an attribute,
    which must be True, False, 1 or 0 (NumPy's too), or None for an episode that reports none.

    Args:
        factory: Makes one object.
        tools: Functions that are tools too, as in TRL's argument of that name.
        reward_funcs: One or several of TRL's reward functions.
        reward_weights: A weight for each of them. Default: 1. The weight of ``get_reward`` is always 1.
        call_format: The format of calls in the instructions to the model.
        announce: ``"system"``: list the tools in a system message. ``"no"``: do not list them (the chat template does).
        keep_results: Number of answers with calls whose results the model keeps seeing; ``(dropped)`` takes the place of
            older ones. Reward functions get all results. Default: all.

    Raises:
        ValueError: If the object has no ``reset`` or no tool, a tool has no docstring or type hints, ``reward_weights``
            do not match, or a reward function requires what only the trainer can give.
    """

    def __init__(
        self,
        factory: Callable[[], Any],
        *,
        tools: Sequence[Callable[..., Any]] = (),
        reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]] = (),
        reward_weights: Sequence[float] | None = None,
        call_format: CallFormat = "hermes",
        announce: Literal["system", "no"] = "system",
        keep_results: int | None = None,
    ):
        self.object = factory()
        self.name = "trl" if factory is _NoObject else f"trl:{type(self.object).__name__}"
        own = _tools(self.object)
        self.tools = {**own, **{tool.__name__: tool for tool in _as_list(tools)}}
        self.reward_funcs = _as_list(reward_funcs)
        self.reward_weights = [1.0] * len(self.reward_funcs) if reward_weights is None else list(reward_weights)
        if not callable(getattr(self.object, "reset", None)) or not self.tools:
            raise ValueError(
                f"{self.name} must define reset(**row) and at least one public method, which becomes a tool."
            )
        if len(self.tools) < len(own) + len(_as_list(tools)):
            names = ", ".join([*own, *(tool.__name__ for tool in _as_list(tools))])
            raise ValueError(f"{self.name} has two tools of one name: {names}. Rename one.")
        if len(self.reward_weights) != len(self.reward_funcs):
            raise ValueError(f"{len(self.reward_funcs)} reward_funcs need as many weights, got {self.reward_weights}.")
        for function in self.reward_funcs:
            try:
                asked = inspect.signature(function).parameters
            except (TypeError, ValueError):  # a callable written in C has none
                continue
            if missing := [it.name for it in asked.values() if it.name in _OF_TRAINERS and it.default is it.empty]:
                name = getattr(function, "__name__", function)
                raise ValueError(
                    f"The reward function {name!r} requires {missing[0]!r}, which the trainer's reward_funcs get and those "
                    "of an environment do not. Pass it to the trainer."
                )
        if announce not in ("system", "no"):
            raise ValueError(f"announce must be 'system' or 'no', got {announce!r}.")
        if keep_results is not None:
            self.context = dropping_results(keep_results)
        self._toolbox = Toolbox(list(self.tools.values()), awaits=isinstance(self, AsyncTRLEnvironment))
        self.schemas = self._toolbox.schemas
        self._announcement = describe_tools(self.schemas, call_format) if announce == "system" else ""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Reset the object with the dataset row.

        Raises:
            ValueError: If neither the row nor the object gives a prompt.
        """
        self.row = dict(options or {})
        arguments = dict(self.row)
        parameters = inspect.signature(self.object.reset).parameters
        if "seed" in parameters or any(it.kind is it.VAR_KEYWORD for it in parameters.values()):
            arguments.setdefault("seed", seed)
        said = self.object.reset(**arguments)
        self.prompt = _prompt(self.row, said, self.name)
        self.completion: list[Message] = []
        self.calls = self.failed_calls = 0
        self.rewarded = bool(self.reward_funcs) or hasattr(self.object, "get_reward")
        if not self._announcement:
            return list(self.prompt), {}
        first = self.prompt[0]
        if first["role"] == "system":
            return [with_text(first, self._announcement), *self.prompt[1:]], {}
        return [{"role": "system", "content": self._announcement}, *self.prompt], {}

    def step(self, action: str) -> StepResult:
        """Run the calls in an answer, or reward the episode if there are none."""
        calls = self._calls_in(action)
        if calls:
            return self._continue(calls, [self._toolbox.run(call) for call in calls])
        return self._over([reward() for reward in self._rewards()])

    def end(self, reason: str) -> float:
        """Reward an episode that a limit ends while the object still plays, as TRL rewards every episode."""
        return self._total([reward() for reward in self._rewards()])

    def close(self) -> None:
        """Close the object if it defines ``close``."""
        if "close" not in self.tools and hasattr(self.object, "close"):
            self.object.close()

    def _calls_in(self, action: str) -> list[ToolCall | MalformedCall]:
        calls = parse_tool_calls(action)
        functions = [{"name": one.name, "arguments": one.arguments} for one in calls if isinstance(one, ToolCall)]
        message: Message = {"role": "assistant", "content": action}
        if functions:  # in TRL's form, since reward functions read it
            message["content"] = _CALL.sub("", action).strip() if _CALL.search(action) else ""
            message["tool_calls"] = [{"type": "function", "function": function} for function in functions]
        self.completion.append(message)
        return calls

    def _continue(self, calls: list[ToolCall | MalformedCall], results: list[Content]) -> StepResult:
        self.calls += len(results)
        self.failed_calls += count_failed(results)
        names = [call.name if isinstance(call, ToolCall) else "" for call in calls]
        self.completion += [{"role": "tool", "name": n, "content": result} for n, result in zip(names, results)]
        return as_observation(results), 0.0, False, False, self._info()

    def _rewards(self) -> list[Callable[[], Any]]:
        """Return the functions that reward the episode, ``get_reward`` first."""
        columns: dict[str, Any] = {name: [value] for name, value in self.row.items() if name != "prompt"}
        columns |= {"prompts": [self.prompt], "completions": [self.completion], "environments": [self.object]}
        functions: list[Callable[[], Any]] = [functools.partial(function, **columns) for function in self.reward_funcs]
        return [self.object.get_reward, *functions] if hasattr(self.object, "get_reward") else functions

    def _over(self, values: list[Any]) -> StepResult:
        total = self._total(values)
        return "", total, True, False, self._info()

    def _total(self, values: list[Any]) -> float:
        """Add up what :meth:`_rewards` gave."""
        own = [values.pop(0)] if hasattr(self.object, "get_reward") else []
        values = [_only(*named) for named in zip(self.reward_funcs, values, strict=True)]
        weighted = [*((1.0, value) for value in own), *zip(self.reward_weights, values)]
        given = [weight * float(value) for weight, value in weighted if value is not None]
        self.rewarded = bool(given)
        return math.fsum(given)

    def _info(self) -> dict[str, Any]:
        info: dict[str, Any] = {"calls": self.calls, "failed_calls": self.failed_calls}
        if not self.rewarded:
            info[UNREWARDED] = True
        success = getattr(self.object, "success", None)
        if success is not None and not callable(success):  # a tool may have the name
            info["success"] = success
        return info


class AsyncTRLEnvironment(TRLEnvironment):
    """Plays an object with ``async`` tools or rewards, which are awaited. Its other methods must not block."""

    async def step(self, action: str) -> StepResult:  # type: ignore[override]
        """Await the calls in an answer, or reward the episode if there are none."""
        calls = self._calls_in(action)
        if calls:
            return self._continue(calls, [await self._toolbox.run_awaited(call) for call in calls])
        return self._over([await _awaited(reward()) for reward in self._rewards()])

    async def end(self, reason: str) -> float:  # type: ignore[override]
        """Await the reward of an episode that a limit ends."""
        return self._total([await _awaited(reward()) for reward in self._rewards()])


def _tools(instance: Any) -> dict[str, Callable[..., Any]]:
    # Looked up on the class, as in TRL, since properties would be evaluated on the instance.
    names = [name for name, _ in inspect.getmembers(type(instance), inspect.isfunction)]
    return {name: getattr(instance, name) for name in names if name[0] != "_" and name not in _OWN_METHODS}


def _prompt(row: dict[str, Any], said: Any, name: str) -> list[Message]:
    """Return the prompt of a row, with its images, and what ``reset`` returned at its end."""
    prompt = row.get("prompt")
    messages: list[Message]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt or []]
    if said is None and not messages:
        raise ValueError(f"{name}: the row has no 'prompt' and reset() returned None, so there is no prompt.")
    if not isinstance(said, (str, list, NoneType)):
        raise ValueError(
            f"{name}: reset() returned {type(said).__name__}; expected text, None, or a list of parts, such as "
            '[{"type": "image", "image": image}].'
        )
    if not messages:
        messages = [{"role": "user", "content": said}]
    elif said:
        last = messages[-1]
        texts = isinstance(last["content"], str) and isinstance(said, str)
        last["content"] = last["content"] + said if texts else [*parts_of(last), *parts_of({"content": said})]
    images = [one for one in row.get("images") or [row.get("image")] if is_image(one)]
    return _showing(messages, images) if images else messages


def _showing(messages: list[Message], images: list[Any]) -> list[Message]:
    """Return messages with images where TRL puts them: in the parts that wait for one, else before the first user's text."""
    left, shown = list(images), list[Message]()
    waits = any(_waits(part) for message in messages for part in parts_of(message))
    for message in messages:
        first = [{"type": "image"}] * len(left) if message["role"] == "user" and not waits else []
        parts = [
            {**part, "image": left.pop(0)} if left and _waits(part) else part for part in first + parts_of(message)
        ]
        shown.append({**message, "content": parts})
    if left:
        raise ValueError(f"A row has {len(images)} images, but its prompt has no place for {len(left)} of them.")
    return shown


def _waits(part: dict[str, Any]) -> bool:
    return part["type"] == "image" and "image" not in part


def _as_list(functions: Callable[..., Any] | Sequence[Callable[..., Any]]) -> list[Callable[..., Any]]:
    return [functions] if callable(functions) else list(functions)


def _only(function: Any, values: Any) -> Any:
    """Return the reward that a function gave the one episode it was called with."""
    try:
        (value,) = values
    except (TypeError, ValueError):
        name = getattr(function, "__name__", function)
        raise ValueError(
            f"The reward function {name!r} returned {values!r:.100} for one episode; expected a list of one reward or None."
        ) from None
    return value


async def _awaited(value: Any | Awaitable[Any]) -> Any:
    return await value if inspect.isawaitable(value) else value
