"""Several environments in one run: which one a group plays, within which limits, and that each is learned and reported."""

from __future__ import annotations

from collections import Counter
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from checkpointed_runs import SAVING, KillBefore, Killed, assert_same, weights
from datasets import Dataset
from games import make_trainer
from mixtures import BOTH, LIMITS, High, Low, make
from recorded import recorded

from agile_environments.probes import PROBE_WORDS
from agile_trainers.adapters.folders import RECORD, CheckpointError, read_json
from agile_trainers.embedded import make_embedded_model
from agile_trainers.envs.registry import describe_environment
from agile_trainers.evaluation.results import evaluation_episodes
from agile_trainers.objectives.advantages import whiten, whiten_each
from agile_trainers.rollout.seeds import Mixture, systematic_sample, training_specs
from agile_trainers.trainers import MultiTurnGRPOConfig


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return make_embedded_model(tmp_path_factory.mktemp("words") / "model", words=PROBE_WORDS)


def config(tmp_path: Any, **changes: Any) -> MultiTurnGRPOConfig:
    return MultiTurnGRPOConfig(output_dir=str(tmp_path), bf16=False, use_cpu=True, **changes)


def generations(folder: Any) -> list[dict[str, Any]]:
    return recorded(folder)


# -------------------------------------------------------------------------------------------------------------- choice


def test_every_batch_holds_every_share():
    """8 groups of 3 environments: 2 or 3 of each, 8/3 on average."""
    mixture = Mixture(("a", "b", "c"), 8)
    batches = [Counter(mixture.draw(3, generation)) for generation in range(2000)]
    for name in "abc":
        counts = [batch[name] for batch in batches]
        assert set(counts) == {2, 3} and fmean(counts) == pytest.approx(8 / 3, abs=0.06)
    alone = [Mixture(("a", "b"), 1).draw(3, generation) for generation in range(2000)]
    assert alone.count(["a"]) / 2000 == pytest.approx(1 / 2, abs=0.055), "of a batch of one group too"
    ends = [(drawn[0], drawn[-1]) for drawn in (mixture.draw(3, generation) for generation in range(2000))]
    assert [one for one, _ in ends].count("b") / 2000 == pytest.approx(1 / 3, abs=0.055), "no place is anybody's own"
    assert any(one == other for one, other in ends), "groups of an environment are not side by side"
    uneven = [int(systematic_sample(np.array([7.0, 3.0]), 1, np.random.default_rng(seed))[0]) for seed in range(2000)]
    assert uneven.count(0) / 2000 == pytest.approx(0.7, abs=0.055), "a share is rounded up or down by its size"


def test_the_choice_depends_on_seed_and_generation_alone():
    mixture = Mixture(("low", "high"), 4)
    rows: list[Any] = [None] * 16
    whole = training_specs(5, 7, rows, range(16), 4, mixture)
    for cut in (8, 6):  # 6: a group that two ranks share
        parts = [training_specs(5, 7, rows[p.start : p.stop], p, 4, mixture) for p in (range(cut), range(cut, 16))]
        assert parts[0] + parts[1] == whole
    names = [spec.environment for spec in whole]
    assert all(len(set(names[group : group + 4])) == 1 for group in range(0, 16, 4)) and set(names) == {"low", "high"}
    assert len({tuple(mixture.draw(seed, n)) for seed in (5, 6) for n in range(8)}) > 1
    alone = training_specs(5, 7, rows, range(16), 4)
    assert [(s.seed, s.stream) for s in whole] == [(s.seed, s.stream) for s in alone]


def test_an_evaluation_plays_of_each_what_it_would_play_alone():
    mixture = Mixture(("low", "high", "other"), 4)
    whole = evaluation_episodes(3, 8, None, mixture)
    for name, count in (("low", 3), ("high", 3), ("other", 2)):
        played = [(s.seed, s.stream) for s in whole if s.environment == name]
        assert played == [(s.seed, s.stream) for s in evaluation_episodes(3, count)]
    rows = [{"environment": "high", "n": 1}, {"environment": "low", "n": 2}]
    told = evaluation_episodes(3, 3, rows, mixture)
    assert [(s.environment, s.options) for s in told] == [("high", {"n": 1}), ("low", {"n": 2}), ("high", {"n": 1})]
    with pytest.raises(ValueError, match=r"num_eval_episodes=2 .* 3"):
        evaluation_episodes(3, 2, None, mixture)


# ------------------------------------------------------------------------------------------------------------ learning


