"""Checks that a chat template keeps the turns of a conversation as they were sampled; training versions; special tokens.

The form of an answer is read from the template: an answer is rendered as the last message of a conversation, with and
without thinking. The text after the generation prompt is then the text that a model of this template samples: the space
after Mistral's ``[/INST]``, the channels of gpt-oss, the end-of-turn token. This text goes back into the history as the
answer's ``content``, and the longer conversation must begin with the shorter one.
"""

from __future__ import annotations

import copy
import json
import re
import secrets
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from agile_trainers.types import Message

ANSWER = "agileAnswerProbe"
THOUGHT = "agileThoughtProbe"
_THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Message fields from which templates read the thinking of an answer."""
_MARKS = (("<think>\n", "\n</think>\n\n"), ("<|channel>thought\n", "\n<channel|>"))
"""Opening and closing marks of thinking for templates that do not read it from a field; the second pair is Gemma 4's."""
_OPENED = re.compile(r"<think>\s*\Z")
_CLOSED = re.compile(r"(<think>\s*</think>|<\|channel>thought\s*<channel\|>)\s*\Z")
_EXCHANGES = 3


class Render(Protocol):
    """Renders a conversation, with or without a generation prompt."""

    def __call__(self, messages: list[Message], generation_prompt: bool = True) -> str: ...


@dataclass(frozen=True)
class Rewrite:
    """A conversation with its original turns, and the template's different rendering of them."""

    kept: str
    rendered: str

    def __str__(self) -> str:
        """Format both texts around the first difference, 50 characters on each side, one line each."""
        kept, rendered = (
            text.replace(THOUGHT, "(thinking)").replace(ANSWER, "(answer)") for text in (self.kept, self.rendered)
        )
        start = next((i for i, (a, b) in enumerate(zip(kept, rendered)) if a != b), min(len(kept), len(rendered)))
        window = slice(max(start - 50, 0), start + 50)
        return f"  as it was       {kept[window]!r}\n  rendered later  {rendered[window]!r}"


@dataclass(frozen=True)
class Sampled:
    """An answer as a model samples it after the generation prompt."""

    text: str
    """The answer without its end-of-turn token."""
    end: str
    """The end-of-turn token; empty if a turn has none."""
    fields: Message
    """The message passed to the template, with its thinking in separate fields if the template reads them."""


def find_rewrite(
    render: Render,
    prompt: list[Message],
    ends: Sequence[str],
    *,
    thinking: bool = True,
    observation: list[Message] | None = None,
) -> Rewrite | None:
    """Search for a change that a template makes to earlier turns when a conversation grows.

    Args:
        render: Renders a conversation.
        prompt: The messages before the first answer.
        ends: Texts of the tokens that may end an answer.
        thinking: True if answers may contain thinking; otherwise only plain answers are tried.
        observation: The messages after each answer. Default: one user message.

    Returns:
        None if the template reproduces every kind of answer as it was sampled, and always continues in the same way;
        otherwise a counterexample.
    """
    observation = observation or [{"role": "user", "content": "observation"}]
    opened = opening_of(render(prompt))
    calls = observation[0]["role"] == "tool"
    for sampled in answers_as_sampled(render, prompt, ends, thinking=thinking, calls=calls):
        whole = opened + sampled.text
        texts = dict.fromkeys((whole.strip(), sampled.text.strip(), whole, sampled.text))
        contents: list[Message] = [{"content": text} for text in texts]
        try:
            rewrites = [_rewrite_of(render, prompt, sampled, content, observation) for content in contents]
        except ValueError:  # gpt-oss rejects channels in the content.
            rewrites = [_rewrite_of(render, prompt, sampled, sampled.fields, observation)]
        if None not in rewrites:
            return rewrites[0]
    return None


def sampled_call(render: Render, prompt: list[Message], ends: Sequence[str]) -> str | None:
    """Return a tool call as the template writes it in an answer; None if the template does not support calls.

    It is one that a result leaves as it is, if there is one: Qwen3's template writes an empty thought before it, and drops
    that later.
    """
    calls = [call.text.strip() for call in _calls(render, prompt, ends, thinking=True)][::-1]

    def stays(call: str) -> bool:
        try:
            return call in render(
                [*prompt, {"role": "assistant", "content": call}, {"role": "tool", "content": "seen"}]
            )
        except ValueError:
            return False

    return next(filter(stays, calls), calls[0] if calls else None)


