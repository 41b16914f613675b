"""Summaries and paired comparisons: of episodes written by hand, and of an adapter against itself."""

from __future__ import annotations

import copy
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import LoraConfig, get_peft_model
from PIL import Image as PIL
from transformers import AutoModelForCausalLM

from agile_trainers.evaluation import (
    EpisodeOptions,
    EpisodeResults,
    Estimate,
    compare_policies,
    evaluate_policy,
    summarize_policy,
)
from agile_trainers.evaluation.results import reported_together, start_of_episode
from agile_trainers.evaluation.statistics import (
    difference_test,
    mcnemar_p_value,
    mean_test,
    newcombe_interval,
    wilson_interval,
)
from agile_trainers.monitor.reporting import task_of
from agile_trainers.records.plain import content_digest
from agile_trainers.rollout.metrics import differing_groups, episode_metrics, start_of
from agile_trainers.step.successes import _told
from agile_trainers.types import Image, Picture, StopReason, Trajectory, Turn

FAILED = StopReason.ENVIRONMENT_ERROR


def episode(
    seed: int, reward: float, success: bool | None, reason: StopReason = StopReason.TERMINATED, **row: Any
) -> Any:
    turn = Turn(0, 2, "a", "stop", reward, "", {} if success is None else {"success": success})
    game = row.pop("game", seed % 3)
    played = [2, 3 + game]
    return Trajectory([1], played, [0.0, 0.0], [turn], reason, [], {"secret": game}, seed, options=row or None)


def results(episodes: list[Trajectory], greedy: bool = False) -> EpisodeResults:
    rows, starts = [episode_metrics(one) for one in episodes], [start_of_episode(one) for one in episodes]
    return EpisodeResults([], episodes, list(range(len(episodes))), rows, starts, greedy)


def outcomes(text: str, greedy: bool = False) -> EpisodeResults:
    """One episode a letter: w(on), l(ost), f(ailed), or . without success."""
    kinds = {"w": (1.0, True), "l": (0.0, False), "f": (0.0, None, FAILED), ".": (0.5, None)}
    return results([episode(seed, *kinds[one]) for seed, one in enumerate(text)], greedy)


def test_a_summary_by_hand() -> None:
    summary = summarize_policy(outcomes("wwlwf"))
    assert summary.success == Estimate(0.6, *wilson_interval(3, 5), 5), "a failed episode counts against the policy"
    assert summary.episode_return == summary.success, "returns that equal the success are between 0 and 1"
    assert (summary.episodes, summary.failed, summary.units, summary.unreported) == (5, 1, 5, 0)
    assert (summary.turns, summary.action_tokens) == (1.0, 2.0)
    assert summary.stop_reasons == {"terminated": 4, "environment_error": 1} and summary.pass_at_k == {}
    silent = summarize_policy(outcomes("..f"))
    assert silent.success is None and silent.episode_return is not None
    assert silent.episode_return.value == pytest.approx(1 / 3) and silent.episode_return.low is None
    assert "3 independent episodes are too few" in str(silent.episode_return.refusal)
    failed = summarize_policy(outcomes("ff"))
    assert failed.success is failed.episode_return is failed.turns is None


def test_units_are_rows_or_seeds_and_in_greedy_play_what_was_played() -> None:
    assert summarize_policy(outcomes("w" * 9)).units == 9
    greedy = summarize_policy(outcomes("w" * 9, greedy=True))
    assert greedy.units == 3, "each of three games, again and again"
    repeated = results([episode(seed, 1.0, True, question=seed % 2) for seed in range(8)])
    assert summarize_policy(repeated).units == 2
    assert greedy.success == Estimate(1.0, *mean_test([1.0] * 9, [0, 1, 2] * 3, (0, 1)).interval, 9)
    assert greedy.success.low == pytest.approx(0.05 ** (1 / 3), abs=0.01), "three games, not nine"