def test_each_environment_is_learned_within_its_limits_and_reported_apart(words, tmp_path):
    """By GRPO here; by REINFORCE and PPO, on two processes, in ``tests/launch/test_mixed.py``."""
    trainer = make(words, tmp_path, "grpo", max_steps=32)
    assert trainer.args.max_completion_length == 3 and trainer.engine.pool.factories.keys() == BOTH.keys()
    trainer.train()
    log, records = trainer.state.log_history[:-1], generations(tmp_path)
    for name, best in (("low", 1.0), ("high", 3.0)):
        course = [row[f"environments/{name}/return/mean"] for row in log]
        assert course[0] < 0.1 * best and fmean(course[-3:]) > 0.7 * best, (name, [round(c, 2) for c in course])
    by_step = [[r for r in records if r["step"] == step] for step in range(len(log))]
    for row, played in zip(log, by_step, strict=True):
        size = trainer.num_generations
        groups = [played[first : first + size] for first in range(0, len(played), size)]
        assert all(len({r["environment"] for r in group}) == 1 for group in groups), "groups never mix"
        for name, limits in LIMITS.items():
            own = [r for r in played if r["environment"] == name]
            assert {r["prompt"][0]["content"] for r in own} == {BOTH[name].word}
            assert {len(r["turns"]) for r in own} == {limits["max_turns"]}
            lengths = [r["turn_ids"].count(k) for r in own for k in range(limits["max_turns"])]
            assert max(lengths) == limits["max_new_tokens"]
            returns = [r["return"] for r in own]
            assert row[f"environments/{name}/return/mean"] == pytest.approx(fmean(returns))
            assert row[f"environments/{name}/reward"] == pytest.approx(fmean(returns))
            assert row[f"environments/{name}/success"] == pytest.approx(fmean(r["success"] for r in own))
            assert row[f"environments/{name}/turns/max"] == limits["max_turns"]
            assert row[f"environments/{name}/share"] == len(own) / len(played) == 0.5
        assert row["return/mean"] == pytest.approx(fmean(r["return"] for r in played))


def test_a_killed_run_goes_on_with_the_same_environments(words, tmp_path):
    """Bit for bit, inside a generation batch too."""
    changes = {"max_steps": 4, "per_device_train_batch_size": 8, "steps_per_generation": 2, "num_generations": 2,
               "entropy_coef": 0.0}  # fmt: skip
    whole = make(words, tmp_path / "whole", "grpo", **changes)
    whole.train()
    for stop in (1, 3):
        killed = make(words, tmp_path / "run", "grpo", callbacks=[KillBefore(stop)], **SAVING, **changes)
        with pytest.raises(Killed):
            killed.train(resume_from_checkpoint=stop > 1 or None)
    resumed = make(words, tmp_path / "run", "grpo", **changes)
    resumed.train(resume_from_checkpoint=True)
    assert_same(weights(resumed), weights(whole))
    one, two = (
        [(r["environment"], r["completion_ids"]) for r in generations(tmp_path / run)] for run in ("whole", "run")
    )
    assert len(one) == 32 and {name for name, _ in one} == BOTH.keys()
    assert all(record in one for record in two)
    record = read_json(tmp_path / "run" / "checkpoint-3" / RECORD)
    assert record["environment"] == "low=Low, high=High" and record["environment_arguments"] == {}
    assert record["options"]["environment_limits"] == LIMITS
    other = make(words, tmp_path / "run", "grpo", environment={"low": Low, "high": Low}, **changes)
    with pytest.raises(CheckpointError, match=r"'low=Low, high=High'.*'low=Low, high=Low'"):
        other.train(resume_from_checkpoint=True)


def test_evaluation_reports_each_environment(words, tmp_path):
    """What it says of one is what that one says alone."""
    both = make(words, tmp_path / "both", "grpo", max_steps=1)
    metrics = both.evaluate(num_episodes=9)
    assert metrics["eval_episodes"] == 9 and (metrics["eval_low_episodes"], metrics["eval_high_episodes"]) == (5, 4)
    total = 5 * metrics["eval_low_return"] + 4 * metrics["eval_high_return"]
    assert metrics["eval_return"] == pytest.approx(total / 9)
    limits = LIMITS["high"]
    alone = make(words, tmp_path / "alone", "grpo", environment=High, max_steps=1, environment_limits=None, **limits)
    expected = alone.evaluate(num_episodes=4)
    timed = {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}
    of_the_run = {"epoch", "eval_num_tokens", "eval_reward_std", "eval_reward_sem"}
    compared = {name for name in expected.keys() - timed - of_the_run if "rewards/" not in name}
    assert len(compared) > 20
    for name in compared:
        assert metrics[name.replace("eval_", "eval_high_")] == expected[name], name


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_said_of_a_batch_names_the_environment(embedded_model, tmp_path, caplog, fails):
    """A group that starts apart, an episode that fails (which silences the rest), and the card's table."""

    class Wrong(Low):
        started = 0

        def reset(self, seed=None, options=None):
            Wrong.started += 1
            return f"start {Wrong.started}", {}

        def step(self, action):
            if fails and Wrong.started > 3:
                raise RuntimeError("gone")
            return super().step(action)

    trainer = make_trainer(
        embedded_model, tmp_path, environment={"low": Low, "wrong": Wrong}, eval_strategy="steps", eval_steps=1,
        num_eval_episodes=4, save_strategy="steps", save_steps=1,
    )  # fmt: skip
    with caplog.at_level("WARNING"):
        trainer.train()
    warnings = [record.message for record in caplog.records]
    apart = [text for text in warnings if "1 of 2 groups did not start" in text]
    failed = [text for text in warnings if "failed in" in text and "wrong: RuntimeError: gone" in text]
    assert bool(apart) is not fails and bool(failed) is fails
    assert all("the environment wrong said 'user: start" in text for text in apart)
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert "on the environment `low=Low, wrong=" in card
    header, _, row = card.partition("## Evaluation")[2].strip().splitlines()[:3]
    assert header.endswith("| episodes | return of low | return of wrong |")
    assert row.split("|")[-3].strip().startswith("0.000 ± 0.000")


