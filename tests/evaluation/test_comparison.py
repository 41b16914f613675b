"""Summaries and paired comparisons: of episodes written by hand, and of an adapter against itself."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from agile_trainers.evaluation import (
    EpisodeOptions,
    EpisodeResults,
    Estimate,
    compare_policies,
    evaluate_policy,
    summarize_policy,
)
from agile_trainers.evaluation.results import start_of_episode
from agile_trainers.evaluation.statistics import bootstrap_interval, mcnemar_p_value, sign_flip_p_value, wilson_interval
from agile_trainers.rollout.metrics import episode_row
from agile_trainers.types import StopReason, Trajectory, Turn

FAILED = StopReason.ENVIRONMENT_ERROR


def episode(
    seed: int, reward: float, success: bool | None, reason: StopReason = StopReason.TERMINATED, **row: Any
) -> Any:
    turn = Turn(0, 2, "a", "stop", reward, "", {} if success is None else {"success": success})
    state = {"secret": seed % 3}
    return Trajectory([1], [2, 3], [0.0, 0.0], [turn], reason, [], state, seed, options=row or None)


def results(episodes: list[Trajectory], greedy: bool = False) -> EpisodeResults:
    rows, starts = [episode_row(one) for one in episodes], [start_of_episode(one) for one in episodes]
    return EpisodeResults([], episodes, list(range(len(episodes))), rows, starts, greedy)


def outcomes(text: str, greedy: bool = False) -> EpisodeResults:
    """One episode a letter: w(on), l(ost), f(ailed), or . without success."""
    kinds = {"w": (1.0, True), "l": (0.0, False), "f": (0.0, None, FAILED), ".": (0.5, None)}
    return results([episode(seed, *kinds[one]) for seed, one in enumerate(text)], greedy)


def test_a_summary_by_hand() -> None:
    summary = summarize_policy(outcomes("wwlwf"))
    assert summary.success == Estimate(0.75, *wilson_interval(3, 4), 4)
    assert summary.episode_return == Estimate(0.75, *bootstrap_interval([1, 1, 0, 1]), 4)
    assert (summary.episodes, summary.failed, summary.units, summary.turns, summary.action_tokens) == (
        5,
        1,
        4,
        1.0,
        2.0,
    )
    assert summary.stop_reasons == {"terminated": 4, "environment_error": 1} and summary.pass_at_k == {}
    silent = summarize_policy(outcomes("..f"))
    assert silent.success is None and silent.episode_return is not None and silent.episode_return.value == 0.5
    failed = summarize_policy(outcomes("ff"))
    assert failed.success is failed.episode_return is failed.turns is None


def test_units_are_rows_or_seeds_and_in_greedy_play_starting_states() -> None:
    assert summarize_policy(outcomes("w" * 9)).units == 9
    assert summarize_policy(outcomes("w" * 9, greedy=True)).units == 3, "each of three games, again and again"
    repeated = results([episode(seed, 1.0, True, question=seed % 2) for seed in range(8)])
    assert summarize_policy(repeated).units == 2
    assert summarize_policy(outcomes("w" * 9, greedy=True)).success == Estimate(1.0, *wilson_interval(3, 3), 9)


def test_pass_at_k_over_the_attempts_at_each_start() -> None:
    played = results(
        [
            episode(seed, 0.0, won)
            for seed, won in [(0, True), (0, False), (0, False), (1, False), (1, False), (1, False)]
        ]
    )
    found = summarize_policy(played).pass_at_k
    assert {k: one.value for k, one in found.items()} == pytest.approx({1: 1 / 6, 2: 1 / 3, 3: 1 / 2})
    assert all(one.episodes == 2 for one in found.values())


def test_a_comparison_by_hand() -> None:
    ours, theirs = outcomes("wwwwwwwwlwlf"), outcomes("lllllllwwwlw")
    (found,) = compare_policies(ours, theirs)
    assert (found.measure, found.episodes, found.units, found.left_out) == ("success", 11, 11, 1)
    assert found.p_value == found.adjusted_p_value == mcnemar_p_value(7, 1)
    assert (found.first, found.second, found.difference) == pytest.approx((9 / 11, 3 / 11, 6 / 11))
    differences = [1] * 7 + [0, -1, 0, 0]
    assert (found.low, found.high) == bootstrap_interval(differences)
    assert found.verdict == "no difference shown" and found.test == "exact McNemar test"
    sentence = found.sentence("ours", "theirs")
    assert "No difference shown between ours and theirs: success 81.8% against 27.3%" in sentence
    assert "+54.5 points" in sentence and "p = 0.07" in sentence and "1 pairs have no value" in sentence


def test_better_worse_and_the_correction_for_several() -> None:
    ours, theirs = outcomes("w" * 7), outcomes("l" * 7)
    assert [one.verdict for one in compare_policies(ours, theirs)] == ["better"]
    assert [one.verdict for one in compare_policies(theirs, ours)] == ["worse"]
    several = compare_policies(ours, theirs, theirs, theirs, ours)
    assert [one.adjusted_p_value for one in several] == pytest.approx([4 / 64] * 3 + [1.0])
    assert {one.verdict for one in several} == {"no difference shown"}
    assert "Holm's correction for 4 comparisons" in several[0].sentence("a", "b")
    assert "ours is better than theirs" in compare_policies(ours, theirs)[0].sentence("ours", "theirs")
    few = compare_policies(outcomes("w" * 5), outcomes("l" * 5))[0]
    assert few.verdict == "no difference shown" and "cannot show any difference" in few.sentence("a", "b")


def test_repeats_of_a_starting_state_are_one_unit_where_a_policy_plays_greedily() -> None:
    ours, theirs = outcomes("wwl" * 30), outcomes("wll" * 30)
    assert compare_policies(ours, theirs)[0].verdict == "better"
    for first, second in ((True, True), (True, False), (False, True)):
        (found,) = compare_policies(replace(ours, greedy=first), replace(theirs, greedy=second))
        assert (found.units, found.p_value, found.test) == (3, 1.0, "paired randomization test")
        assert (found.episodes, found.difference) == (90, pytest.approx(1 / 3))


def test_returns_are_compared_where_success_is_not_reported() -> None:
    ours = results([episode(seed, seed / 10, None) for seed in range(30)])
    theirs = results([episode(seed, seed / 20, None) for seed in range(30)])
    (found,) = compare_policies(ours, theirs)
    assert found.measure == "return" and found.verdict == "better"
    assert found.p_value == sign_flip_p_value([seed / 20 for seed in range(30)]) < 0.01
    assert "return 1.450 against 0.725, +0.725" in found.sentence("a", "b")
    assert compare_policies(outcomes("wl"), outcomes("ww"), measure="return")[0].measure == "return"


def test_policies_that_played_other_episodes_are_not_compared() -> None:
    with pytest.raises(ValueError, match=r"3 and 2, different from number 2"):
        compare_policies(outcomes("www"), outcomes("ww"))
    with pytest.raises(ValueError, match="No pair of episodes has a return"):
        compare_policies(outcomes("ff"), outcomes("ww"))


# ------------------------------------------------------------------------------------------------- played by a model


class Draw:
    """A game of one turn with six starting states, each of which is won by its own share of the answers."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.state = (seed or 0) % 6 if options is None else options["state"]
        return "Say a word.", {"state": self.state}

    def step(self, action: str) -> Any:
        won = zlib.crc32(f"{self.state} {action}".encode()) % 100 < 20 + 12 * self.state
        return "", float(won), True, False, {"success": won}


