"""Agents on the chat templates of real models: prompts are those that a server would render, with sampled ids kept."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from clients import Client, echo, tool

from agile_trainers.rollout.chat.renderer import ChatRenderer
from agile_trainers.rollout.chat.template_check import THOUGHT, answers_as_sampled
from agile_trainers.rollout.generators.base import GenerationRequest
from agile_trainers.types import Message

sys.path.append(str(Path(__file__).parents[1]))
from chat_templates import templates, tokenizer_for

USER: list[Message] = [{"role": "user", "content": "guess"}]
TOOLS = [tool("agile_tool")]
TOOLS[0]["function"]["parameters"]["properties"] = {"value": {"type": "string", "description": "what"}}
QUICK = ("qwen3", "qwen3_8", "qwen2_5", "llama3_1", "gemma4_v5", "gptoss", "lfm2_2_5", "glm4moe_training")
WITHOUT = (
    "diffusion_gemma",
    "diffusion_gemma_training",
    "lfm2",
    "lfm2_training",
    "muse_glimmer",
    "muse_glimmer_training",
)
"""Templates with no form of calls, or one that nothing parses: calls stay text."""


class Conversation:
    """A program with a tool on a template, with answers in the template's own form."""

    def __init__(self, name: str) -> None:
        self.tokenizer = tokenizer_for(name)
        plain = ChatRenderer(self.tokenizer, training_chat_template=True, on_rewrite="fork").with_tools(TOOLS)
        forms = [
            list(answers_as_sampled(plain._render, USER, plain._escaper.texts, calls=calls)) for calls in (True, False)
        ]
        ends = {self.tokenizer.convert_tokens_to_ids(one.end) for form in forms for one in form if one.end}
        self.chat = ChatRenderer(
            self.tokenizer, training_chat_template=True, on_rewrite="fork", eos_token_ids=[*ends, *plain.eos_token_ids]
        )
        self.call, self.said = (form[-1].text + form[-1].end for form in forms)
        self.client = Client(self.chat, self.sample)
        self.says = self.call
        self.thoughtful: list[Message] = []

    def sample(self, request: GenerationRequest) -> Any:
        ids = self.tokenizer.encode(self.says, add_special_tokens=False)
        return (ids, "stop") if ids[-1] in self.chat.eos_token_ids else ([*ids, self.chat.eos_token_ids[0]], "stop")

    def ask(self, messages: list[Message], says: str) -> Message:
        self.says = says
        answer = echo(self.client.ask(messages, tools=TOOLS).choices[0])
        written = self.tokenizer.apply_chat_template(
            list(map(self.whole, messages)),
            chat_template=self.chat.chat_template,
            tools=TOOLS,
            add_generation_prompt=True,
            tokenize=False,
        )
        assert self.tokenizer.decode(self.client.requests[-1].token_ids) == written
        if THOUGHT in says and THOUGHT not in answer["content"]:
            self.thoughtful.append(answer)
        return answer

    def whole(self, message: Message) -> Message:
        """Return a message with its whole thought, of which the client did not get all."""
        text = message["content"]
        if message["role"] == "assistant" and "</think>" in text and "<think>" not in text:  # the prompt opened it
            return {**message, "content": f"<think>\n{text}"}
        return {**message, "reasoning_content": THOUGHT} if message in self.thoughtful else message


def _talk(name: str) -> int:
    one = Conversation(name)
    called = one.ask(USER, one.call)
    assert [call["function"]["arguments"] for call in called["tool_calls"]] == [{"value": "agileAnswerProbe"}]
    assert not any(text in called["content"] for text in one.chat._escaper.texts)
    result: Message = {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "name": "agile_tool"}
    messages = [*USER, called, {**result, "content": "seen\nit"}]
    said = one.ask(messages, one.said)
    messages = [*messages, said, {"role": "user", "content": "more"}]
    one.ask(messages, one.said)
    one.ask([{"role": "user", "content": "guess again"}, *messages[1:]], one.said)  # an edit: a fork
    one.client.episode.end(1.0, None)
    trajectory = one.client.episode.finished()
    return len(trajectory.paths or [()])


@pytest.mark.parametrize("name", QUICK)
def test_a_tool_is_used_as_the_template_writes_it(name: str) -> None:
    assert _talk(name) == 2


XML = "<tool_call>\n<function=agile_tool>\n<parameter=value>\n{}\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>agile_tool\n<arg_key>value</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"
LFM = '<|tool_call_start|>[agile_tool(value="{}")]<|tool_call_end|>'
FORMS = {
    "qwen3_5_nothink": XML,
    "nemotron_3_nano": XML,
    "glm4moe": GLM,
    "lfm2_2_5": LFM,
    "gemma4_v5": '<|tool_call>call:agile_tool{{value:<|"|>{}<|"|>}}<tool_call|>',
}


@pytest.mark.parametrize("name", FORMS)
def test_a_call_that_broke_off_or_is_malformed_stays_text(name: str) -> None:
    """TRL's parser made calls without arguments of them, or with the end of the turn in an argument."""
    one, call = Conversation(name), FORMS[name].format("a b")

    def said(text: str) -> tuple[list[Any], str]:
        one.says = text
        choice = one.client.ask(USER, tools=TOOLS).choices[0]
        return [called.arguments for called in choice.tool_calls], choice.text

    assert said(call) == ([{"value": "a b"}], "")
    assert said(f"before {call} after") == ([{"value": "a b"}], "before\nafter")
    broken = [
        call[: call.index("b") + 1],
        f"before {call[: call.index('b')]}",
        f"{call}\n{call[: call.index('b') + 1]}",
    ]
    if FORMS[name] == XML:
        broken += [call.replace("\n</parameter>", ""), XML.format(f"x {call} y")]
    if FORMS[name] == LFM:
        broken += [call.replace("value=", ""), call.replace(")]", "), agile_tool(value=]")]
    for text in broken:
        assert said(text) == ([], text)


@pytest.mark.parametrize("value", ["2.50", "1e3", "True", '"x\\n"', r'["\u00fcber"]', "null"])
def test_values_that_a_template_writes_in_another_way_are_calls(value: str) -> None:
    one = Conversation("qwen3_5_nothink")
    one.says = XML.format(value)
    assert one.client.ask(USER, tools=TOOLS).choices[0].tool_calls


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*templates()} - {*QUICK, *WITHOUT}))
def test_a_tool_is_used_as_every_template_writes_it(name: str) -> None:
    try:
        ChatRenderer(tokenizer_for(name), training_chat_template=True, on_rewrite="fork").with_tools(TOOLS)
    except ValueError as error:
        assert "does not write the tool 'agile_tool'" in str(error)
    else:
        assert _talk(name) == 2
