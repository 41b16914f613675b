"""reasoning-gym's data sets, played for real through the rollout engine."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import isolated_functions
import numpy as np
import pytest
from installed import needs
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from agile_trainers.envs import check_environment, list_environments, make_environment_factory
from agile_trainers.envs.isolation.calls import run_isolated
from agile_trainers.envs.libraries import reasoning_gym
from agile_trainers.envs.libraries.reasoning_gym import ReasoningGymEnvironment, listed
from agile_trainers.rollout.chat.renderer import ChatRenderer
from agile_trainers.rollout.collate import collate
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.environment_pool import EnvironmentPool
from agile_trainers.rollout.generators import GenerationRequest, ScriptedGenerator
from agile_trainers.rollout.spec import EpisodeSpec, Limits

needs("reasoning_gym")

EPISODES = 4
SLOW = ("acre", "futoshiki", "intermediate_integration", "knight_swap", "puzzle24", "quantum_lock")
WITHOUT_ANSWER = ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour")
"""Data sets that score answers but know none."""
LENIENT = ("game_of_life_halting",)
"""A data set that takes everything but the right word for the other of its two answers."""


@pytest.fixture(scope="module")
def tokenizer(embedded_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(embedded_model)


def play_all(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Even episodes give the data set's own answer, odd ones a wrong one."""
    made: list[ReasoningGymEnvironment] = []

    def factory() -> ReasoningGymEnvironment:
        made.append(ReasoningGymEnvironment(name))
        return made[-1]

    def script(request: GenerationRequest) -> list[int]:
        # Inline, all episodes are reset in order before the first action: instance and episode have one number.
        environment, right = made[request.episode], request.episode % 2 == 0
        known = right and name not in WITHOUT_ANSWER
        answer = environment.ideal(environment.row("train", request.episode)) if known else "no idea"
        return [*tokenizer.encode(f"So: <answer>{answer}</answer>"), tokenizer.eos_token_id]

    engine = RolloutEngine(
        EnvironmentPool(factory),
        ChatRenderer(tokenizer, eos_token_ids=[tokenizer.eos_token_id]),
        Limits(max_turns=2, max_new_tokens=1 << 16, max_model_length=1 << 20),
    )
    episodes = engine.run([EpisodeSpec(seed, (seed,)) for seed in range(EPISODES)], ScriptedGenerator(script))
    assert [(episode.error, episode.stop_reason.value) for episode in episodes] == [(None, "terminated")] * EPISODES
    assert [episode.success for episode in episodes[::2]] == [name not in WITHOUT_ANSWER] * (EPISODES // 2)
    assert name in LENIENT or not any(episode.success for episode in episodes[1::2])
    assert all(0.0 <= episode.episode_return <= 1.0 for episode in episodes)
    assert (
        collate(episodes, pad_token_id=tokenizer.pad_token_id, end_token_id=tokenizer.eos_token_id).turn_mask.tolist()
        == [[True]] * EPISODES
    )


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in listed()])
def test_episodes_of_every_data_set(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    play_all(name, tokenizer)


def test_there_are_more_than_sixty_quick_ones() -> None:
    assert len(listed()) - len(SLOW) >= 60
    assert {f"reasoning_gym:{name}" for name in listed()} <= set(list_environments())


def test_settings_reach_the_data_set_and_answers_its_scorer() -> None:
    environment = make_environment_factory(
        "reasoning_gym:chain_sum", min_terms=3, max_terms=3, template="Go: {question}"
    )()
    assert isinstance(environment, ReasoningGymEnvironment)
    observation, info = environment.reset(seed=4)
    row = environment.row("train", 4)
    assert info == {"split": "train", "row": 4} and observation == "Go: " + row["question"]
    assert sum(row["question"].count(sign) for sign in "+-") == 2
    assert environment.step(f"<think>hm</think> <answer> {row['answer']} </answer>")[1] == 1.0
    info = {"success": False, "answer": row["answer"]}
    assert environment.step("0.5") == (f"wrong, the answer is {row['answer']}", 0.0, True, False, info)


def test_a_wrong_answer_keeps_the_score_it_earns() -> None:
    environment = ReasoningGymEnvironment("calendar_arithmetic")
    for seed in range(200):
        row = environment.row("train", seed)
        if row["answer"].isdigit():
            score = environment.score(str(int(row["answer"]) + 1), row)
            assert 0.0 < score < 1.0
            return
    pytest.fail("no question with a number as its answer")


def test_rows_of_train_and_test_never_mix_and_depend_on_the_seed_alone() -> None:
    settings: dict[str, Any] = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    train = ReasoningGymEnvironment("chain_sum", **settings)
    test = ReasoningGymEnvironment("chain_sum", split="test", **settings)
    asked = [{environment.reset(seed=seed)[0] for seed in range(120)} for environment in (train, test)]
    assert len(asked[0]) > 60 and len(asked[1]) > 20 and not asked[0] & asked[1]
    assert train.reset(seed=3, options={"split": "test", "row": 5})[0] == test.reset(seed=5)[0]
    assert {row["messages"][0]["content"] for row in test.demonstrations(50)} <= asked[1]


def test_the_data_set_that_draws_from_the_global_state_is_reproducible() -> None:
    """pool_matrix takes its numbers from NumPy's global state."""
    before = random.getstate(), np.random.get_state()[1].tolist()
    first, other = ReasoningGymEnvironment("pool_matrix"), ReasoningGymEnvironment("pool_matrix", size=9_999)
    assert first.items is not other.items, "the second one must not reuse what the first one made"
    assert [first.items.item(n) for n in range(5)] == [other.items.item(n) for n in (4, 3, 2, 1, 0)][::-1]
    assert before == (random.getstate(), np.random.get_state()[1].tolist())


def test_data_sets_that_draw_from_sets_are_made_with_one_hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_isolated(isolated_functions.hash_randomization) == 0
    monkeypatch.setattr(reasoning_gym, "run_isolated", lambda function, name, *_, **__: (function.__name__, name))
    for name in reasoning_gym.HASHED:
        assert reasoning_gym._Items(name, 10, {}).item(3) == ("item", name)


def test_the_checker_finds_nothing() -> None:
    for name in ("chain_sum", "pool_matrix", "syllogism"):
        assert not check_environment(make_environment_factory(f"reasoning_gym:{name}"), episodes=4).findings


def test_preferences_and_demonstrations() -> None:
    environment = ReasoningGymEnvironment(
        "spell_backward", demonstration="<answer>{answer}</answer>", system_prompt="Hm."
    )
    for row in environment.demonstrations(4):
        system, _, assistant = row["messages"]
        assert system["content"] == "Hm." and assistant["content"].startswith("<answer>")
    for index, pair in enumerate(environment.preferences(4)):
        scored = [
            environment.score(pair[which][0]["content"], environment.row("train", index))
            for which in ("chosen", "rejected")
        ]
        assert scored[0] == 1.0 > scored[1]
    with pytest.raises(ValueError, match="gives none, so there is nothing to demonstrate"):
        ReasoningGymEnvironment("graph_color").demonstrations(1)


@pytest.mark.parametrize(
    ("name", "kwargs", "words"),
    [
        ("chain_summ", {}, ["Unknown environment", "reasoning_gym:chain_sum"]),
        ("composite", {}, ["Unknown environment"]),
        ("chain_sum", {"max_term": 3}, ["does not read the argument max_term", "did you mean max_terms?"]),
        ("chain_sum", {"min_terms": 9, "max_terms": 2}, ["cannot be made from", "max_terms must be >= min_terms"]),
        ("chain_sum", {"split": "validation"}, ["no split 'validation'", "train, test"]),
        ("chain_sum", {"template": "{problem}"}, ["no column 'problem'"]),
    ],
)
def test_wrong_names_and_settings_say_what_is_wrong(name: str, kwargs: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        make_environment_factory(f"reasoning_gym:{name}", **kwargs)()
    assert all(word in str(error.value) for word in words), error.value


def test_a_missing_library_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "reasoning_gym" else find(name))
    with pytest.raises(ImportError, match=r"pip install 'agile-trainers\[envs\]'"):
        make_environment_factory("reasoning_gym:chain_sum")
    assert not any(name.startswith("reasoning_gym:") for name in list_environments())