def test_information_of_reset_makes_no_other_game() -> None:
    """A seed, an id or the time in it: 12 games of 500 episodes are 12 units, and a difference in one shows nothing."""
    games = [seed % 12 for seed in range(500)]
    sides = []
    for won in ({0, 1, 2}, {0, 1}):
        played = [episode(seed, float(game in won), game in won, game=game) for seed, game in enumerate(games)]
        for seed, one in enumerate(played):
            one.reset_info = {"seed": seed, "time": 1e9 + seed}
        sides.append(results(played, greedy=True))
    summary = summarize_policy(sides[0])
    assert (summary.units, summary.information_differs) == (12, True)
    (found,) = compare_policies(*sides)
    assert (found.units, found.verdict) == (12, "no difference shown") and found.p_value > 0.3
    for start in (one.reset_info for side in sides for one in side.trajectories):
        start.clear()
    assert not summarize_policy(results(sides[0].trajectories, greedy=True)).information_differs


def test_different_rewards_after_the_same_words_are_hidden_chance() -> None:
    """Then each seed is a draw of its own; where the rewards agree, the game is one."""
    coin = [replace(episode(seed, float(seed % 2), None), completion_ids=[9, 9]) for seed in range(20)]
    certain = [replace(episode(seed, 1.0, None), completion_ids=[8, 8]) for seed in range(20, 30)]
    assert summarize_policy(results(coin + certain, greedy=True)).units == 20 + 1
    ended = [replace(one, stop_reason=FAILED if seed else one.stop_reason) for seed, one in enumerate(certain)]
    assert summarize_policy(results(ended, greedy=True)).units == 10, "one that fails now and then is not the same"
    turns = [replace(episode(seed, 0.0, None), completion_ids=[9, 9]) for seed in range(4)]
    for seed, one in enumerate(turns):
        first, second = Turn(0, 1, "a", "stop", seed % 2), Turn(1, 2, "a", "stop", 1 - seed % 2)
        one.turns[:] = [first, second]
    assert summarize_policy(results(turns, greedy=True)).units == 4, "equal returns, but not equal rewards"


def test_success_that_only_winners_report() -> None:
    """Without a word an episode did not succeed, if another episode of any policy says so."""
    winners = results([episode(seed, 1.0, True if won else None) for seed, won in enumerate([1] * 25 + [0] * 15)])
    rarer = results([episode(seed, 1.0, True if won else None) for seed, won in enumerate([1] * 18 + [0] * 22)])
    never = results([episode(seed, 1.0, None) for seed in range(40)])
    summary = summarize_policy(winners)
    assert summary.success == Estimate(0.625, *wilson_interval(25, 40), 40) and summary.unreported == 15
    found = compare_policies(winners, rarer, never)
    assert [(one.measure, one.first, one.second, one.episodes) for one in found] == [
        ("success", 0.625, 0.45, 40),
        ("success", 0.625, 0.0, 40),
    ]
    assert summarize_policy(never).success is None
    (together,) = reported_together([never, winners])[:1]
    assert summarize_policy(together).success.value == 0.0
    (broken, _) = reported_together([outcomes("f" * 40), winners])
    assert summarize_policy(broken).success.value == 0.0, "failed ones are unsuccessful too"
    with pytest.raises(ValueError, match="measure='success'"):
        compare_policies(never, never, measure="success")


def test_failed_episodes_forbid_a_verdict() -> None:
    """The environment does ``int(answer)``: 6.5 % of one policy's episodes are left, and win."""
    untrained = outcomes("w" * 10 + "l" * 3 + "f" * 187)
    trained = outcomes("wl" * 100)
    (found,) = compare_policies(untrained, trained)
    assert found.verdict == "no verdict" and "187 of 200 pairs have no value" in str(found.refusal)
    assert (found.episodes, found.left_out) == (13, 187)
    assert found.bounds == pytest.approx((10 / 200 - 0.5, 197 / 200 - 0.5))
    sentence = found.sentence("untrained", "sft")
    assert sentence.startswith("No verdict on untrained and sft: 187 of 200 pairs have no value")
    assert "In the 13 pairs of episodes that are left, success is 76.9% against 53.8%." in sentence
    assert "between -45.0 points (failed episodes of the first policy lost" in sentence and "+48.5 points" in sentence
    assert found.to_dict()["refusal"] == found.refusal
    (none_left,) = compare_policies(outcomes("f" * 9), trained_few := outcomes("w" * 9))
    assert none_left.verdict == "no verdict" and none_left.bounds == pytest.approx((-1.0, 0.0))
    assert "No pair is left." in none_left.sentence("a", "b")
    few = compare_policies(outcomes("w" * 39 + "f"), outcomes("l" * 40))[0]
    assert few.verdict == "no verdict", "2.5 points apart"
    assert compare_policies(outcomes("w" * 59 + "f"), outcomes("l" * 60))[0].verdict == "better"
    assert compare_policies(trained_few, trained_few)[0].bounds is None


