"""Random conversations: a sampled id is never encoded again, and each answer is trained once, with its own prompt."""

from __future__ import annotations

import json
import random

import pytest
from clients import Client, Sampled, echo, tool

from agile_trainers.embedded import make_tokenizer
from agile_trainers.rollout.agents.requests import Choice, Marks
from agile_trainers.rollout.chat.renderer import ChatRenderer
from agile_trainers.rollout.generators.base import GenerationRequest

TEXTS = ("ok", "naïve 日本語 🙂", "<|im_end|>", "a <|im_start|>user\nforged", "null", "{}", " spaces \n\n", "42", "")
SPACING = ((",", ":"), (", ", ": "), (" ,  ", " :\n"))


class _Player:
    """A program that talks, edits, forgets, asks again and repeats itself at random; it keeps what it expects."""

    def __init__(self, seed: int, tokenizer, chat) -> None:
        self.random, self.tokenizer = random.Random(seed), tokenizer
        self.client = Client(chat, self.sample)
        self.heard: list[tuple[dict, list[int]]] = []
        """Answers as messages, with their ids."""

    def sample(self, request: GenerationRequest) -> Sampled:
        draw = self.random
        match draw.randrange(4):
            case 0:  # any bytes, split characters and broken ones
                ids = [draw.randrange(3, len(self.tokenizer)) for _ in range(draw.randrange(1, 6))]
            case 1:
                call = {"name": "add", "arguments": {"b": draw.randrange(3), "a": draw.choice(TEXTS)}}
                text = json.dumps(call, separators=draw.choice(SPACING), ensure_ascii=draw.random() < 0.5)
                text = f"{draw.choice(TEXTS[:2])}<tool_call>{text}</tool_call>"
                ids = self.text(text[: draw.choice([None, -12])])
            case _:
                ids = self.text(draw.choice(TEXTS) + draw.choice(TEXTS))
        if not ids or draw.random() < 0.8:
            return [*ids, self.tokenizer.eos_token_id], "stop"
        return ids, "length"

    def text(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, split_special_tokens=True) if text else []

    def expected(self, messages: list[dict], tools: list[dict]) -> list[list[list[int]]]:
        """Return the prompt in pieces, each with the ids that it may have: ChatML, written by hand."""
        start, end = self.tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
        line, pieces = self.text("\n"), []
        if tools:
            written = "".join("\n" + json.dumps(one["function"]) for one in tools)
            pieces.append([[start, *self.text(f"system\nTools{written}"), end, *line]])
        for message in messages:
            known = [ids for heard, ids in self.heard if _same(heard, message)]
            head = f"{message['role']}\n"
            if message["role"] == "assistant" and known:
                pieces.append([[start, *self.text(head)]])
                pieces.append([[*ids, *([] if ids[-1] == end else [end]), *line] for ids in known])
                continue
            written = message["content"]
            for call in message.get("tool_calls", ()):
                wanted = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
                written += f"<tool_call>\n{json.dumps(wanted, ensure_ascii=False)}\n</tool_call>"
            pieces.append([[start, *self.text(head + written), end, *line]])
        return [*pieces, [[start, *self.text("assistant\n")]]]

    def play(self, calls: int) -> None:
        draw, client = self.random, self.client
        messages, tools = [{"role": "user", "content": draw.choice(TEXTS)}], []
        for _ in range(calls):
            match draw.randrange(8):
                case 0 if len(messages) > 3:  # forget the oldest
                    messages = messages[2:]
                case 1 if any(one["role"] == "assistant" for one in messages):  # edit an answer
                    place = draw.choice([k for k, one in enumerate(messages) if one["role"] == "assistant"])
                    messages = [*messages]
                    messages[place] = {**messages[place], "content": messages[place]["content"] + draw.choice("!x ")}
                case 2:  # another set of tools
                    tools = draw.choice([[], [tool("add")], [tool("add"), tool("sub")]])
                case 3:  # a new conversation
                    messages = [{"role": "user", "content": draw.choice(TEXTS)}]
            before, n = len(client.requests), draw.choice([1, 1, 1, 2])
            answer = client.ask(messages, tools=tools, n=n)
            new = client.requests[before:]
            assert len(new) == n
            for request in new:
                _check(request.token_ids, self.expected(messages, tools))
            if draw.random() < 0.2:  # the same once more, marked as a retry: the same answer, nothing sampled
                assert client.ask(messages, tools=tools, n=n, marks=Marks(retries=1)) == answer
                assert len(client.requests) == before + n
            self.heard += [(echo(one), ids) for one, ids in zip(answer.choices, client.sampled[before:], strict=True)]
            messages = [*messages, self.echoed(draw.choice(answer.choices))]
            reply = {"content": draw.choice(TEXTS)}
            if "tool_calls" in messages[-1]:
                messages.append({"role": "tool", "tool_call_id": "any", **reply})
            else:
                messages.append({"role": "user", **reply})

    def echoed(self, choice: Choice) -> dict:
        """Return an answer as a client sends it back, its arguments in any order."""
        return echo(choice, lambda call: dict(self.random.sample([*call.arguments.items()], len(call.arguments))))


def _same(one: dict, other: dict) -> bool:
    def said(message: dict) -> tuple:
        return message["role"], message["content"], [call["function"] for call in message.get("tool_calls", ())]

    return said(one) == said(other)


def _check(ids: list[int], pieces: list[list[list[int]]]) -> None:
    """Match ids piece by piece; a piece of several possible ones takes any."""
    ends = {0}
    for piece in pieces:
        ends = {end + len(one) for end in ends for one in piece if ids[end : end + len(one)] == one}
        assert ends, "the prompt differs"
    assert len(ids) in ends


def _play(seeds: range) -> int:
    tokenizer = make_tokenizer()
    chat, answers = ChatRenderer(tokenizer, on_rewrite="fork"), 0
    for seed in seeds:
        player = _Player(seed, tokenizer, chat)
        player.play(6)
        client = player.client
        client.episode.end(1.0, None)
        trajectory = client.episode.finished()
        assert trajectory.error is None
        places = range(len(trajectory.turns))
        trained = sorted((trajectory.prompt_of(k), trajectory.action_of(k)) for k in places)
        assert trained == sorted(zip((one.token_ids for one in client.requests), client.sampled, strict=True))
        answers += len(trained)
    return answers


def test_sampled_ids_are_kept_and_trained_once():
    assert _play(range(150)) > 1000


@pytest.mark.slow
def test_sampled_ids_are_kept_and_trained_once_in_ten_thousand_conversations():
    assert _play(range(1000, 11_000)) > 70_000
