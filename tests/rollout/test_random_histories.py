"""Random programs that rewrite contexts, beside a slow reference that renders every conversation from its text."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from episodes import CHAT, TOKENIZER, end, go_on, ids, make_engine, specs

from agile_trainers.envs.context import Context, Question
from agile_trainers.records.reader import read_records
from agile_trainers.records.schema import path_ids
from agile_trainers.records.writer import episode_row, write_episodes
from agile_trainers.rollout.collate import collate
from agile_trainers.rollout.forest import Call, Fork, forest
from agile_trainers.rollout.generators.base import GenerationOutput, GenerationRequest
from agile_trainers.rollout.generators.scripted import ScriptedGenerator
from agile_trainers.types import Message, StopReason, Trajectory

WORDS = ["go", "up", "down", "a", "b", "c"]
ANSWERS = ["a ]", "b ]", "a b ]", "c", "a b c", "[ a ]", "b ] ]"]
"""Ended, cut, and with special tokens that the text of the answer does not have."""
END = ids("]")[0]


class Program:
    """A function that rewrites contexts by chance; keeps what it got and what it returned."""

    def __init__(self, noise: random.Random) -> None:
        self.noise = noise
        self.got: list[tuple[list[Message], list[Message], int]] = []
        self.returned: list[list[Message]] = []
        self.questions: list[bool] = []

    def __call__(self, context: Context) -> list[Message]:
        self.got.append(([dict(message) for message in context], context.prompt, context.tokens))
        made = self._made([dict(message) for message in context])
        if made[-1]["role"] == "assistant":
            made = [*made, self._message("user")]
        self.returned.append([dict(message) for message in made])
        self.questions.append(self.noise.random() < 0.2)
        made = Question(made) if self.questions[-1] else made
        for message in context:  # copies, which may be changed
            message["content"] = "changed"
        return made

    def _message(self, role: str) -> Message:
        return {"role": role, "content": " ".join(self.noise.choices(WORDS, k=self.noise.randint(0, 2)))}

    def _made(self, known: list[Message]) -> list[Message]:
        noise, prompt = self.noise, self.got[0][1]
        place = noise.randrange(len(known))
        match noise.randrange(12):
            case 0:  # a window
                return [*prompt, *known[noise.randrange(len(known)) :]]
            case 1:  # dropped observations
                return [{**one, "content": "down"} if one["role"] == "user" else one for one in known]
            case 2:  # appended
                return [*known, self._message("user"), *([self._message("system")] if noise.random() < 0.3 else [])]
            case 3:  # an edited message, an earlier answer perhaps
                return [*known[:place], self._message(known[place]["role"]), *known[place + 1 :]]
            case 4:  # an inserted one
                return [*known[:place], self._message(noise.choice(["user", "assistant", "system"])), *known[place:]]
            case 5:  # examples before everything
                return [self._message("user"), self._message("assistant"), *known]
            case 6 if self.returned:  # back to an earlier context
                return noise.choice(self.returned)
            case 7 if self.returned:  # the beginning of one
                earlier = noise.choice(self.returned)
                return earlier[: noise.randint(1, len(earlier))]
            case 8:  # the last exchange is taken back
                return known[: max(1, len(known) - 2)]
            case 9:
                return [*prompt]
        return known


class Asked(ScriptedGenerator):
    """Random answers; keeps the requests and what was answered."""

    def __init__(self, noise: random.Random) -> None:
        self.noise = noise
        self.requests: list[GenerationRequest] = []
        self.answers: list[tuple[list[int], list[float]]] = []
        super().__init__(self._next)

    def _next(self, request: GenerationRequest) -> GenerationOutput:
        answer = ids(self.noise.choice(ANSWERS))[: request.max_new_tokens]
        logprobs = [-self.noise.random() - 0.01 for _ in answer]
        self.requests.append(request)
        self.answers.append((answer, logprobs))
        return GenerationOutput(
            request.episode, list(answer), list(logprobs), "stop" if answer[-1] == END else "length"
        )


def rendered(messages: list[Message]) -> list[int]:
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return TOKENIZER.encode(text, add_special_tokens=False)


def delimited(messages: list[Message], last: int) -> list[int]:
    """What follows an answer: its end, unless that was sampled, and the messages."""
    after = rendered([{"role": "user", "content": "go"}, {"role": "assistant", "content": "a"}, *messages])
    between = after[len(rendered([{"role": "user", "content": "go"}])) + 1 :]
    return between[1:] if last == END else between


@dataclass
class Expected:
    """The reference of an episode."""

    prompts: list[list[int]]
    forks: list[Fork | None]
    contexts: list[list[Message]]
    """What each turn saw."""
    rewards: list[float]
    stop: StopReason


def text_of(answer: list[int]) -> str:
    return CHAT.decode(answer)


def reference(
    start: list[Message], steps: list[Any], program: Program, asked: Asked, max_turns: int, longest: int
) -> Expected:
    """Follow the program's returned contexts, one turn after another."""
    found, known, whole, prompt = Expected([], [], [], [], StopReason.MAX_TURNS), list(start), [], list[int]()
    steps, contexts, end_of_answer = list(steps), iter(zip(program.got, program.returned, program.questions)), 0
    said: list[Message] = []
    while True:
        (got, began, tokens), context, question = next(contexts)
        assert got == known and began == start
        assert tokens == len(rendered(known) if not whole else [*whole, *(delimited(said, whole[-1]) if said else [])])
        added = context[end_of_answer:]
        goes_on = bool(whole) and context[:end_of_answer] == known[:end_of_answer] and bool(added)
        goes_on = goes_on and (context == known or all(one["role"] != "assistant" for one in added))
        fork = None if not whole or goes_on else Fork.CONTEXT
        prompt = [*whole, *delimited(added, whole[-1])] if goes_on else rendered(context)
        if len(prompt) >= longest:
            found.stop = StopReason.CONTEXT_FULL if goes_on else StopReason.REWRITE_FULL
            return found
        answer = asked.answers[len(found.prompts)][0]
        found.prompts.append(prompt)
        found.forks.append(fork)
        found.contexts.append(context)
        whole, known = [*prompt, *answer], [*context, {"role": "assistant", "content": text_of(answer)}]
        end_of_answer, said = len(known), []
        found.rewards.append(0.0)
        if not question:
            observation, found.rewards[-1], over, _, _ = steps.pop(0) if len(steps) > 1 else steps[0]
            said = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
            known = [*known, *said]
            if over:
                found.stop = StopReason.TERMINATED
                return found
        if len(found.prompts) == max_turns:
            return found