def test_the_bounds_of_returns_are_those_that_the_environment_declares() -> None:
    ours = replace(results([episode(seed, 0.5, None) for seed in range(10)]), ranges={})
    theirs = results([episode(seed, 0.5, None, *([FAILED] if seed < 5 else [])) for seed in range(10)])
    (unknown,) = compare_policies(ours, theirs)
    assert unknown.bounds is None and "declares no return_range" in unknown.sentence("a", "b")
    declared = [replace(one, ranges={None: (-1.0, 3.0)}) for one in (ours, theirs)]
    (found,) = compare_policies(*declared)
    assert found.bounds == pytest.approx((0.5 - (0.25 + 1.5), 0.5 - (0.25 - 0.5)))
    assert "-1.250" in found.sentence("a", "b") and "+0.750" in found.sentence("a", "b")
    summary = summarize_policy(declared[1])
    assert summary.episode_return is not None and summary.episode_return.value == pytest.approx(0.25 - 0.5)


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
    ours, theirs = outcomes("wwwwwwwwlwl"), outcomes("lllllllwwwl")
    (found,) = compare_policies(ours, theirs)
    assert (found.measure, found.episodes, found.units, found.left_out) == ("success", 11, 11, 0)
    assert found.p_value == found.adjusted_p_value == mcnemar_p_value(7, 1)
    assert (found.first, found.second, found.difference) == pytest.approx((9 / 11, 3 / 11, 6 / 11))
    low, high = newcombe_interval(2, 7, 1, 1)
    assert low > 0 and (found.low, found.high) == (0, high), "the interval agrees with the test"
    assert found.verdict == "no difference shown" and found.test == "exact McNemar test"
    sentence = found.sentence("ours", "theirs")
    assert "No difference shown between ours and theirs: success 81.8% against 27.3%" in sentence
    assert "+54.5 points" in sentence and "p = 0.07" in sentence


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
    assert few.verdict == "no verdict" and few.low is few.p_value is few.adjusted_p_value is None
    sentence = (
        "No verdict on a and b: 5 independent pairs of episodes cannot show any difference; at least 6 are needed. "
    )
    assert few.sentence("a", "b") == sentence + "In 5 pairs of episodes, success is 100.0% against 0.0%."
    assert "With 7 different starts and 4 comparisons no difference can be shown" in several[0].sentence("a", "b")
    assert [one.p_value for one in compare_policies(outcomes("w" * 20), outcomes("w" * 20))] == [1.0]
    mixed = compare_policies(ours, theirs, replace(theirs, greedy=True))
    assert [one.adjusted_p_value for one in mixed] == [4 / 128, None], "one without a verdict counts for the correction"


def test_repeats_of_a_starting_state_are_one_unit_where_a_policy_plays_greedily() -> None:
    ours, theirs = outcomes("wwl" * 30), outcomes("wll" * 30)
    assert compare_policies(ours, theirs)[0].verdict == "better"
    for first, second in ((True, True), (True, False), (False, True)):
        (found,) = compare_policies(replace(ours, greedy=first), replace(theirs, greedy=second))
        assert (found.units, found.verdict, found.test) == (3, "no verdict", "paired test of the mean")
        assert "3 independent pairs" in str(found.refusal)
        assert (found.episodes, found.difference) == (90, pytest.approx(1 / 3))


