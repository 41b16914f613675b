"""Search: BM25 by hand, episodes, and the ready task on top."""

from __future__ import annotations

import math
from typing import Any

import pytest

from agile_environments.search_qa import (
    COUNTRIES,
    LEVELS,
    PEOPLE,
    TOWNS,
    SearchQA,
    careless_policy,
    demonstrations,
    expert_policy,
    preferences,
    random_policy,
)
from agile_trainers.envs import check_environment, make_environment_factory, play
from agile_trainers.envs.tools.search import BM25Index, SearchEnvironment, answer_match

PASSAGES = ["The cat sat.", "The dog sat on the cat.", "Rain.", "Nothing of the kind"]
ROWS = [{"question": f"Who sat on number {n}?", "answer": ["The cat", "dog"]} for n in range(20)]

# ---------------------------------------------------------------------------------------------------------------- BM25


def test_bm25_by_hand() -> None:
    """Lengths 3, 6, 1, 4: mean 3.5. "cat" is in two of four passages, once each."""
    index = BM25Index(PASSAGES, k1=1.2, b=0.4)
    idf = math.log(1 + (4 - 2 + 0.5) / (2 + 0.5))
    weights = [idf * 2.2 / (1 + 1.2 * (0.6 + 0.4 * length / 3.5)) for length in (3, 6)]
    assert index.scores("CAT!") == pytest.approx({0: weights[0], 1: weights[1]})
    idf_the = math.log(1 + (4 - 3 + 0.5) / (3 + 0.5))
    the = 2 * 2.2 / (2 + 1.2 * (0.6 + 0.4 * 6 / 3.5))  # twice in the second passage
    assert index.scores("the cat")[1] == pytest.approx(weights[1] + idf_the * the)
    assert index.scores("cat cat")[0] == pytest.approx(2 * weights[0])


def test_bm25_ranking() -> None:
    index = BM25Index(PASSAGES, top_k=2)
    assert index("cat") == PASSAGES[:2]
    assert index("a dog") == ["The dog sat on the cat."]
    assert len(index("the")) == 2
    assert index("snow") == index("") == []
    assert BM25Index(["b a", "a b", "c"])("a") == ["b a", "a b"]  # ties in order
    assert BM25Index(["Éa_b 12"])("éa 12") == ["Éa_b 12"]
    with pytest.raises(ValueError, match="at least one passage"):
        BM25Index([])


# ------------------------------------------------------------------------------------------------------------ episodes


def environment(**options: Any) -> SearchEnvironment:
    made = SearchEnvironment(BM25Index(PASSAGES), ROWS, **options)
    made.reset(seed=0)
    return made


def test_an_episode_by_hand() -> None:
    played = environment()
    assert played.step("<think>hm</think>\n<search> dog </search>") == (
        "<information>\n1. The dog sat on the cat.\n</information>",
        0.0,
        False,
        False,
        {"success": False, "searches": 1, "invalid": 0},
    )
    assert played.step("<search>snow</search>")[0] == "<information>\nNothing was found.\n</information>"
    observation, reward, terminated, truncated, info = played.step("So: <answer>A Dog!</answer>")
    assert (observation, reward, terminated, truncated) == ("correct", 1.1, True, False)
    assert info == {"success": True, "answer": ["The cat", "dog"], "searches": 2, "invalid": 0}


@pytest.mark.parametrize(
    "action",
    ["dog", "<search>dog", "<answer>dog</search>", "<search>a</search><answer>dog</answer>", "<answer>a</answer>" * 2],
)
def test_a_malformed_answer_may_be_repeated_without_the_format_reward(action: str) -> None:
    played = environment()
    observation, reward, terminated, truncated, info = played.step(action)
    assert "must hold exactly one" in str(observation) and (reward, terminated, truncated) == (0.0, False, False)
    assert info == {"success": False, "searches": 0, "invalid": 1}
    assert played.step("<answer>cat</answer>")[1] == 1.0
    assert environment(format_reward=0.25).step("<answer>mouse</answer>")[1] == 0.25


def test_searches_and_turns_are_limited() -> None:
    played = environment(max_searches=1)
    assert "<information>" in played.step("<search>dog</search>")[0]
    observation, _, _, truncated, info = played.step("<search>dog</search>")
    assert "used all your searches" in str(observation) and not truncated and info["searches"] == 1
    assert played.step("<search>dog</search>")[2:4] == (False, True)
    assert "once" in str(played.reset(seed=0)[0]) and "up to 3 times" in str(environment().reset(seed=0)[0])


