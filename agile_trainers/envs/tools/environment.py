"""Environments in which the model calls tools: plain typed Python functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

from transformers.utils import get_json_schema

from agile_trainers.envs.base import Observation, ResetResult, StepResult
from agile_trainers.envs.isolation.levels import IsolationError, require
from agile_trainers.envs.questions.environment import ReasoningEnvironment
from agile_trainers.envs.questions.rows import Row
from agile_trainers.envs.tools.calls import MalformedCall, ToolCall, argument_error, parse_tool_calls
from agile_trainers.envs.tools.python_sandbox import python
from agile_trainers.types import Message

CallFormat = Literal["hermes", "llama3"]
_EXAMPLES = {
    "hermes": '<tool_call>\n{"name": "<tool>", "arguments": {"<argument>": <value>}}\n</tool_call>',
    "llama3": '{"name": "<tool>", "parameters": {"<argument>": <value>}}',
}
_MAX_CALLS = 8
"""In one answer; the rest is refused, so that no answer can cost any amount of time."""


class ToolEnvironment(ReasoningEnvironment):
    """Asks the question of a row, answers tool calls, and rewards the first answer that calls nothing.

    A tool is a typed function with a Google-style docstring that describes it and every argument; its schema is made by
    ``transformers.utils.get_json_schema``. What it returns is shown to the model, as JSON unless it is text; so is what
    it raises. Calls are read from the model's text in both formats of :mod:`~agile_trainers.envs.tools.calls`. One that
    is malformed, or names an unknown tool or wrong arguments, is answered with what was expected.

    ``info`` counts ``calls`` and ``failed_calls`` (of any kind) of the episode. Reaching ``max_turns`` without an answer
    truncates the episode.

    Args:
        tools: The functions. They run in the training process and are trusted; for code that the model writes, see
            :func:`~agile_trainers.envs.tools.python_sandbox.python`.
        data: Rows of question and answer, as for :class:`~agile_trainers.envs.questions.environment.ReasoningEnvironment`.
        call_format: The format in which the model is told to write calls. Read are both.
        announce: Where the list of tools is put: in a ``"system"`` message, in front of the first ``"user"`` message (for
            templates without system messages), or nowhere (``"no"``: the chat template lists them itself, from
            ``chat_template_kwargs={"tools": environment.schemas}``).
        result_role: ``"user"``: results come as text in ``<tool_response>`` tags, which every template can write.
            ``"tool"``: as messages of that role, for templates that know it.
        invalid_reward: Reward of an answer with a call that does not fit its tool. Default 0.
        max_turns: Answers per episode.
        options: Everything else that ``ReasoningEnvironment`` takes: ``reward_fn``, ``template``, ``split``, ...

    Raises:
        ValueError: If a tool has no usable docstring or type hints, two have the same name, or an option is wrong.
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
        **options: Any,
    ):
        for name, value, choices in (
            ("call_format", call_format, tuple(_EXAMPLES)),
            ("announce", announce, ("system", "user", "no")),
            ("result_role", result_role, ("user", "tool")),
        ):
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")
        if max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, got {max_turns}.")
        self.schemas = [_schema(tool) for tool in tools]
        self.tools = {schema["function"]["name"]: tool for schema, tool in zip(self.schemas, tools)}
        if not tools or len(self.tools) < len(tools):
            raise ValueError(f"Tools need different names, and there must be one: got {list(self.tools)}.")
        for name, tool in self.tools.items():
            if tool is python:
                require(f"The tool {name}")
        self._parameters = {s["function"]["name"]: s["function"].get("parameters", {}) for s in self.schemas}
        self.call_format, self.announce, self.result_role = call_format, announce, result_role
        self.invalid_reward, self.max_turns = invalid_reward, max_turns
        super().__init__(data, **options)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Ask a question; see :meth:`ReasoningEnvironment.reset`."""
        self.turns = self.calls = self.failed_calls = 0
        return super().reset(seed, options)

    def step(self, action: str) -> StepResult:
        """Run the calls in an answer, or reward it if there are none."""
        self.turns += 1
        calls = parse_tool_calls(action)
        if not calls:
            observation, reward, terminated, truncated, info = super().step(action)
            return observation, reward, terminated, truncated, {**info, **self._counts()}
        fitting = [self._error(call) is None for call in calls]
        results = [self._run(call) for call in calls[:_MAX_CALLS]]
        if len(calls) > _MAX_CALLS:
            results.append(f"Error: only the first {_MAX_CALLS} of {len(calls)} calls were run.")
        self.calls += len(calls)
        self.failed_calls += sum(result.startswith("Error: ") for result in results)
        reward = 0.0 if all(fitting) else self.invalid_reward
        info = {"success": False, **self._counts()}
        return self._observation(results), reward, False, self.turns >= self.max_turns, info

    def prompt(self, row: Row) -> list[Message]:
        """The messages that ask a row's question, with the list of tools."""
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

    def _run(self, call: ToolCall | MalformedCall) -> str:
        """What the model is shown for a call."""
        error = self._error(call)
        if error is not None or isinstance(call, MalformedCall):
            return f"Error: {error}"
        try:
            result = self.tools[call.name](**call.arguments)
        except IsolationError:
            raise  # it is this machine that cannot run the tool, whatever the model writes
        except Exception as exception:
            kind = "" if isinstance(exception, ValueError) else f"{type(exception).__name__}: "
            return f"Error: {kind}{exception}"
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)

    def _error(self, call: ToolCall | MalformedCall) -> str | None:
        """Why a call cannot be run."""
        if isinstance(call, MalformedCall):
            return call.reason
        if call.name not in self.tools:
            return f"there is no tool {call.name[:40]!r}; the tools are: {', '.join(self.tools)}"
        error = argument_error(self._parameters[call.name], call.arguments)
        return None if error is None else f"{call.name}: {error}"

    def _observation(self, results: list[str]) -> Observation:
        if self.result_role == "tool":
            return [{"role": "tool", "content": result} for result in results]
        # A result must not pretend to end and another one to begin.
        shown = (result.replace("tool_response>", "tool_response >") for result in results)
        return "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in shown)

    def _counts(self) -> dict[str, Any]:
        return {"calls": self.calls, "failed_calls": self.failed_calls}


def describe_tools(schemas: Sequence[dict[str, Any]], call_format: CallFormat = "hermes") -> str:
    """The list of tools and how to call them, for a model whose chat template has no place for it.

    Args:
        schemas: As ``transformers.utils.get_json_schema`` makes them.
        call_format: ``"hermes"`` (Qwen's too) or ``"llama3"``.
    """
    listed = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    return (
        f"These tools can be called:\n<tools>\n{listed}\n</tools>\nTo call one, write\n{_EXAMPLES[call_format]}\n"
        "Its result comes back in <tool_response> tags. When you know the final answer, write it without calling a tool."
    )


def _schema(tool: Callable[..., Any]) -> dict[str, Any]:
    name = getattr(tool, "__name__", repr(tool))
    try:
        schema = get_json_schema(tool)
    except Exception as error:  # transformers has several of its own
        raise ValueError(
            f"No schema can be made for the tool {name}: {error} A tool needs type hints and a docstring that describes it "
            "and, under 'Args:', each argument."
        ) from error
    schema["function"].pop("return", None)  # no chat template shows it
    return schema