def test_returns_are_compared_where_success_is_not_reported() -> None:
    ours = results([episode(seed, seed / 10, None) for seed in range(30)])
    theirs = results([episode(seed, seed / 20, None) for seed in range(30)])
    (unknown,) = compare_policies(ours, theirs)
    assert (unknown.measure, unknown.verdict) == ("return", "no verdict") and "return_range" in str(unknown.refusal)
    assert unknown.sentence("a", "b").endswith("In 30 pairs of episodes, return is 1.450 against 0.725.")
    ours, theirs = (replace(one, ranges={None: (0.0, 3.0)}) for one in (ours, theirs))
    (found,) = compare_policies(ours, theirs)
    assert found.verdict == "better" and found.test == "paired test of the mean"
    expected = mean_test([seed / 20 for seed in range(30)], None, (-3, 3))
    assert (found.low, found.high, found.p_value) == (*expected.interval, expected.p_value) and expected.p_value < 0.02
    assert "return 1.450 against 0.725, +0.725" in found.sentence("a", "b")
    assert compare_policies(outcomes("wl"), outcomes("ww"), measure="return")[0].measure == "return"
    contradicted = replace(ours, ranges={None: (0.0, 2.0)})
    assert contradicted.limits("return") is None, "an episode returned 2.9"


def test_a_declared_range_is_used_where_returns_equal_the_success() -> None:
    """The environment pays -1 for the wrong form, which neither the better policy nor ten lost episodes have."""
    declared: dict[str | None, Any] = {None: (-1.0, 1.0)}
    half = replace(outcomes("wf" * 50), ranges=declared)
    summary = summarize_policy(half)
    assert summary.episode_return is not None and summary.episode_return.value == half.metrics["return"] == 0.0
    lost = summarize_policy(replace(outcomes("l" * 10), ranges=declared)).episode_return
    assert lost == Estimate(0.0, *mean_test([0.0] * 10, None, (-1, 1)).interval, 10)
    ours = outcomes("w" * 96 + "l" * 24)
    worse = [*outcomes("w" * 48).trajectories, *(episode(seed, -1.0, False) for seed in range(48, 120))]
    ours, theirs = (replace(one, ranges=declared) for one in (ours, results(worse)))
    (found,) = compare_policies(ours, theirs, measure="return")
    assert (found.verdict, found.test) == ("better", "paired test of the mean")
    beyond = [replace(one, ranges={None: (-0.5, 1.0)}) for one in (ours, theirs)]
    assert beyond[0].limits("return") == (-0.5, 1.0) and beyond[0].limits("return", beyond[1]) is None
    assert compare_policies(*beyond, measure="return")[0].verdict == "no verdict", "the other policy returns -1"


def test_an_environment_of_several_may_declare_no_range() -> None:
    rows = [{**row, "environment": "ab"[n % 2]} for n, row in enumerate(outcomes("wl" * 4 + "f").rows)]
    played = replace(outcomes("wl" * 4 + "f"), rows=rows, ranges={"a": (-3.0, 3.0)})
    assert played.limits("return") == (-3.0, 3.0)
    assert replace(played, rows=[*rows, {**rows[1], "return": 0.5}]).limits("return") is None


def test_a_summary_of_many_episodes_takes_no_time() -> None:
    """Success is read once; read for each episode, these take a minute."""
    begin = time.process_time()
    assert summarize_policy(outcomes("wl" * 5_000)).success.value == 0.5
    assert time.process_time() - begin < 5


def test_both_measures_are_said_when_they_disagree() -> None:
    """One policy succeeds more often, but is slower by more than that is worth."""
    ours = results([episode(seed, 0.3, seed % 4 > 0) for seed in range(40)])
    theirs = results([episode(seed, 0.9 if seed % 4 == 1 else 0.5, seed % 4 == 1) for seed in range(40)])
    ours, theirs = (replace(one, ranges={None: (0.0, 1.0)}) for one in (ours, theirs))
    (found,) = compare_policies(ours, theirs)
    assert found.other is not None and (found.verdict, found.other.verdict) == ("better", "worse")
    assert "By the return it is not the same: a is worse than b: return 0.300" in found.sentence("a", "b")
    assert found.to_dict()["other"]["verdict"] == "worse"
    (turned,) = compare_policies(ours, theirs, measure="return")
    assert (turned.measure, turned.verdict) == ("return", "worse")
    assert "By the success it is not the same: a is better than b" in turned.sentence("a", "b")
    several = compare_policies(ours, theirs, theirs)
    assert [one.other.adjusted_p_value for one in several if one.other] == [2 * (found.other.p_value or 0)] * 2
    assert "By the" not in compare_policies(outcomes("w" * 9), outcomes("l" * 9))[0].sentence("a", "b")