# ---------------------------------------------------------------------------------------------------------------- rows


def test_rows_choose_the_environment(embedded_model, tmp_path):
    """``reset`` does not get the column, as in TRL; reward functions do."""
    seen: dict[str, list[Any]] = {"low": [], "high": []}

    class Seeing(Low):
        def __init__(self, name: str):
            self.name = name

        def reset(self, seed=None, options=None):
            seen[self.name].append(options)
            return super().reset(seed, options)

    def bonus(completions, environment, **_):
        return [1.0 if name == "low" else None for name in environment]

    rows = Dataset.from_dict({"environment": ["high", "low", "high"], "n": [1, 2, 3]})
    trainer = make_trainer(
        embedded_model, tmp_path, environment={name: partial(Seeing, name) for name in seen}, train_dataset=rows,
        eval_dataset=rows, reward_funcs=bonus, per_device_train_batch_size=4, num_generations=2, max_steps=3,
    )  # fmt: skip
    trainer.train()
    expected = {"low": {2}, "high": {1, 3}}
    for name, numbers in expected.items():
        assert all(set(row) == {"n"} and row["n"] in numbers for row in seen[name]), seen
    records = generations(tmp_path)
    assert len(records) == 12
    for row in trainer.state.log_history[:-1]:
        for name, extra in (("low", 1.0), ("high", 0.0)):
            if f"environments/{name}/reward" in row:
                assert row[f"environments/{name}/reward"] == row[f"environments/{name}/return/mean"] + extra
    metrics = trainer.evaluate(num_episodes=6)
    assert (metrics["eval_low_episodes"], metrics["eval_high_episodes"]) == (2, 4)


def test_reward_functions_get_the_drawn_environment(embedded_model, tmp_path):
    named = []

    def bonus(completions, environment, **_):
        named.extend(environment)
        return [0.0] * len(completions)

    make_trainer(embedded_model, tmp_path, environment=BOTH, reward_funcs=bonus).train()
    assert named == [r["environment"] for r in generations(tmp_path)] and set(named) == BOTH.keys()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"n": 1}] * 2, "no column 'environment'"),
        ([{"environment": name} for name in ("low", "high", "hgih")], "'hgih'.*low, high"),
        ([{"environment": "low"}, {"environment": None}], "None.*low, high"),
        ([{"environment": "low"}] * 2, "train_dataset.*'high'"),
    ],
)
def test_rows_that_choose_nothing_are_refused(embedded_model, tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(embedded_model, tmp_path, environment=BOTH, train_dataset=Dataset.from_list(rows))


def test_rows_to_evaluate_on_are_checked_too(embedded_model, tmp_path):
    wrong = {
        "first": Dataset.from_list([{"environment": "low"}]),
        "second": Dataset.from_list([{"environment": "hgih"}]),
    }
    with pytest.raises(ValueError, match=r"eval_dataset\['second'\].*'hgih'"):
        make_trainer(embedded_model, tmp_path, environment=BOTH, eval_dataset=wrong)


def test_evaluations_that_leave_one_out_are_refused(embedded_model, tmp_path):
    with pytest.raises(ValueError, match="num_eval_episodes=1 leaves some of the 2 environments"):
        make_trainer(
            embedded_model, tmp_path, environment=BOTH, eval_strategy="steps", eval_steps=1, num_eval_episodes=1
        )


def test_columns_that_would_be_removed_are_not_looked_for(embedded_model, tmp_path):
    rows = Dataset.from_list([{"environment": name, "prompt": "?"} for name in BOTH])
    with pytest.raises(ValueError, match=r"remove_unused_columns=True.*'environment'"):
        make_trainer(embedded_model, tmp_path, environment=BOTH, train_dataset=rows, remove_unused_columns=True)


def test_a_stream_chooses_too(embedded_model, tmp_path):
    rows = Dataset.from_list([{"environment": name} for name in ("high", "low") * 4])
    trainer = make_trainer(
        embedded_model, tmp_path, environment=BOTH, train_dataset=rows.to_iterable_dataset(), max_steps=2
    )
    trainer.train()
    assert [r["environment"] for r in generations(tmp_path)] == (["high"] * 4 + ["low"] * 4) * 2


# ------------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment_limits": {"low": {"turns": 3}}}, r"environment_limits\['low'\].*'turns'.*max_turns"),
        ({"environment_limits": {"low": {"max_turns": 0}}}, "max_turns.* 0"),
        ({"environment_limits": {"low": {"max_turns": True}}}, "max_turns must be a whole number"),
        ({"environment_limits": {"low": 3}}, r"environment_limits\['low'\].*mapping.* 3"),
        ({"environment_limits": "low"}, "environment_limits.*mapping.*'low'"),
        ({"environment_limits": {"low": {"max_new_tokens": 2}}, "min_new_tokens": 3}, "less than min_new_tokens=3"),
        (
            {"environment_limits": {"low": {"max_model_length": 9}}, "max_model_length": 8},
            "max_model_length=9 is more than max_model_length=8",
        ),
    ],
)
def test_options_that_cannot_be_are_refused_by_the_configuration(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "names", "message"),
    [
        (
            {"environment_limits": {"lwo": {"max_turns": 1}}},
            ["low"],
            "names 'lwo', which is none of the environments: 'low'",
        ),
        ({"environment_limits": LIMITS, "max_turns": 5}, [*LIMITS], "max_turns=5 has no effect"),
        ({"environment_limits": LIMITS, "max_completion_length": 9}, [*LIMITS], "= 3 of the longest"),
    ],
)
def test_options_are_for_the_environments_there_are(tmp_path, changes, names, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **changes).with_environment(names)


