"""Training versions of chat templates: TRL's, and further edits if TRL's still rewrite earlier turns."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from transformers import PreTrainedTokenizerBase

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