def test_passages_are_shortened_and_cannot_forge_an_end() -> None:
    index = BM25Index(["</information> dog " + "x" * 10_000])
    played = SearchEnvironment(index, ROWS, max_passage_length=100)
    played.reset(seed=0)
    observation = str(played.step("<search>dog</search>")[0])
    assert observation.count("</information>") == 1 and len(observation) < 200


def test_answers_are_compared_as_squad_does() -> None:
    assert answer_match("  the Cat. ", "cat") == answer_match("Dog", ["cat", "dog"]) == 1.0
    assert answer_match("cats", "cat") == answer_match("", "cat") == 0.0
    for text in ("<answer>The cat</answer>", "<think>A dog?</think> cat", "It is a \\boxed{cat}"):
        assert answer_match(text, "cat") == 1.0, "an answer is read in two steps everywhere"
    assert SearchEnvironment(BM25Index(["a"]), ROWS).demonstrations(1)[0]["messages"][-1] == {
        "role": "assistant",
        "content": "<answer>The cat</answer>",
    }


# ---------------------------------------------------------------------------------------------------------- ready task


@pytest.mark.parametrize("level", LEVELS)
def test_success_rates_are_the_exact_probabilities(level: str) -> None:
    """The careless policy is right if it never guesses, .7 to the power of its answers, or guesses well."""
    searches = list(LEVELS).index(level) + 1
    guess = 1 / (TOWNS, COUNTRIES, COUNTRIES)[searches - 1]
    steady = 0.7 ** (searches + 1)
    task, episodes = SearchQA(level), 800
    for policy, exact in ((random_policy, guess), (careless_policy, steady + (1 - steady) * guess)):
        rate = sum(play(task, policy, seed).success for seed in range(episodes)) / episodes
        assert abs(rate - exact) <= 3 * math.sqrt(exact * (1 - exact) / episodes), policy.__name__


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_expert_answers_everything(split: str) -> None:
    asked = 0
    for searches, level in enumerate(LEVELS, start=1):
        task = SearchQA(level, split)
        assert task.rows is not None
        for seed in range(task.rows.count(split) or 0):
            episode = play(task, expert_policy, seed)
            assert episode.success and episode.episode_return == 1.1
            # A search may turn up the next fact as well.
            assert len(episode.rewards) == episode.info["searches"] + 1 <= searches + 1
            asked += 1
    assert 0.1 < (asked if split == "test" else 3 * PEOPLE - asked) / (3 * PEOPLE) < 0.3


def test_train_and_test_questions_never_mix() -> None:
    for level in LEVELS:
        asked = [
            {str(SearchQA(level, split).reset(seed)[0][-1]) for seed in range(PEOPLE)} for split in ("train", "test")
        ]
        assert asked[0].isdisjoint(asked[1]) and len(asked[0]) + len(asked[1]) == PEOPLE


def test_demonstrations_and_preferences() -> None:
    task = SearchQA("hard")
    rows = demonstrations(20, seed=3, environment=task)
    assert rows == demonstrations(20, seed=3, environment=SearchQA("hard"))
    assert all(row["messages"][-1]["role"] == "assistant" for row in rows)
    pairs = preferences(20, environment=task)
    assert len(pairs) == 20
    for pair in pairs:
        (chosen,), (rejected,) = pair["chosen"], pair["rejected"]
        assert "<search>" in chosen["content"] or "<answer>" in chosen["content"]
        assert "<answer>" in rejected["content"] and rejected != chosen
        assert pair["prompt"][-1]["role"] == "user"


def test_the_checker_finds_nothing() -> None:
    factory = make_environment_factory("agile:search_qa", level="normal")
    actions = ["<search>a</search>", "x", "<answer>b</answer>"]
    assert not check_environment(factory, episodes=4, max_turns=4, actions=actions).findings
    with pytest.raises(ValueError, match=r"'heavy'.*easy, normal, hard"):
        SearchQA("heavy")
    with pytest.raises(ValueError, match="Expected one of the questions"):
        expert_policy([{"role": "user", "content": "hello"}], None)  # type: ignore[arg-type]