def answers_as_sampled(
    render: Render, prompt: list[Message], ends: Sequence[str], *, thinking: bool = True, calls: bool = False
) -> Iterator[Sampled]:
    """Yield the kinds of answers that can follow a prompt: with thinking, and plain.

    Args:
        render: Renders a conversation.
        prompt: The messages before the answer.
        ends: Texts of the tokens that may end an answer.
        thinking: True to include answers with thinking; if the generation prompt opens it, there are no others.
        calls: True for answers with a tool call, if the template supports calls.
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
    """Return whether the generation prompt opens the thinking, and whether answers may contain thinking."""
    opened = bool(_OPENED.search(before))
    return opened, opened or (thinking and not _CLOSED.search(before))


def _in_content(render: Render, prompt: list[Message], ends: Sequence[str]) -> Iterator[Sampled]:
    """Yield answers with thinking as part of their content, as far as the template does not drop it."""
    opened = opening_of(render(prompt))
    for opening, closing in _MARKS:
        if opening.startswith(opened):
            content = opening + THOUGHT + closing + ANSWER
            written = _as_written(render, prompt, {"content": content}, ends)
            yield written or Sampled(content.removeprefix(opened), "", {"content": content})


def _calls(render: Render, prompt: list[Message], ends: Sequence[str], thinking: bool) -> Iterator[Sampled]:
    """Yield answers that call a tool, with and without thinking."""
    opened, thinks = _thinks(render(prompt), thinking)
    thoughts = [dict.fromkeys(_THOUGHT_FIELDS, THOUGHT)] if thinks else []
    for thought in thoughts + ([] if opened else [{}]):
        if call := _as_called(render, prompt, thought, ends):
            yield call


def _as_called(render: Render, prompt: list[Message], thought: Message, ends: Sequence[str]) -> Sampled | None:
    """Return an answer that calls a tool, with its arguments as an object or, if the template needs it, as text."""
    arguments = {"value": ANSWER}
    for form in (arguments, json.dumps(arguments)):
        call = {"id": "call00000", "type": "function", "function": {"name": "agile_tool", "arguments": form}}
        try:
            return _as_written(render, prompt, {"content": "", **thought, "tool_calls": [call]}, ends)
        except ValueError:
            continue
    return None


def _as_written(render: Render, prompt: list[Message], answer: Message, ends: Sequence[str]) -> Sampled | None:
    """Return the answer as the template writes it at the end of a conversation; None if the template omits parts."""
    before = render(prompt)
    whole = render([*prompt, {"role": "assistant", **answer}], False)
    text, found, rest = whole.removeprefix(before).rpartition(ANSWER)
    dropped = any(THOUGHT in str(value) for value in answer.values()) and THOUGHT not in text
    if not found or dropped or not whole.startswith(before):
        return None
    closing, end = _ending(rest, ends, "tool_calls" in answer)
    return Sampled(text + ANSWER + closing, end, answer)


def _ending(rest: str, ends: Sequence[str], is_call: bool) -> tuple[str, str]:
    """Return the text that closes an answer, and the first end-of-turn token; other tokens may close a call before it."""
    pattern = "|".join(map(re.escape, sorted(ends, key=len, reverse=True))) or r"(?!)"
    found = list(re.finditer(pattern, rest))
    if not found:
        return (rest.rstrip() if is_call else ""), ""
    end = found[-1 if is_call else 0]
    return rest[: end.start()], end[0]


def _rewrite_of(
    render: Render, prompt: list[Message], sampled: Sampled, stored: Message, observation: list[Message]
) -> Rewrite | None:
    """Return the first change when such answers, each followed by the observation, are appended to the prompt."""
    conversation, delimited = prompt, None
    kept = render(prompt)
    for _ in range(_EXCHANGES):
        conversation = [*conversation, {"role": "assistant", **stored}, *observation]
        rendered = render(conversation)
        kept += sampled.text
        if not rendered.startswith(kept + sampled.end):
            return Rewrite(kept + sampled.end, rendered)
        delimited = rendered[len(kept) :] if delimited is None else delimited
        kept += delimited
        if rendered != kept:
            return Rewrite(kept, rendered)
    return None


def opening_of(before: str) -> str:
    """Return the part of an answer that a generation prompt has already written, of the text that ends with it."""
    found = _OPENED.search(before) or _CLOSED.search(before)
    return found[0] if found else ""


# --------------------------------------------------------------------------------------------------------------- repair


_CONTENT_PARSED = (
    "{%- set reasoning_content = message.reasoning_content %}\n        {%- elif '</think>' in content %}\n"
    "            {%- set reasoning_content = content.split('</think>')[0].split('<think>')[-1] %}\n"
    "            {%- set content = content.split('</think>')[-1]|trim %}\n"
    "        {%- endif %}\n        {%- set reasoning_content = reasoning_content|trim %}"
)

_EDITS = (
    # Thinking kept in the last turn only: GLM, LFM2.5; with a template variable: Nemotron, LFM2.5, Qwen3.6.
    ("loop.index0 > ns.last_user_index and reasoning_content", "reasoning_content"),
    ("preserve_thinking or loop.index0 > ns.last_user_index", "true"),
    ("truncate_history_thinking if truncate_history_thinking is defined else True", "false"),
    ("| string | trim) ~ '<|im_end|>", "| string) ~ '<|im_end|>"),  # Nemotron ends a call with a newline.
    (  # TRL's training version of GLM ends every answer with <|user|>.
        "{%- elif messages[loop.index0 + 1].role == 'system' -%}",
        "{%- elif messages[loop.index0 + 1].role == 'tool' -%}\n{{- '<|observation|>' }}\n"
        "{%- elif messages[loop.index0 + 1].role == 'system' -%}",
    ),
    # DeepSeek.
    ("{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}", ""),
    # Gemma 4: thinking in the content, and in a field.
    ("{{- ns.result | trim -}}\n{%- endmacro -%}", "{{- text | trim -}}\n{%- endmacro -%}"),
    ("thinking_text and loop.index0 > ns_turn.last_user_idx and message.get('tool_calls')", "thinking_text"),
    ("thinking_text and thinking_gate", "thinking_text"),
    # gpt-oss: the analysis channel is kept, <|return|> stays <|return|>, and the content may hold channels.
    ("elif loop.last and not add_generation_prompt", "elif true"),
    (" and not future_final_message.found", ""),
    (
        'if "<|channel|>analysis<|message|>" in message.content or "<|channel|>final<|message|>" in message.content',
        "if false",
    ),
    (
        '{%- if "tool_calls" in message %}\n            {#- We need very careful',
        '{%- if message.content and "<|message|>" in message.content %}\n'
        '            {{- "<|start|>assistant" + (" " if message.content.startswith("to=") else "") + message.content }}\n'
        '            {{- "<|call|>" if "commentary json<|message|>" in message.content else "<|return|>" }}\n'
        '        {%- elif "tool_calls" in message %}\n            {#- We need very careful',
    ),
    (
        "{%- if last_tool_call.name is none %}",
        "{%- if message.name %}\n            {%- set last_tool_call.name = message.name %}\n        {%- endif %}\n"
        "        {%- if last_tool_call.name is none %}",
    ),
    # Muse Glimmer: the content may hold the blocks of several recipients.
    (
        "{%- elif role == 'assistant' -%}",
        "{%- elif role == 'assistant' and message['content'] is string and message['content'].startswith('to=') -%}\n"
        "        {{- '<|start|>assistant ' + message['content'] + '<|eot|>' -}}\n"
        "    {%- elif role == 'assistant' -%}",
    ),
    # Qwen3.8: thinking in the content.
    (
        "{%- set reasoning_content = message.reasoning_content %}\n        {%- endif %}\n"
        "        {%- set reasoning_content = reasoning_content|trim %}",
        _CONTENT_PARSED,
    ),
)
"""Pairs of a template's text and its replacement."""


