"""Tells whether a chat template keeps the turns of a conversation as they were sampled.

The template itself says how an answer looks: it is rendered as the last message of a conversation, with and without
thinking, and what follows the generation prompt there is what a model of this template samples: the space after Mistral's
``[/INST]``, the channels of gpt-oss, the end-of-turn token. That text goes back into the history as the answer's
``content``, and the longer conversation must begin with what was there before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from agile_trainers.types import Message

ANSWER = "agileAnswerProbe"
THOUGHT = "agileThoughtProbe"
_THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Where templates look for the thinking of an answer."""
_MARKS = (("<think>\n", "\n</think>\n\n"), ("<|channel>thought\n", "\n<channel|>"))
"""How models open and close thinking that their template does not read from a field; the second pair is Gemma 4's."""
_OPENED = re.compile(r"<think>\s*\Z")
_CLOSED = re.compile(r"(<think>\s*</think>|<\|channel>thought\s*<channel\|>)\s*\Z")
_EXCHANGES = 3


class Render(Protocol):
    """Renders a conversation, with or without a generation prompt."""

    def __call__(self, messages: list[Message], generation_prompt: bool = True) -> str: ...


@dataclass(frozen=True)
class Rewrite:
    """A conversation with its earlier turns as they were, and what the template makes of it."""

    kept: str
    rendered: str

    def parting(self, width: int = 50) -> tuple[str, str]:
        """Both texts around the place where they part, ``width`` characters on each side."""
        kept, rendered = (
            text.replace(THOUGHT, "(thinking)").replace(ANSWER, "(answer)") for text in (self.kept, self.rendered)
        )
        start = next((i for i, (a, b) in enumerate(zip(kept, rendered)) if a != b), min(len(kept), len(rendered)))
        window = slice(max(start - width, 0), start + width)
        return kept[window], rendered[window]

    def __str__(self) -> str:
        """Both texts around the place where they part, a line each."""
        kept, rendered = self.parting()
        return f"  as it was       {kept!r}\n  rendered later  {rendered!r}"


@dataclass(frozen=True)
class Sampled:
    """An answer as a model samples it after the generation prompt."""

    text: str
    """Without its end-of-turn token."""
    end: str
    """The end-of-turn token; empty where a turn has none."""
    fields: Message
    """The message that the template was given, its thinking in fields of its own where it reads those."""


def find_rewrite(
    render: Render,
    prompt: list[Message],
    ends: Sequence[str],
    *,
    thinking: bool = True,
    observation: list[Message] | None = None,
) -> Rewrite | None:
    """Look for a change that a template makes to earlier turns when a conversation grows.

    Args:
        render: Renders a conversation.
        prompt: The messages before the first answer.
        ends: Texts of the tokens that may end an answer.
        thinking: Whether answers may contain thinking; if not, only plain answers are tried.
        observation: The messages after each answer. Default: one of the user.

    Returns:
        None if the template writes every kind of answer back as it was sampled, and always the same after it; otherwise
        an example.
    """
    observation = observation or [{"role": "user", "content": "observation"}]
    opened = _opening(render(prompt))
    calls = observation[0]["role"] == "tool"
    for sampled in answers_as_sampled(render, prompt, ends, thinking=thinking, calls=calls):
        whole = opened + sampled.text
        texts = dict.fromkeys((whole.strip(), sampled.text.strip(), whole, sampled.text))
        contents: list[Message] = [{"content": text} for text in texts]
        try:
            rewrites = [_rewrite_of(render, prompt, sampled, content, observation) for content in contents]
        except ValueError:  # gpt-oss refuses channels in the content.
            rewrites = [_rewrite_of(render, prompt, sampled, sampled.fields, observation)]
        if None not in rewrites:
            return rewrites[0]
    return None


def sampled_call(render: Render, prompt: list[Message], ends: Sequence[str]) -> str | None:
    """A call of a tool as the template writes it in an answer; None if it does not know calls."""
    calls = list(_calls(render, prompt, ends, thinking=True))
    return calls[-1].text.strip() if calls else None