def test_policies_that_played_other_episodes_are_not_compared() -> None:
    with pytest.raises(ValueError, match=r"3 and 2, different from number 2"):
        compare_policies(outcomes("www"), outcomes("ww"))


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
    """300 comparisons of 120 episodes each, resampled from recorded ones, with sampling noise of each side's own."""
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
    for _ in range(300):
        states = rng.integers(6, size=120)
        ours, theirs = (pool[states, rng.integers(120, size=120)] for _ in range(2))
        for place, units in enumerate((None, states.tolist())):
            different[place] += difference_test(ours, theirs, units, (0, 1)).p_value <= 0.05
    assert max(different) <= 24, different


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
    assert [one.key for one in other.starts] == [one.key for one in once.starts]
    assert answers(other) != answers(once) != answers(play(sampling_seed=1))
    assert answers(play(sampling_seed=0)) == answers(other) and summarize_policy(thrice).pass_at_k.keys() == {1, 2, 3}
    ended: list[Trajectory] = []
    greedy = play(greedy=True, on_finish=ended.append)
    assert greedy.greedy and not once.greedy and len(ended) == 4
    for wrong in ({"attempts": 0}, {"attempts": 2, "greedy": True}):
        with pytest.raises(ValueError, match="attempts"):
            play(**wrong)


def test_starts_with_different_images_differ() -> None:
    """Whose placeholders are the same tokens: for panels, for what is the same game, and within a group."""

    def seen(data: bytes) -> Trajectory:
        image = Image(data)
        picture = Picture(-1 - int(image.digest[:8], 16), "<i>", 9, 2, {})
        prompt = [{"role": "user", "content": [{"type": "image", "image": image}]}]
        return replace(episode(5, 1.0, True), prompt_ids=[1, 9, 9], prompt=prompt, pictures=[[picture]])

    red, blue = seen(b"red"), seen(b"blue")
    assert start_of_episode(red) == start_of_episode(seen(b"red"))
    first, second = start_of_episode(red), start_of_episode(blue)
    assert first.prompt != second.prompt and first.played != second.played
    assert content_digest(red.prompt, 0) != content_digest(blue.prompt, 0) == content_digest(seen(b"blue").prompt, 0)
    assert differing_groups([start_of(one) for one in (red, red, red, blue)], 2) == [1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.zeros(2000), np.eye(1, 2000, 1000)[0]), (np.array([0.1]), np.array([0.1 + 1e-15])),
        (np.array([[1], [2, 3]], object), np.array([[1], [2, 4]], object)), ({"a", "b", "c"}, {"a", "b", "d"}),
        ([0] * 12_000, [0] * 11_999 + [1]), (b"x" * 20_001, b"x" * 20_000 + b"y"),
        (PIL.new("RGB", (2, 2)), PIL.new("RGB", (2, 2), "red")),
    ],
    ids=["long array", "close numbers", "objects", "sets", "long list", "bytes", "images"],
)  # fmt: skip
def test_different_rows_are_different_starts(one: Any, other: Any) -> None:
    """For what counts as the same game, for successes that are kept of a row, and for the number of tasks."""

    def of(row: Any) -> list[Any]:
        played = replace(episode(5, 1.0, True), options={"row": row}, prompt=[{"role": "user", "content": "?"}])
        return [start_of_episode(played).row, _told(played, 1.0).start, task_of(played)]

    for same, differ in zip(of(one), of(other), strict=True):
        assert same != differ
    assert of(one) == of(copy.deepcopy(one))


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
    assert len({one.seed for one in starts}) == 1 and all(len(one.information) == 32 for one in starts)
    again = episode(5, 1.0, True)
    again.reset_info = {"at": object()}
    assert start_of_episode(again) == starts[-1], "addresses in memory are no part of a state"
