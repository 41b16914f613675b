"""What is said of an episode of several paths: the last turn's conversation, and what was said beside it."""

from __future__ import annotations

from typing import Any

import pytest

from agile_trainers.cli.check.sections import _longest, _parts
from agile_trainers.monitor.rollout_log import shown_messages
from agile_trainers.rollout.forest import Call, forest
from agile_trainers.rollout.metrics import episode_metrics
from agile_trainers.step.reward import reward_inputs
from agile_trainers.types import Message, StopReason, Trajectory, Turn

START: list[Message] = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]


def said(*contents: str) -> list[Message]:
    """Messages of the assistant and of the user in turns."""
    return [{"role": ("assistant", "user")[k % 2], "content": content} for k, content in enumerate(contents)]


def call(prompt: list[int], answer: list[int], text: str, observation: str | None = None, **fields: Any) -> Call:
    return Call(prompt, answer, [-1.0] * len(answer), text, observation=observation, **fields)


def asked_again() -> Trajectory:
    """bad | good, 3 tokens of an observation | end, cut short after one more."""
    calls = [
        call([1, 2], [5], "bad", "no"),
        call([1, 2], [6, 7], "good", "on"),
        call([1, 2, 6, 7, 3, 3, 3], [8], "end", "x"),
    ]
    return forest(calls, StopReason.MAX_TURNS, last=[9], prompt=START)


def helped() -> Trajectory:
    """one | a helper with a prompt of five tokens, which goes on | two, whose prompt has its answer as text."""
    aid: list[Message] = [{"role": "user", "content": "aid"}]
    calls = [
        call([1, 2], [5], "one", "hm"),
        call([4] * 5, [6], "help", "ok", messages=aid),
        call([4] * 5 + [6, 4], [6], "more help"),
        call([1, 2, 5, 3], [8, 9], "two", "won"),
    ]
    return forest(calls, StopReason.TERMINATED, prompt=START, linear=False)


def summarized(*, begins: bool) -> Trajectory:
    """one | a summary | two, three after a prompt that begins as the episode's, or does not."""
    head = START if begins else [{"role": "user", "content": "anew"}]
    calls = [
        call([1, 2], [5], "one", "hm"),
        call([1, 2, 5, 3], [6], "sum", ""),
        call([1, 6], [7], "two", "go", messages=[*head, {"role": "user", "content": "sum"}]),
        call([1, 6, 7, 3], [8], "three", "won"),
    ]
    return forest(calls, StopReason.TERMINATED, prompt=START)


def plain() -> Trajectory:
    turns = [Turn(0, 1, "", "stop"), Turn(3, 4, "", "stop")]
    return Trajectory([1] * 4, [2, 3, 3, 2, 3], [0.0] * 5, turns, StopReason.MAX_TURNS)


ANEW: list[Message] = [{"role": "user", "content": "anew"}, {"role": "user", "content": "sum"}]
CASES = {
    "asked again": (asked_again(), START, said("good", "on", "end", "x"), [said("bad", "no")]),
    "helped": (helped(), START, said("one", "hm", "two", "won"), [said("help", "ok"), said("more help")]),
    "summary": (
        summarized(begins=True), START, [{"role": "user", "content": "sum"}, *said("two", "go", "three", "won")],
        [said("one", "hm"), said("sum", "")],
    ),
    "rewritten": (
        summarized(begins=False), ANEW, said("two", "go", "three", "won"), [said("one", "hm"), said("sum", "")],
    ),
    "ordinary": (
        Trajectory([1], [2], [-1.0], [Turn(0, 1, "a", "stop", observation="b")], StopReason.TERMINATED, START), START,
        said("a", "b"), [],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("episode", "prompt", "completion", "asides"), CASES.values(), ids=CASES)
def test_a_conversation_and_what_was_said_beside_it(
    episode: Trajectory, prompt: list[Message], completion: list[Message], asides: list[list[Message]]
) -> None:
    inputs = reward_inputs([{}], [episode])
    # What the environment says to the last answer may be its verdict: a reward that reads it would reward any answer.
    assert (inputs["prompts"], inputs["completions"]) == ([prompt], [completion[:-1]])
    assert completion[-1]["role"] == "user" and completion[-2]["role"] == "assistant"
    assert inputs["inputs"][0]["trajectories"].asides == asides
    assert inputs["completion_ids_list"] == [episode.completion_ids]
    table = shown_messages(episode)
    assert table[: len(episode.messages)] == episode.messages
    marked = [{**m, "role": f"aside {n}: {m['role']}"} for n, one in enumerate(asides, 1) for m in one]
    assert table[len(episode.messages) :] == marked
    whole = completion if prompt == START else [*prompt, *completion]
    assert episode.messages == whole and (episode.rewritten == prompt) == (prompt != START)


def test_metrics_count_distinct_tokens_and_every_answer() -> None:
    row = episode_metrics(helped())
    assert (row["tokens"], row["action_tokens"], row["turns"]) == (6 + 8, 5, 4)


@pytest.mark.parametrize(
    ("episodes", "parts", "longest"),
    [
        ([asked_again()], (2, 3), 9),
        ([helped()], (5, 1), 8),
        ([summarized(begins=True)], (2, 1), 5),
        ([asked_again(), helped()], (5, 3), 9),
        ([plain()], (4, 2), 9),
        ([Trajectory([1] * 4, [], [], [], StopReason.CONTEXT_FULL)], (4, 0), 4),
    ],
)
def test_the_memory_plan_knows_prompts_and_observations_of_paths(
    episodes: list[Trajectory], parts: tuple[int, int], longest: int
) -> None:
    """A prompt counts as such where it goes on from no answer; what follows an answer on its path is an observation."""
    assert _parts(episodes) == parts and max(map(_longest, episodes)) == longest
