"""Environments in which the model calls typed Python functions as tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from agile_trainers.envs.base import ResetResult, StepResult
from agile_trainers.envs.isolation.levels import require
from agile_trainers.envs.questions.environment import ReasoningEnvironment
from agile_trainers.envs.questions.rows import Row
from agile_trainers.envs.tools.python_sandbox import python
from agile_trainers.envs.tools.toolbox import (
    CALL_EXAMPLES,
    CallFormat,
    Toolbox,
    as_observation,
    as_tool_messages,
    count_failed,
    describe_tools,
    dropping_results,
    parse_tool_calls,
)
from agile_trainers.types import Message

_MAX_CALLS = 8
"""Maximum number of calls in one answer, which limits its time; further calls are rejected."""


class ToolEnvironment(ReasoningEnvironment):
    """Asks the question of a row, answers tool calls, and rewards the first answer without a call.

    A tool is a typed function with a Google-style docstring that describes it and every argument;
    ``transformers.utils.get_json_schema`` makes its schema. The model sees its result, as JSON unless it is text or has
    images (:meth:`~agile_trainers.envs.tools.toolbox.Toolbox.run`), or its exception. Calls are read from the model's
    text in both formats of :mod:`~agile_trainers.envs.tools.toolbox`. For a call that is malformed, or has an unknown
    tool or wrong arguments, the model sees the expected form.

    ``info`` counts ``calls`` and ``failed_calls`` (of any kind) of the episode. Reaching ``max_turns`` without an answer
    truncates the episode.

    Args:
        tools: The functions. They run in the training process and are trusted; for code that the model writes, see
            :func:`~agile_trainers.envs.tools.python_sandbox.python`.
        data: Rows of question and answer, as for :class:`~agile_trainers.envs.questions.environment.ReasoningEnvironment`.
        call_format: The format in which the model is told to write calls. Read are both.
        announce: Place of the list of tools: a ``"system"`` message, the beginning of the first ``"user"`` message (for
            templates without system messages), or none (``"no"``: the chat template lists them, from
            ``chat_template_kwargs={"tools": environment.schemas}``).
        result_role: ``"user"``: results are text in ``<tool_response>`` tags, for any template. ``"tool"``: results are
            messages of that role, for templates that support it.
        invalid_reward: Reward of an answer with an invalid call. Default 0.
        max_turns: Answers per episode.
        keep_results: Number of answers with calls whose results the model keeps seeing; ``(dropped)`` takes the place of
            older ones. It makes the environment define ``context`` (:mod:`agile_trainers.envs.context`). Default: all.
        options: Further arguments of ``ReasoningEnvironment``: ``reward_fn``, ``template``, ``split``, ...

    Raises:
        ValueError: If two tools have the same name, one is ``async`` or a generator, or an option is wrong.
        Exception: Of transformers, if a tool has no usable docstring or type hints.
    """

    name = "ToolEnvironment"

    def __init__(
        self,
        tools: Sequence[Callable[..., Any]],
        data: Any = None,
        *,
        call_format: CallFormat = "hermes",
        announce: Literal["system", "user", "no"] = "system",
        result_role: Literal["user", "tool"] = "user",
        invalid_reward: float = 0.0,
        max_turns: int = 8,
        keep_results: int | None = None,
        **options: Any,
    ):
        for name, value, choices in (
            ("call_format", call_format, tuple(CALL_EXAMPLES)),
            ("announce", announce, ("system", "user", "no")),
            ("result_role", result_role, ("user", "tool")),
        ):
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")
        self._toolbox = Toolbox(tools)
        self.schemas, self.tools = self._toolbox.schemas, self._toolbox.tools
        for name, tool in self.tools.items():
            if tool is python:
                require(f"The tool {name}")
        self.call_format, self.announce, self.result_role = call_format, announce, result_role
        self.invalid_reward, self.max_turns = invalid_reward, max_turns
        if keep_results is not None:
            self.context = dropping_results(keep_results, tagged=result_role == "user")
        super().__init__(data, **options)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Return a question; see :meth:`ReasoningEnvironment.reset`."""
        self.turns = self.calls = self.failed_calls = 0
        return super().reset(seed, options)

    def step(self, action: str) -> StepResult:
        """Run the calls in an answer, or reward it if there are none."""
        self.turns += 1
        calls = parse_tool_calls(action)
        if not calls:
            observation, reward, terminated, truncated, info = super().step(action)
            return observation, reward, terminated, truncated, {**info, **self._counts()}
        fitting = [self._toolbox.error(call) is None for call in calls]
        results = [self._toolbox.run(call) for call in calls[:_MAX_CALLS]]
        if len(calls) > _MAX_CALLS:
            results.append(f"Error: only the first {_MAX_CALLS} of {len(calls)} calls were run.")
        self.calls += len(calls)
        self.failed_calls += count_failed(results)
        reward = 0.0 if all(fitting) else self.invalid_reward
        info = {"success": False, **self._counts()}
        shown = as_tool_messages(results) if self.result_role == "tool" else as_observation(results)
        return shown, reward, False, self.turns >= self.max_turns, info

    def prompt(self, row: Row) -> list[Message]:
        """Return the messages of a row's question, with the list of tools."""
        messages = super().prompt(row)
        if self.announce == "no":
            return messages
        text, (first, *rest) = describe_tools(self.schemas, self.call_format), messages
        if first["role"] == self.announce:
            parts = (first["content"], text) if self.announce == "system" else (text, first["content"])
            return [{**first, "content": "\n\n".join(parts)}, *rest]
        if self.announce == "system":
            return [{"role": "system", "content": text}, *messages]
        raise ValueError(
            f"announce='user' puts the tools into the first message, but that has the role {first['role']!r}. Use "
            "announce='system' or drop the system prompt."
        )

    def _counts(self) -> dict[str, Any]:
        return {"calls": self.calls, "failed_calls": self.failed_calls}
