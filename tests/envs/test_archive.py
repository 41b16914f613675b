"""The archive, an agent: its rules, what its model sees, and that nothing but look-ups and notes beats chance."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from typing import Any

import pytest

from agile_environments.archive import (
    ANIMALS,
    LOOK_UP,
    PEOPLE,
    agent,
    call,
    careless_policy,
    draw_register,
    expert_policy,
    random_policy,
)
from agile_trainers.envs.agent import Agent, Task
from agile_trainers.envs.registry import make_environment_factory
from agile_trainers.evaluation.scripted_policies import PlayedAgent, demonstrate_agent, play_agent
from agile_trainers.types import Message

QUESTION = "Which animal does Bob keep ?"
ROW = {"person": "Bob", "animal": "elk"}


def played(said: list[str], row: dict[str, Any] | None = None, which: Agent = agent) -> PlayedAgent:
    """An episode in which the model says these, in this order."""
    answers = iter(said)
    (episode,) = play_agent(which, lambda messages, rng: next(answers), [0], row or ROW)
    assert not list(answers)
    return episode


def seen(episode: PlayedAgent) -> list[list[tuple[str, str]]]:
    """Role and content of what the model saw before each of its answers."""
    return [[(one["role"], one["content"]) for one in call["messages"][:-1]] for call in episode.calls]


def test_an_episode_as_the_model_sees_it() -> None:
    """The note is asked for in the first conversation; of that, only the note is in the second."""
    episode = played([call("Bob"), "elk", "elk"])
    before = [("user", QUESTION), ("assistant", ""), ("tool", "elk"), ("user", "Write a note")]
    assert seen(episode) == [before[:1], before, [("user", f"{QUESTION}\n\nYour note :\nelk")]]
    assert all(call["tools"] == [LOOK_UP] for call in episode.calls)
    assert episode.reward == 1.0 and episode.success
    assert episode.info == {**ROW, "looked_up": ["Bob"], "notes": ["elk"], "success": True}


@pytest.mark.parametrize(
    ("answer", "reward"), [("elk", 1.0), (" elk\n", 1.0), ("fox", 0.0), ("elk fox", 0.0), ("", 0.0)]
)
def test_the_answer_is_rewarded(answer: str, reward: float) -> None:
    assert played([answer]).reward == played([call("Bob"), "a note", answer]).reward == reward


def test_what_cannot_be_looked_up_is_said_and_looking_up_ends() -> None:
    unknown = '<tool_call>\n{"name": "look_up", "arguments": {"who": "Bob"}}\n</tool_call>'
    other = '<tool_call>\n{"name": "open", "arguments": {"person": "Bob"}}\n</tool_call>'
    for wrong in (call("Tom"), unknown, other):
        assert ("tool", "not in the register") in seen(played([wrong, "?", "elk"]))[1]
    episode = played([call("Bob"), "one", call("Bob"), "two", call("Bob")])
    assert episode.reward == 0.0 and not episode.success and episode.info["notes"] == ["one", "two"]
    assert played([call("Bob") + call("Ada"), "elk", "elk"]).info["looked_up"] == ["Bob", "Ada"]


def test_a_note_that_is_a_call_is_no_note() -> None:
    assert played([call("Bob"), call("Bob"), "fox"]).info["notes"] == [""]


def test_seeds_ask_about_everybody_and_animals_are_drawn_by_themselves() -> None:
    """What one person keeps says nothing of what another does: every pair of animals is equally frequent."""
    assert [draw_register(Task(None, seed), "hard")[1] for seed in range(8, 16)] == list(PEOPLE)
    registers = [draw_register(Task(None, seed), "easy")[0] for seed in range(6400)]
    pairs = Counter((one["Ada"], one["Bob"]) for one in registers)
    expected = len(registers) / 64
    assert len(pairs) == 64 and sum((count - expected) ** 2 / expected for count in pairs.values()) < 103  # 99.9 %


def test_without_a_note_of_the_right_look_up_every_way_of_answering_is_chance() -> None:
    """All episodes of two people: every animal of either, every person looked up, every note.

    The last answer comes after the note alone. The note comes after what was looked up alone. The animal of the other
    person is drawn by itself, so that a note made without the right look-up is right in one of eight episodes.
    """
    after_note: dict[str, set[str]] = {}
    before_note: dict[tuple[str, str], set[str]] = {}
    for animal, looked_up, note in itertools.product(ANIMALS, PEOPLE[:2], (*ANIMALS[:2], "?")):
        episode = played([call(looked_up), note, "fox"], {"person": "Ada", "animal": animal})
        _, before, after = seen(episode)
        before_note.setdefault((looked_up, animal), set()).add(json.dumps(before))
        after_note.setdefault(note, set()).add(json.dumps(after))
    assert all(len(shown) == 1 for shown in after_note.values()) and len(after_note) == 3
    assert len(set.union(*(before_note["Ada", animal] for animal in ANIMALS))) == len(ANIMALS)
    assert len(set.union(*(before_note["Bob", animal] for animal in ANIMALS))) == 1


@pytest.mark.parametrize("level", ["easy", "hard"])
def test_success_of_the_policies(level: str) -> None:
    played = make_environment_factory("agile:archive", level=level)
    assert all(episode.success for episode in play_agent(played, expert_policy, range(16)))
    for policy in (random_policy, careless_policy):
        rate = sum(episode.success for episode in play_agent(played, policy, range(160))) / 160
        assert abs(rate - 1 / 8) < 3 * (7 / 64 / 160) ** 0.5


def test_the_careless_policy_looks_the_right_person_up_in_every_second_game() -> None:
    asked: list[Message] = [{"role": "user", "content": QUESTION}]
    rate = Counter(careless_policy(asked, random.Random(seed)) for seed in range(1600))
    assert set(rate) == {call("Ada"), call("Bob")}
    assert abs(rate[call("Bob")] / 1600 - 3 / 4) < 3 * (3 / 16 / 1600) ** 0.5
    noted: list[Message] = [{"role": "user", "content": f"{QUESTION}\n\nYour note :\nowl"}]
    assert {careless_policy(noted, random.Random(seed)) for seed in range(50)} == {"owl"}


def test_demonstrations_are_the_conversations_of_careless_games() -> None:
    rows = demonstrate_agent(agent, careless_policy, range(40))
    assert rows == demonstrate_agent(agent, careless_policy, range(40)) and len(rows) == 80
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        roles = [message["role"] for message in first["messages"]]
        assert roles == ["user", "assistant", "tool", "user", "assistant"]
        note = first["messages"][-1]["content"]
        assert second["messages"][0]["content"].endswith(f"Your note :\n{note}")
        assert second["messages"][1:] == [{"role": "assistant", "content": note}]
        assert json.loads(first["tools"]) == json.loads(second["tools"]) == [LOOK_UP]


def test_bad_options_and_levels() -> None:
    with pytest.raises(ValueError, match=r"person must be one of Ada, Bob.*'Tom'"):
        draw_register(Task({"person": "Tom"}, 0), "easy")
    with pytest.raises(ValueError, match=r"animal must be one of fox.*'wolf'"):
        draw_register(Task({"animal": "wolf"}, 0), "easy")
    with pytest.raises(ValueError, match=r"'far'.*easy, normal, hard"):
        draw_register(Task(None, 0), "far")
    with pytest.raises(ValueError, match="does not read"):
        draw_register(Task({"word": "fox"}, 0), "easy")