def training_templates(tokenizer: PreTrainedTokenizerBase, template: str) -> Iterator[str]:
    """Yield versions of a template that may keep earlier turns: TRL's training version, then both with further edits."""
    trls = _trl_training_template(tokenizer, template)
    if trls is not None:
        yield trls
    for base in (trls, template):
        if base is not None and (edited := _edited(base)) != base:
            yield edited


@lru_cache(maxsize=1)
def _trl_names() -> dict[str, str]:
    import trl

    folder = Path(trl.__file__).parent / "chat_templates"
    return {file.read_text(encoding="utf-8"): file.stem for file in sorted(folder.glob("*.jinja"))}


def trl_name(template: str) -> str | None:
    """Return the name under which TRL ships a template; None for other templates."""
    return _trl_names().get(template)


@lru_cache(maxsize=8)
def original_of(template: str) -> str:
    """Return the template of TRL that a training version was made of; another template as it is."""
    texts = {name: text for text, name in _trl_names().items()}
    for name, text in texts.items():
        trls = texts.get(f"{name}_training", text)
        if template != text and template in (trls, _edited(trls), _edited(text)):
            return text
    return template


def _edited(template: str) -> str:
    for old, new in _EDITS:
        template = template.replace(old, new)
    return template


def _trl_training_template(tokenizer: PreTrainedTokenizerBase, template: str) -> str | None:
    # Imported here, so that rollouts do not need TRL.
    from trl.chat_template_utils import get_training_chat_template

    bearer = copy.copy(tokenizer)  # TRL reads the tokenizer's template.
    bearer.chat_template = template
    try:
        return get_training_chat_template(bearer)
    except ValueError:
        return None


# ------------------------------------------------------------------------------------------------------- special tokens


