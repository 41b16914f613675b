"""Episodes of several paths on the viewer's page, in a real Chromium (``make test-viewer``)."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_records import END, byte_tokens, forest_run, play, trained, write_vocabulary
from written_page import shoot, texts

from agile_trainers.records.reader import open_records
from agile_trainers.records.writer import RecordWriter, episode_row
from agile_trainers.rollout.forest import Call, forest
from agile_trainers.types import Message, StopReason, Trajectory
from agile_trainers.viewer.html import write_page

pytestmark = pytest.mark.browser
Visit = Callable[..., Any]


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = forest_run(tmp_path_factory.mktemp("forest"))
    return write_page(open_records(folder), folder / "view.html").path


ABOUT = [
    "asked again: turn 2 · nothing goes on from this answer",
    "asked again: no guess · the same prompt as turn 1",
    "goes on from turn 2",
    "helper · a prompt of its own · at once with turn 5 · nothing goes on from this answer",
    "helper · the same prompt as turn 4 · at once with turn 4 · nothing goes on from this answer",
    "goes on from turn 3 · nothing goes on from this answer",
    "summary · shares its first 41 tokens with earlier turns",
    "goes on from turn 7",
]


def test_the_tree_says_what_goes_on_from_what_and_why(page_file: Path, visit: Visit) -> None:
    page = visit(page_file, "#episode/0/0")
    assert texts(page, ".call .about") == texts(page, ".turn > .note") == ABOUT
    assert texts(page, ".call .snippet")[:3] == ["I gues 5", "guess 5", "ask the helpers"]
    kept = [page.locator(".dot").nth(k).get_attribute("class") == "dot" for k in range(8)]
    assert kept == [False] * 6 + [True] * 2  # the summary's messages hold what was before
    columns = page.locator(".dot").evaluate_all("dots => dots.map((dot) => Number(dot.getAttribute('cx')))")
    assert columns == [12, 12, 12, 30, 30, 12, 12, 12]
    assert page.locator(".edge").count() == 3 and "5 paths" in texts(page, ".tree .legend")[0]
    page.locator(".call").nth(2).click()
    top = page.locator("#turn-2").bounding_box()["y"]
    assert 0 <= top < 120


def test_the_whole_prompt_of_a_turn_opens_with_what_is_shared_apart(page_file: Path, visit: Visit) -> None:
    page = visit(page_file, "#episode/0/0")
    fold = page.locator("#turn-2 > details")
    assert fold.locator("summary").inner_text() == "85 prompt tokens, 60 of them as in earlier turns"
    fold.locator("summary").click()
    page.wait_for_selector("#turn-2 .own .t")  # a fold is filled after it opened
    shared = fold.locator(".shared .tokens").inner_text().replace("↵", "")
    own = fold.locator(".own .tokens").inner_text().replace("↵", "")
    assert shared.startswith("system: You play.\nuser: Find the number.\nassistant: guess 5")
    assert own == "\nuser: higher\nassistant: "
    fold.locator(".own .t").nth(1).hover()
    about = dict(zip(texts(page, "#token dt"), texts(page, "#token dd"), strict=True))
    assert (about["token"], about["bytes"], about["position"]) == (str(ord("u")), "75", "61")
    assert about["turn"] == "none: not sampled"
    said = page.locator("#turn-6 > details").first
    assert said.locator("summary").inner_text() == "3 messages of the prompt"
    said.locator("summary").click()
    page.wait_for_selector("#turn-6 > details .message")
    assert texts(page, "#turn-6 > details .message .text") == [
        "You play.", "Find the number.", "Known: above 5; 6 and eight were said.",
    ]  # fmt: skip
    page.locator("article > details > summary").click()
    page.wait_for_selector("article > details .tokens .t")
    assert page.locator("article > details .tokens").inner_text().replace("↵", "") == "\nuser: correct"
    # Tokens that were sampled keep their colours, those of prompts have none.
    assert page.locator("#turn-2 > .tokens .t.pos, #turn-2 > .tokens .t.neg").count() == 16
    assert page.locator("#turn-2 .shared .t.given").count() == 60


def test_an_ordinary_episode_looks_as_before(page_file: Path, visit: Visit) -> None:
    page = visit(page_file, "#episode/0/3")
    assert page.locator(".tree").count() == page.locator(".turn > .note").count() == 0
    assert texts(page, "details > summary") == ["15 prompt tokens", "info", "15 tokens between the actions"]
    page.locator("details > summary").first.click()
    page.wait_for_selector(".foreign .t")
    page.locator(".foreign .t").first.hover()
    assert texts(page, "#token dd")[:2] == [str(ord("G")), "47"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_pictures_of_a_tree(page_file: Path, visit: Visit, width: int, scheme: str) -> None:
    page = visit(page_file, "#episode/0/0", width=width, scheme=scheme)
    page.locator("#turn-2 > details > summary").click()
    page.wait_for_selector("#turn-2 .own .t")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    shoot(page, f"paths_{scheme}_{width}")


def test_a_question_on_an_ordinary_path_is_told_apart_with_what_was_asked(tmp_path: Path, visit: Visit) -> None:
    """The environment did not get the answer, and what the model was asked is in no observation."""
    asked = [{"role": "user", "content": "Guess a number."}, {"role": "user", "content": "Write a note first."}]
    game = play(["a note", "7"], [None, "correct"], [0.0, 1.0], success=True)
    game.turns[0].question, game.turns[0].messages, game.linear = True, asked, False
    writer = RecordWriter(tmp_path, {"run": "20260101-000000-f0f1", "algorithm": "grpo", "environment": "guess"})
    write_vocabulary(writer.folder)
    writer.write_train(0, [trained(episode_row(game, phase="train", advantages=[0.5, 0.5]), random.Random(0))])
    page = visit(write_page(open_records(writer.folder), tmp_path / "view.html").path, "#episode/0/0")
    assert texts(page, ".turn > .note") == ["not for the environment"]
    fold = page.locator("#turn-0 > details").first
    assert fold.locator("summary").inner_text() == "2 messages of the prompt"
    fold.locator("summary").click()
    page.wait_for_selector("text=Write a note first.")
    shoot(page, "question")


def agents_episode(noise: dict[str, Any]) -> Trajectory:
    """Five calls of an agent in the order of their prompts; they were asked for in the order 1, 0, 3, 4, 2."""
    start: list[Message] = [{"role": "user", "content": "go"}]

    def call(prompt: str, answer: str, number: int, fork: str | None = None, **note: Any) -> Call:
        ids = [*byte_tokens(answer), END]
        info = {"call": {"number": number, "client": "openai/1.9", **note}}
        return Call(
            [*byte_tokens(prompt)], ids, [-0.5] * len(ids), answer, rewarded=0, fork=fork, info=info, messages=start
        )

    calls = [
        call("a: go", "helped", 1, "new conversation", parts={"token": 0, "was": "at", "now": "a: go"}, client="lc/2"),
        call("at 12:00 go", "first", 0, asked={"temperature": 0.2}, tools=["look", "say"]),
        call("at 12:01 go", "third", 4, "context rewritten", parts={"token": 7, "was": "0 go", "now": "1 go"}),
        call("", "second", 2, repeated=1),
        call("", "second too", 3, "asked again", repeated=3, hung_up=True),
    ]
    calls[2].info["call"] |= noise
    for one in calls[3:]:  # they go on from the first one's answer
        one.prompt_ids = [*calls[1].prompt_ids, *calls[1].answer_ids, *byte_tokens("more")]
    return forest(calls, StopReason.TERMINATED, prompt=start, linear=False)


def run_of(folder: Path, *episodes: Trajectory) -> Path:
    writer = RecordWriter(folder, {"run": "20260101-000000-f0f2", "algorithm": "grpo", "environment": "solve"})
    write_vocabulary(writer.folder)
    rows = [
        episode_row(one, phase="train", index=k, generation=0, group=0, member=k, advantages=[0.5] * len(one.turns))
        for k, one in enumerate(episodes)
    ]
    writer.write_train(0, [trained(row, random.Random(0)) for row in rows])
    return write_page(open_records(writer.folder), folder / "view.html").path


def test_the_calls_of_an_agent_by_time_with_who_asked_and_what_was_sent_again(tmp_path: Path, visit: Visit) -> None:
    page = visit(run_of(tmp_path, agents_episode({})), "#episode/0/0")
    assert texts(page, ".call .number") == ["2", "1", "4", "5", "3"]
    assert texts(page, ".call .about") == [
        "",
        "new conversation · parts from an earlier call after 0 tokens: “at” became “a: go” · nothing goes on from this "
        "answer",
        "sent again once, and answered with this · goes on from turn 2 · asked again: turn 5 · nothing goes on from this "
        "answer",
        "asked again · sent again 3 times, and answered with this · its client hung up before it had the answer · goes on "
        "from turn 2 · the same prompt as turn 4 · nothing goes on from this answer",
        "context rewritten · parts from an earlier call after 7 tokens: “0 go” became “1 go”",
    ]
    assert "Asked by openai/1.9 (4), lc/2 (1)." in texts(page, ".tree .legend")[0]
    kept = [page.locator(".dot").nth(row).get_attribute("class") == "dot" for row in range(5)]
    assert kept == [False, False, False, False, True]
    assert page.locator(".edge").count() == 2
    assert texts(page, ".turn > h2 .number") == ["2", "1", "4", "5", "3"]  # the turns themselves, too
    notes = texts(page, ".turn > .note")
    assert (
        notes[0] == "with the tools look, say · asked by openai/1.9 · asked for temperature=0.2, which the run decides"
    )
    assert notes[1].endswith(" · asked by lc/2")
    assert texts(page, "#turn-0 > details[open] .message") == ["user\n\ngo"]  # what begins anew and is short is open
    shoot(page, "agent")
    page.set_viewport_size({"width": 1280, "height": 300})
    page.locator(".call").nth(1).click()
    assert 0 <= page.locator("#turn-0").bounding_box()["y"] < 120


@pytest.mark.parametrize(
    "noise",
    [
        {"number": "4"}, {"number": None}, {"parts": "<b>x</b>"}, {"parts": {"token": "7"}}, {"client": {"a": [1]}},
        {"asked": "<b>", "repeated": "9", "hung_up": "yes"}, {"client": "<img src=x onerror=alert(1)>" * 50},
    ],
)  # fmt: skip
def test_notes_of_calls_that_are_not_what_the_endpoint_writes(
    noise: dict[str, Any], tmp_path: Path, visit: Visit
) -> None:
    """They are shown as text or left out; without all numbers the calls stand in the order of the record."""
    page = visit(run_of(tmp_path, agents_episode(noise)), "#episode/0/0")
    assert len(texts(page, ".call")) == 5 and page.locator(".turn img, .turn .note b").count() == 0
    numbers = texts(page, ".call .number")
    assert numbers == (["1", "2", "3", "4", "5"] if "number" in noise else ["2", "1", "4", "5", "3"])


def test_an_agent_that_only_goes_on_has_notes_and_no_tree(tmp_path: Path, visit: Visit) -> None:
    game = play(["a", "b"], ["more", "done"], [0.0, 1.0], success=True)
    for number, turn in enumerate(game.turns):
        turn.info["call"] = {"number": number, "client": "openai/1.9", **({"repeated": 2} if number else {})}
    page = visit(run_of(tmp_path, game), "#episode/0/0")
    assert page.locator(".tree").count() == 0
    assert texts(page, ".turn > .note") == [
        "asked by openai/1.9", "sent again 2 times, and answered with this · asked by openai/1.9"
    ]  # fmt: skip
