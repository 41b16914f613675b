"""Whether a chat template keeps earlier turns as they were while a conversation grows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from agile_trainers.types import Message

Render = Callable[[list[Message]], str]
"""Renders a conversation, generation prompt included."""

_ANSWER = "agileAnswerProbe"
_THOUGHT = "agileThoughtProbe"
_MARKS = (("<think>\n", "\n</think>\n\n"), ("<|channel>thought\n", "\n<channel|>"))
"""How models open and close their thinking; the second pair is Gemma 4's."""


@dataclass(frozen=True)
class Rewrite:
    """A conversation with its earlier turns as they were, and what the template makes of it."""

    kept: str
    rendered: str

    def __str__(self) -> str:
        """The forty characters on each side of where the two part."""
        pairs = zip(self.kept, self.rendered)
        start = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.kept), len(self.rendered)))
        lines = (("as it was", self.kept), ("rendered later", self.rendered))
        return "\n".join(f"  {label:<16}{text[max(start - 40, 0) : start + 40]!r}" for label, text in lines)

    def refusal(self, name: str, fix: str) -> str:
        """The message of the error: what happens, where, and how to fix it."""
        return (
            f"The chat template of {name} rewrites earlier turns as a conversation grows, so the model would be "
            f"trained on contexts that the template never shows it:\n{self}\n{fix}"
        )


def find_rewrite(render: Render, prompt: list[Message], thinking: bool = True) -> Rewrite | None:
    """Look for a change that a template makes to earlier turns when a conversation grows.

    Args:
        render: Renders a conversation with a generation prompt.
        prompt: The messages before the first answer.
        thinking: Whether answers may contain thinking; if not, only a plain answer is tried.

    Returns:
        None if the template keeps some kind of answer (plain, thinking) exactly as sampled and drops the thinking of
        none; otherwise an example.
    """
    plain = _rewrite_of(render, prompt, {"content": _ANSWER}, _ANSWER)
    if not thinking:
        return plain
    found = [plain]
    for opening, closing in _MARKS:
        sampled = opening + _THOUGHT + closing + _ANSWER
        in_content = _rewrite_of(render, prompt, {"content": sampled}, sampled)
        if render(prompt + 2 * _exchange({"content": sampled})).count(_THOUGHT) < 2:
            return in_content
        found += [in_content, _rewrite_of(render, prompt, {"content": _ANSWER, "reasoning_content": _THOUGHT}, sampled)]
    return None if None in found else plain


def trl_training_template(tokenizer: PreTrainedTokenizerBase, template: str) -> str | None:
    """TRL's training version of ``template``; None if it has none."""
    # Only here, so that rollouts do without TRL.
    from trl.chat_template_utils import get_training_chat_template

    bearer = copy.copy(tokenizer)  # TRL looks at the tokenizer's own template.
    bearer.chat_template = template
    try:
        return get_training_chat_template(bearer)
    except ValueError:
        return None


def _rewrite_of(render: Render, prompt: list[Message], answer: Message, sampled: str) -> Rewrite | None:
    """The first change while two such answers, each followed by an observation, are appended to the prompt."""
    conversation = prompt
    for _ in range(2):
        before = render(conversation)
        opened = next((opener for opener in ("<think>\n", "<think>") if before.endswith(opener)), "")
        kept = before + sampled.removeprefix(opened)
        conversation = conversation + _exchange(answer)
        rendered = render(conversation)
        if not rendered.startswith(kept):
            return Rewrite(kept, rendered)
    return None


def _exchange(answer: Message) -> list[Message]:
    return [{"role": "assistant", **answer}, {"role": "user", "content": "observation"}]
