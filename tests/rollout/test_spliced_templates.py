"""Chat templates: a conversation that is rendered around its sampled answers has the ids of one that only went on."""

from __future__ import annotations

import pytest
from chat_templates import templates, tokenizer_for

from agile_trainers.rollout.chat.renderer import ChatRenderer
from agile_trainers.rollout.chat.template_check import answers_as_sampled
from agile_trainers.types import Message

USER: list[Message] = [{"role": "user", "content": "guess 2"}]
SYSTEM: list[Message] = [{"role": "system", "content": "be brief"}, *USER]
QUICK = ("qwen3", "qwen3_6", "glm4moe", "gptoss", "muse_glimmer", "nemotron_3_nano", "deepseek_r1_distill", "llama3",
         "mistral_v0_3", "llama_2", "gemma4", "phi3")  # fmt: skip
"""One of each way to open an answer."""


def _renderer(name: str) -> ChatRenderer:
    return ChatRenderer(tokenizer_for(name), training_chat_template=True, on_rewrite="fork")


def _unchanged(name: str) -> int:
    """Compare both ways; return the number of conversations."""
    chat, compared = _renderer(name), 0
    for prompt in (USER, SYSTEM):
        try:
            begun = chat.first(prompt)
        except ValueError:  # no system messages
            continue
        for sampled in answers_as_sampled(chat._render, prompt, chat._escaper.texts):
            answer = chat._tokenizer.encode(sampled.text, add_special_tokens=False)
            end = chat._tokenizer.encode(sampled.end, add_special_tokens=False) if sampled.end else []
            for ids in ([*answer, *end], answer):  # ended, and cut off
                messages, path, answers = list(prompt), list(begun), dict[int, list[int]]()
                for reply in ("higher", "lower\nlook", "look", "lower"):
                    answers[len(messages)] = ids
                    said = [{"role": "assistant", "content": chat.decode(ids)}, {"role": "user", "content": reply}]
                    before = list(messages)
                    roles = [one["role"] for one in prompt]
                    goes_on = chat.goes_on(before, roles, ids, said[1:])
                    path = [*path, *ids, *chat.delimited(said[1:], ids[-1])]
                    messages += said
                    if not goes_on:
                        break
                    assert chat.spliced(messages, answers) == path, (name, sampled.text)
                    compared += 1
    return compared


@pytest.mark.parametrize("name", QUICK)
def test_an_unchanged_conversation_keeps_its_ids(name: str) -> None:
    assert _unchanged(name) >= 4


def test_a_long_conversation_is_rendered_as_often_as_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """All episodes wait for the thread that renders."""
    chat, rendered = _renderer("qwen3_instruct_2507"), list[int]()
    apply = chat._tokenizer.apply_chat_template
    monkeypatch.setattr(
        chat._tokenizer, "apply_chat_template", lambda *args, **kwargs: rendered.append(1) or apply(*args, **kwargs)
    )
    answer, counts = chat._tokenizer.encode("higher", add_special_tokens=False), list[int]()
    for exchanges in (4, 5, 40):
        said: list[Message] = [{"role": role, "content": "higher"} for role in ("assistant", "user") * exchanges]
        messages = [*SYSTEM, *said]
        rendered.clear()
        ids = chat.spliced(messages, dict.fromkeys(range(2, len(messages), 2), answer))
        counts.append(len(rendered))
        assert ids == chat.first(messages, sampled=True)
    assert counts[0] > counts[1] == counts[2] < 8  # the first checks the roles


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(templates()) - set(QUICK)))
def test_an_unchanged_conversation_keeps_its_ids_with_every_template(name: str) -> None:
    assert _unchanged(name) >= 4
