"""Every chat template of TRL: accepted as its page says, and the rendered ids are those of the whole conversation."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import pytest
import trl
from chat_templates import OTHERS, templates, tokenizer_for
from served import SERVED
from template_survey import PAGE, Options, Verdict, page, survey, turns
from trl.chat_template_utils import add_response_schema, parse_response

from agile_trainers.rollout.chat.renderer import ChatRenderer
from agile_trainers.rollout.chat.template_check import ANSWER, THOUGHT, answers_as_sampled
from agile_trainers.types import Message

NAMES = sorted(templates())
PROMPT: list[Message] = [{"role": "user", "content": "guess"}]
SYSTEM: list[Message] = [{"role": "system", "content": "be brief"}, *PROMPT]
OBSERVATIONS = ["higher, b", "lower:\nlook:\n\nbelow", "done"]
PARTS = ("llava_next", "smolvlm", "idefics3")
THOUGHTFUL = {
    "gptoss": "<|channel|>analysis<|message|>lower half<|end|>"
    "<|start|>assistant<|channel|>final<|message|>guess 2<|return|>",
    "qwen3": "<think>\nlower half\n</think>\n\nguess 2<|im_end|>",
    "qwen3_6": "lower half\n</think>\n\nguess 2<|im_end|>",
    "qwen3_8": "lower half\n</think>\n\nguess 2<|im_end|>",
    "glm4moe": "\n<think>lower half</think>\nguess 2<|user|>",
    "gemma4": "<|channel>thought\nlower half\n<channel|>guess 2<turn|>",
    "gemma4_v5": "<|channel>thought\nlower half\n<channel|>guess 2<turn|>",
    "nemotron_3_nano": "lower half\n</think>\nguess 2<|im_end|>",
    "nemotron_3_ultra": "lower half</think>guess 2<|im_end|>",
    "lfm2_2_5": "<think>lower half</think>guess 2<|im_end|>",
}
"""Answers as these models sample them, of which TRL has a parser."""


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdict]:
    return {name: survey(name) for name in templates()}


def test_every_template_of_trl_is_accepted_with_an_option(verdicts: dict[str, Verdict]) -> None:
    trls = [verdict for name, verdict in verdicts.items() if name not in OTHERS]
    assert len(trls) == 72
    assert [verdict.name for verdict in trls if not verdict.accepted] == []
    assert sum({} in verdict.options for verdict in trls) == 39
    assert [name for name in OTHERS if {} in verdicts[name].options] == list(OTHERS)


def test_the_page_says_what_holds(verdicts: dict[str, Verdict]) -> None:
    assert trl.__version__ == "1.16.0", "the page is that of the pinned TRL"
    assert PAGE.read_text(encoding="utf-8") == page(list(verdicts.values())), "run `make templates`"


def test_a_refusal_names_the_template_the_turn_and_options_that_work(verdicts: dict[str, Verdict]) -> None:
    refused = [verdict for verdict in verdicts.values() if verdict.refusal]
    assert len(refused) == 33
    for verdict in refused:
        assert f"(in TRL: '{verdict.name}') rewrites earlier turns" in verdict.refusal
        before, after = turns(verdict.refusal)
        assert before != after and {"(thinking)", "(answer)"} & set(re.findall(r"\(\w+\)", before))
        advised = list(_advised(verdict.refusal))
        assert advised and all(options in verdict.options for options in advised), verdict.name


def test_all_but_those_that_reject_answers_are_served(verdicts: dict[str, Verdict]) -> None:
    refused = {name for name, verdict in verdicts.items() if verdict.refusal}
    assert sorted(name for name in refused if verdicts[name].served is not None) == SERVED
    assert refused - set(SERVED) == {"gptoss", "gptoss_training"}


def _advised(refusal: str) -> Iterator[Options]:
    """The options that an error message tells the user to pass."""
    for way in refusal.rpartition("\nPass ")[2].split(", or "):
        variables = re.search(r"chat_template_kwargs=(\{.*?\})", way)
        options: Options = {"training_chat_template": True} if "training_chat_template=True" in way else {}
        yield options | ({"chat_template_kwargs": ast.literal_eval(variables[1])} if variables else {})


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_the_whole_conversation(verdicts: dict[str, Verdict], name: str) -> None:
    """Answers as each template lets them be sampled, ended by their token or cut, after the user and after tools."""
    verdict = verdicts[name]
    for (options, renderer), system, tools in zip(verdict.accepted, verdict.system, verdict.tools, strict=True):
        prompts = [PROMPT, SYSTEM] if not system else [PROMPT]
        roles = ["user", "tool"] if not tools else ["user"]
        for prompt, role in [(prompt, role) for prompt in prompts for role in roles]:
            for conversation in _conversations(name, renderer, options, prompt, role):
                assert conversation.pieces == conversation.whole, (options, role, conversation.text)


@pytest.mark.parametrize("name", THOUGHTFUL)
def test_ids_are_those_of_a_conversation_that_trl_parsed(name: str) -> None:
    """The history may hold thinking in the field in which TRL's parser puts it, too: as servers and clients pass it on."""
    tokenizer = tokenizer_for(name)
    renderer = ChatRenderer(tokenizer, training_chat_template=True)
    answer = tokenizer.encode(THOUGHTFUL[name], add_special_tokens=False)
    pieces = [*renderer.first(PROMPT), *answer, *renderer.delimited("higher", answer[-1])]

    parsed = parse_response(add_response_schema(tokenizer), answer, prefix=renderer.first(PROMPT))
    assert parsed.pop("content") == "guess 2" and "lower half" in parsed.values()
    conversation = [
        *PROMPT,
        {"role": "assistant", "content": "guess 2", **parsed},
        {"role": "user", "content": "higher"},
    ]
    rendered = tokenizer.apply_chat_template(
        conversation, chat_template=renderer.chat_template, tokenize=False, add_generation_prompt=True
    )
    assert pieces == tokenizer.encode(rendered, add_special_tokens=False)