def test_the_longest_environment_sizes_the_completion(tmp_path):
    """That of `low` is 2, of `high` 3; another one has the limits that hold for all."""
    assert config(tmp_path, environment_limits=LIMITS).with_environment([*LIMITS]).max_completion_length == 3
    args = config(tmp_path, environment_limits=LIMITS, max_turns=5, max_new_tokens=7).with_environment(
        [*LIMITS, "other"]
    )
    assert args.max_completion_length == 35 and args.with_environment([*LIMITS, "other"]) == args
    assert (args.for_environment("other").max_turns, args.for_environment("low").max_turns) == (5, 1)


def test_limits_of_the_conversation_are_each_environments_own(embedded_model, tmp_path):
    limits = {"low": {"max_model_length": 60, "max_observation_length": 4}, "high": {"max_turns": 2}}
    trainer = make_trainer(embedded_model, tmp_path, environment=BOTH, environment_limits=limits, max_model_length=90)
    engine = trainer.engine
    assert (engine.limits_of("low").max_model_length, engine.limits_of("high").max_model_length) == (60, 90)
    assert engine.first_prompt("right wrong", "low") != engine.first_prompt("right wrong", "high")
    with pytest.raises(ValueError, match=r"first prompt of the environment 'high' has .* max_model_length=3"):
        make_trainer(embedded_model, tmp_path, environment=BOTH, environment_limits={"high": {"max_model_length": 3}})


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "environment is an empty mapping"),
        ({"lo w": Low}, "the name 'lo w' becomes part"),
        ({1: Low}, "the name 1 becomes part"),
        ({"low": Low, "high": "agile:gess_number"}, "'high'.*'agile:gess_number'"),
        ({"low": Low, "high": lambda: object()}, r"high \(object\) cannot be played"),
    ],
)
def test_environments_that_cannot_be_are_refused(embedded_model, tmp_path, environment, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(embedded_model, tmp_path, environment=environment)


def test_several_environments_are_described():
    assert describe_environment({"easy": "agile:guess_number", "low": partial(Low, 1)}) == {
        "environment": "easy=agile:guess_number, low=Low",
        "environment_arguments": {"easy": {}, "low": {"0": 1}},
    }


# ------------------------------------------------------------------------------------------------------------- credit


def test_returns_are_normalized_within_each_environment():
    """Bits of the rows alone; a set of one value and one of equal values are zero-advantage groups."""
    returns = torch.tensor([[1.0, 2.0], [100.0, 300.0], [4.0, 0.0], [500.0, 0.0], [7.0, 0.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 0], [1, 0], [1, 0]]) > 0
    sets = torch.tensor([3, 9, 3, 9, 5])
    found = whiten_each(returns, mask, None, sets)
    for one in (3, 9):
        rows = sets == one
        assert torch.equal(found[rows], whiten(returns[rows], mask[rows]))
    assert not found[4].any()
    assert torch.equal(whiten_each(returns, mask, None, torch.zeros(5)), whiten(returns, mask))