SHORT = EpisodeOptions(max_turns=1, max_new_tokens=3)


def test_an_adapter_against_itself_is_hardly_ever_called_different(embedded_model: Path) -> None:
    """1,000 comparisons of 120 episodes each, resampled from recorded ones, with sampling noise of each side's own."""
    base = AutoModelForCausalLM.from_pretrained(embedded_model)
    adapter = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    played = [
        evaluate_policy(
            adapter, None, Draw, 6, rows=[{"state": one} for one in range(6)], attempts=60, sampling_seed=noise,
            options=SHORT,
        )
        for noise in (0, 1)
    ]  # fmt: skip
    assert played[0].rows != played[1].rows
    pools = [np.array([float(row["success"]) for row in one.rows]).reshape(6, 60) for one in played]
    pool = np.concatenate(pools, axis=1)
    assert 0.1 < pool.mean() < 0.9 and np.ptp(pool.mean(axis=1)) > 0.2
    rng, different = np.random.default_rng(0), np.zeros(2)
    for _ in range(1000):
        states = rng.integers(6, size=120)
        ours, theirs = (pool[states, rng.integers(120, size=120)] for _ in range(2))
        different += [sign_flip_p_value(ours - theirs, units) <= 0.05 for units in (None, states.tolist())]
    assert max(different) <= 70, different


def test_attempts_share_their_start_and_policies_share_all_but_the_noise(embedded_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(embedded_model)

    def play(**options: Any) -> EpisodeResults:
        return evaluate_policy(model, None, Draw, 4, options=SHORT, **options)

    def answers(played: EpisodeResults) -> list[list[int]]:
        return [one.completion_ids for one in played.trajectories]

    once, thrice, other = play(), play(attempts=3), play(sampling_seed=0)
    assert [one.seed for one in thrice.starts] == [one.seed for one in once.starts for _ in range(3)]
    assert answers(thrice)[::3] == answers(once), "the first attempt is the episode of one attempt"
    assert len({tuple(one) for one in answers(thrice)}) > 4
    assert other.starts == once.starts and answers(other) != answers(once) != answers(play(sampling_seed=1))
    assert answers(play(sampling_seed=0)) == answers(other) and summarize_policy(thrice).pass_at_k.keys() == {1, 2, 3}
    ended: list[Trajectory] = []
    greedy = play(greedy=True, on_finish=ended.append)
    assert greedy.greedy and not once.greedy and len(ended) == 4
    for wrong in ({"attempts": 0}, {"attempts": 2, "greedy": True}):
        with pytest.raises(ValueError, match="attempts"):
            play(**wrong)


def test_the_start_of_an_episode_with_information_that_is_no_json() -> None:
    class Hostile:
        def __repr__(self) -> str:
            raise RuntimeError

    looped: dict[str, Any] = {}
    looped["self"] = looped
    starts = []
    for info in ({"a": Hostile()}, looped, {1: "a", "b": 2}, {"at": object()}):
        trajectory = episode(5, 1.0, True)
        trajectory.reset_info = info
        starts.append(start_of_episode(trajectory))
    assert len({one.seed for one in starts}) == 1 and all(len(one.state) == 32 for one in starts)
    again = episode(5, 1.0, True)
    again.reset_info = {"at": object()}
    assert start_of_episode(again) == starts[-1], "addresses in memory are no part of a state"