def ancestors(prompts: list[list[int]], actions: list[list[int]]) -> list[int | None]:
    """The turn with the longest prompt and action that a turn's prompt begins with, the last of equals."""
    found: list[int | None] = []
    for k, prompt in enumerate(prompts):
        before = [[*prompts[i], *actions[i]] for i in range(k)]
        fits = [i for i, one in enumerate(before) if prompt[: len(one)] == one]
        found.append(max(fits, key=lambda i: (len(before[i]), i), default=None))
    return found


def played(seed: int) -> Iterator[tuple[Trajectory, Expected, Asked, Program]]:
    noise = random.Random(seed)
    start: list[Message] = [{"role": "user", "content": "go"}]
    if noise.random() < 0.5:
        start = [{"role": "system", "content": "system"}, *start]
    if noise.random() < 0.4:
        start = [*start, {"role": "assistant", "content": "b"}, {"role": "user", "content": "up"}]
    kinds: list[Any] = ["up", "down", "", [{"role": "system", "content": "end"}, {"role": "user", "content": "go"}]]
    steps: list[Any] = [go_on(noise.choice(kinds), noise.random()) for _ in range(noise.randint(1, 9))]
    if noise.random() < 0.5:
        steps = [*steps, end(1.0, success=True)]
    program, asked = Program(noise), Asked(noise)
    max_turns, longest = noise.randint(1, 12), noise.choice([40, 80, 1000])
    engine = make_engine(
        histories={None: program}, max_turns=max_turns, max_model_length=longest,
        append_final_observation=noise.random() < 0.3,
    )  # fmt: skip
    (episode,) = engine.run(specs({"start": (start, {}), "answers": steps}), asked)
    yield episode, reference(start, steps, program, asked, max_turns, longest), asked, program


@pytest.mark.parametrize("block", range(8))
def test_random_programs(block: int, tmp_path: Path) -> None:
    """25 programs each: every turn is what the generator was asked and answered; whatever is made of it agrees."""
    episodes: list[Trajectory] = []
    for seed in range(25 * block, 25 * block + 25):
        for episode, expected, asked, program in played(seed):
            actions = [answer for answer, _ in asked.answers]
            turns = range(len(expected.prompts))
            assert episode.error is None and episode.stop_reason is expected.stop, seed
            assert [request.token_ids for request in asked.requests] == expected.prompts, seed
            assert [episode.prompt_of(k) for k in turns] == expected.prompts and len(episode.turns) == len(turns), seed
            assert [episode.action_of(k) for k in turns] == actions
            assert [turn.fork for turn in episode.turns] == expected.forks
            assert [request.extends for request in asked.requests] == [fork is None for fork in expected.forks]
            assert [turn.question for turn in episode.turns] == program.questions[: len(turns)]
            assert episode.rewards == pytest.approx(expected.rewards) and episode.linear == (
                not any(program.questions[: len(turns)])
            )
            sampled = [episode.sampling_logprobs[turn.start : turn.end] for turn in episode.turns]
            assert sampled == [logprobs for _, logprobs in asked.answers]
            parents = ancestors(expected.prompts, actions)
            assert episode.parents == parents, seed
            check_messages(episode, expected, parents)
            if turns:
                check_paths(episode, actions)
                episodes.append(episode)
    check_records(episodes, tmp_path)
    check_batch(episodes)