def answers_as_sampled(
    render: Render, prompt: list[Message], ends: Sequence[str], *, thinking: bool = True, calls: bool = False
) -> Iterator[Sampled]:
    """The kinds of answers that follow a prompt: with thinking, and plain ones.

    Args:
        render: Renders a conversation.
        prompt: The messages before the answer.
        ends: Texts of the tokens that may end an answer.
        thinking: Whether there are answers with thinking; where the generation prompt opens it, there are no others.
        calls: Whether the answers call a tool, where the template knows calls.
    """
    before = render(prompt)
    if calls and (found := list(_calls(render, prompt, ends, thinking))):
        yield from found
        return
    opened, thinks = _thinks(before, thinking)
    if thinks:
        fields = {"content": ANSWER, **dict.fromkeys(_THOUGHT_FIELDS, THOUGHT)}
        thoughtful = _as_written(render, prompt, fields, ends)
        yield from [thoughtful] if thoughtful else _in_content(render, prompt, ends)
    if not opened:
        yield _as_written(render, prompt, {"content": ANSWER}, ends) or Sampled(ANSWER, "", {"content": ANSWER})


def _thinks(before: str, thinking: bool) -> tuple[bool, bool]:
    """Whether the generation prompt opens the thinking, and whether answers may hold some."""
    opened = bool(_OPENED.search(before))
    return opened, opened or (thinking and not _CLOSED.search(before))


def _in_content(render: Render, prompt: list[Message], ends: Sequence[str]) -> Iterator[Sampled]:
    """Answers whose thinking is text of their content, as the template writes it if it does not drop it."""
    opened = _opening(render(prompt))
    for opening, closing in _MARKS:
        if opening.startswith(opened):
            content = opening + THOUGHT + closing + ANSWER
            written = _as_written(render, prompt, {"content": content}, ends)
            yield written or Sampled(content.removeprefix(opened), "", {"content": content})


def _calls(render: Render, prompt: list[Message], ends: Sequence[str], thinking: bool) -> Iterator[Sampled]:
    """Answers that call a tool, with thinking and without."""
    opened, thinks = _thinks(render(prompt), thinking)
    thoughts = [dict.fromkeys(_THOUGHT_FIELDS, THOUGHT)] if thinks else []
    for thought in thoughts + ([] if opened else [{}]):
        if call := _as_called(render, prompt, thought, ends):
            yield call


def _as_called(render: Render, prompt: list[Message], thought: Message, ends: Sequence[str]) -> Sampled | None:
    """An answer that calls a tool, with its arguments as an object or, for templates that want it, as text."""
    arguments = {"value": ANSWER}
    for form in (arguments, json.dumps(arguments)):
        call = {"id": "call00000", "type": "function", "function": {"name": "agile_tool", "arguments": form}}
        try:
            return _as_written(render, prompt, {"content": "", **thought, "tool_calls": [call]}, ends)
        except ValueError:
            continue
    return None


def _as_written(render: Render, prompt: list[Message], answer: Message, ends: Sequence[str]) -> Sampled | None:
    """The answer as the template writes it in a conversation that it ends; None if it leaves parts of it out."""
    before = render(prompt)
    whole = render([*prompt, {"role": "assistant", **answer}], False)
    text, found, rest = whole.removeprefix(before).rpartition(ANSWER)
    dropped = any(THOUGHT in str(value) for value in answer.values()) and THOUGHT not in text
    if not found or dropped or not whole.startswith(before):
        return None
    closing, end = _ending(rest, ends, "tool_calls" in answer)
    return Sampled(text + ANSWER + closing, end, answer)


def _ending(rest: str, ends: Sequence[str], is_call: bool) -> tuple[str, str]:
    """What closes an answer, and its end-of-turn token: the first one; a call may be closed by others before it."""
    pattern = "|".join(map(re.escape, sorted(ends, key=len, reverse=True))) or r"(?!)"
    found = list(re.finditer(pattern, rest))
    if not found:
        return (rest.rstrip() if is_call else ""), ""
    end = found[-1 if is_call else 0]
    return rest[: end.start()], end[0]


def _rewrite_of(
    render: Render, prompt: list[Message], sampled: Sampled, stored: Message, observation: list[Message]
) -> Rewrite | None:
    """The first change while such answers, each followed by the observation, are appended to the prompt."""
    conversation, frame = prompt, None
    kept = render(prompt)
    for _ in range(_EXCHANGES):
        conversation = [*conversation, {"role": "assistant", **stored}, *observation]
        rendered = render(conversation)
        kept += sampled.text
        if not rendered.startswith(kept + sampled.end):
            return Rewrite(kept + sampled.end, rendered)
        frame = rendered[len(kept) :] if frame is None else frame
        kept += frame
        if rendered != kept:
            return Rewrite(kept, rendered)
    return None


def _opening(before: str) -> str:
    """The part of an answer that the generation prompt has already written."""
    found = _OPENED.search(before) or _CLOSED.search(before)
    return found[0] if found else ""