class _Conversation:
    """Three turns as the renderer makes them, and rendered whole."""

    def __init__(self, pieces: list[int], wholes: Iterator[list[int]], text: str) -> None:
        self.pieces, self.text, self.whole = pieces, text, next(wholes)
        if self.whole != pieces:
            self.whole = next((whole for whole in wholes if whole == pieces), self.whole)


def _conversations(
    name: str, renderer: ChatRenderer, options: Options, prompt: list[Message], role: str
) -> Iterator[_Conversation]:
    tokenizer = tokenizer_for(name)
    variables = options.get("chat_template_kwargs", {})

    def render(messages: list[Message], generation_prompt: bool = True) -> str:
        if name.startswith(PARTS):
            messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
        return str(
            tokenizer.apply_chat_template(
                messages,
                chat_template=renderer.chat_template,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **variables,
            )
        )

    def wholes(head: str, answers: list[list[int]], observations: list[Any]) -> Iterator[list[int]]:
        """The answers as their text, without the blanks around it, and both after what the prompt has opened."""
        for stored in (str, str.strip, lambda text: head + text, lambda text: head + text.strip()):
            conversation = list(prompt)
            for answer, observation in zip(answers, observations, strict=True):
                conversation += [{"role": "assistant", "content": stored(renderer.decode(answer))}, *observation]
            yield tokenizer.encode(render(conversation), add_special_tokens=False)

    ends = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    thinking = variables.get("enable_thinking") is not False
    opened = re.search(r"<think>\s*\Z", render(prompt))
    for sampled in answers_as_sampled(render, prompt, ends, thinking=thinking, calls=role == "tool"):
        texts = [sampled.text.replace(ANSWER, f"guess {i}").replace(THOUGHT, f"the {i} half") for i in range(3)]
        for end in (sampled.end, ""):
            answers = [
                tokenizer.encode((text + end) if end else text.rstrip(), add_special_tokens=False) for text in texts
            ]
            observations = [[{"role": role, "name": "look", "content": said}] for said in OBSERVATIONS]
            pieces = _played(renderer, prompt, answers, observations)
            head = opened[0] if opened else ""
            yield _Conversation(pieces, wholes(head, answers, observations), texts[0] + end)


def _played(
    renderer: ChatRenderer, prompt: list[Message], answers: list[list[int]], observations: list[Any]
) -> list[int]:
    ids = renderer.first(prompt)
    for answer, observation in zip(answers, observations, strict=True):
        ids = [*ids, *answer, *renderer.delimited(observation, answer[-1])]
    return ids