def check_messages(episode: Trajectory, expected: Expected, parents: list[int | None]) -> None:
    """The last conversation, whole; what it does not contain is aside."""
    if not episode.turns:
        return
    assert episode.prompt == expected.contexts[0]
    whole = [*expected.contexts[-1], *episode.turns[-1].said]
    assert (episode.messages if episode.rewritten else [*episode.prompt, *episode.messages]) == whole
    held, k = set[int](), list[int | None]([len(episode.turns) - 1])
    while (last := k.pop()) is not None:
        held.add(last)
        k.append(parents[last])
    assert episode.asides == [turn.said for number, turn in enumerate(episode.turns) if number not in held]


def check_paths(episode: Trajectory, actions: list[list[int]]) -> None:
    """No path is the beginning of another, and each ends with a turn of its own, or with the final observation."""
    paths = episode.paths or [[*episode.prompt_ids, *episode.completion_ids]]
    assert not any(a is not b and b[: len(a)] == a for a in paths for b in paths)
    whole = [[*episode.prompt_of(k), *action] for k, action in enumerate(actions)]
    last = paths[episode.turns[-1].path if episode.paths else 0]
    assert all(path in whole or path is last for path in paths) and last[: len(whole[-1])] == whole[-1]
    assert episode.num_tokens == len({tuple(path[: n + 1]) for path in paths for n in range(len(path))})


def check_records(episodes: list[Trajectory], folder: Path) -> None:
    write_episodes(folder / "train-000000-rank0.parquet", map(episode_row, episodes))
    rows = read_records(folder / "train-000000-rank0.parquet")
    for episode, row in zip(episodes, rows, strict=True):
        for k, (turn, found) in enumerate(zip(episode.turns, row["turns"], strict=True)):
            completion = row["completion_ids"]
            if episode.paths is None:
                prompt = [*row["prompt_ids"], *completion[: found["start"]]]
            else:
                prompt = path_ids(row["paths"], found["path"])[: found["place"]]
                assert found["parent"] == episode.parents[k]
            assert prompt == episode.prompt_of(k) and completion[found["start"] : found["end"]] == episode.action_of(k)
            assert (found["fork"], found["messages"], bool(found["question"])) == (
                turn.fork,
                turn.messages,
                turn.question,
            )
            assert found["return"] == pytest.approx(sum(episode.rewards[k:]), abs=1e-6)
        assert row["prompt"] == episode.prompt and row["stop_reason"] == episode.stop_reason


def as_calls(episode: Trajectory) -> Trajectory:
    """The same calls as a program of another kind submits them."""
    last = episode.turns[-1]
    path = episode.paths[last.path] if episode.paths else [*episode.prompt_ids, *episode.completion_ids]
    calls = [
        Call(
            episode.prompt_of(k), episode.action_of(k), episode.sampling_logprobs[turn.start : turn.end], turn.text,
            turn.finish_reason, reward=turn.reward, question=turn.question,
        )
        for k, turn in enumerate(episode.turns)
    ]  # fmt: skip
    used = len(calls[-1].prompt_ids) + len(calls[-1].answer_ids)
    return forest(calls, episode.stop_reason, last=path[used:], linear=episode.linear)


def check_batch(episodes: list[Trajectory]) -> None:
    """Episodes of several paths are the same batch bit by bit; the turns of others are at the same tokens."""
    options: dict[str, Any] = {"pad_token_id": 0, "end_token_id": END}
    several = [episode for episode in episodes if episode.paths]
    batch, other = collate(several, **options), collate([as_calls(one) for one in several], **options)
    for one in fields(batch):
        columns = [getattr(made, one.name) for made in (batch, other)]
        assert columns == [None, None] or torch.equal(*columns), one.name
    batch, other = collate(episodes, **options), collate([as_calls(one) for one in episodes], **options)
    assert batch.path_ids is not None and batch.places is not None
    for name in (
        "path_ids",
        "path_lengths",
        "state_positions",
        "turn_rewards",
        "turn_mask",
        "following",
        "rewarded",
        "linear",
    ):
        assert torch.equal(getattr(batch, name), getattr(other, name)), name
    for row, episode in enumerate(episodes):
        for k in range(len(episode.turns)):
            places = batch.places[row][batch.turn_ids[row] == k]
            assert batch.path_ids[row][places].tolist() == episode.action_of(k)
            assert int(batch.state_positions[row, k]) == int(places[0]) - 1