class SpecialTokenEscaper:
    """Tokenizes a rendered conversation in which only the template's own special tokens are special.

    Before rendering, every special token spelled out in a message is replaced by a random mark. After rendering, the text
    is split at the marks. The text between them is tokenized normally, and the texts that the marks stand for are
    tokenized without parsing special tokens. Text without special tokens is tokenized whole, in one call.

    Args:
        tokenizer: The tokenizer. Its special tokens are the added tokens that are flagged special.
        eos_token_ids: Added tokens that count as special regardless of their flag.

    Attributes:
        ids: The special tokens.
        flagged: The tokens among them that are flagged special, which decoding skips.
        texts: Texts of the special tokens, longest first.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Collection[int]) -> None:
        added = tokenizer.added_tokens_decoder
        self.flagged = frozenset(i for i, token in added.items() if token.special)
        self.ids = self.flagged | {i for i in added if i in eos_token_ids}
        # Longest first, since one token may begin with another.
        self._ids_by_text = {added[i].content: i for i in self.ids}
        self.texts = sorted(self._ids_by_text, key=lambda text: (-len(text), text))
        self._pattern = re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")
        self._index = {text: index for index, text in enumerate(self.texts)}
        self._mark = f"agile{secrets.token_hex(16)}n"
        self._marks = re.compile(self._mark + r"(\d+)n")
        self._spelled: dict[int, list[int]] = {}
        self._tokenizer = tokenizer

    def hide(self, messages: list[Message], of_answers: Collection[int] = ()) -> list[Message]:
        """Replace special tokens in messages by marks.

        Args:
            messages: The messages.
            of_answers: Those that are replaced in messages of the assistant; the others stay there.
        """
        return [
            self.hide_in(message, chosen)
            if (chosen := of_answers if message["role"] == "assistant" else self.ids)
            else message
            for message in messages
        ]

    def hide_in(self, value: Any, chosen: Collection[int] | None = None) -> Any:
        """Replace special tokens by marks in all texts of nested lists and dictionaries.

        Args:
            value: Text, or what holds texts.
            chosen: The tokens. Default: all.
        """
        if isinstance(value, str):
            return self._hide(value, self.ids if chosen is None else chosen)
        if isinstance(value, dict):
            return {self.hide_in(key, chosen): self.hide_in(one, chosen) for key, one in value.items()}
        return [self.hide_in(one, chosen) for one in value] if isinstance(value, list) else value

    def encode(self, text: str) -> list[int]:
        """Tokenize a text that was rendered from hidden messages.

        Raises:
            ValueError: If the tokenizer has no way to write a special token as ordinary text, or no token for a word.
        """
        ids: list[int] = []
        for position, piece in enumerate(self._marks.split(text)):
            ids += self._spell(int(piece)) if position % 2 else self._encode(piece)
        return ids

    def check(self, ids: list[int], own: Counter[int]) -> list[int]:
        """Check that ``ids`` contain no special tokens beyond the template's own, and return them.

        Raises:
            ValueError: If they do, for example because the tokenizer normalizes similar characters to one.
        """
        forged = Counter(i for i in ids if i in self.ids) - own
        if forged:
            raise ValueError(self._refusal(next(iter(forged))))
        return ids

    def count(self, text: str) -> Counter[int]:
        """Count the occurrences of each special token in a text, by id."""
        return Counter(self._ids_by_text[found] for found in self._pattern.findall(text))

    def _hide(self, text: str, chosen: Collection[int]) -> str:
        def marked(found: re.Match[str]) -> str:
            hidden = self._ids_by_text[found[0]] in chosen
            return f"{self._mark}{self._index[found[0]]}n" if hidden else found[0]

        return self._pattern.sub(marked, text)

    def _spell(self, index: int) -> list[int]:
        if index not in self._spelled:
            ids = self._tokenizer.encode(self.texts[index], add_special_tokens=False, split_special_tokens=True)
            self._spelled[index] = self.check(ids, Counter())
        return self._spelled[index]

    def _encode(self, text: str) -> list[int]:
        if not text:
            return []
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # the tokenizers library raises no other type
            if "[UNK]" not in str(error):
                raise
            known = self._tokenizer.get_vocab()
            unknown = [word for part in self._pattern.split(text) for word in part.split() if word not in known]
            raise ValueError(
                f"The tokenizer has no token for {unknown[0] if unknown else text!r:.100}, and none for unknown words. Add "
                "the word to make_embedded_model(words=...), add '[UNK]' to read every unknown word as that, or leave words "
                "unset for a tokenizer that writes any text."
            ) from error

    def _refusal(self, token_id: int) -> str:
        token = self._tokenizer.added_tokens_decoder[token_id].content
        return (
            f"A message of the environment contains the special token {token!r}, and the tokenizer cannot write it as "
            "ordinary text, so the environment could forge turns. Remove it from the text."
        )
