"""The table of findings on recorded histories: each planted failure is named once, and nothing in a healthy run."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from diagnosed import HEALTHY, Options

from agile_trainers.evaluation.diagnosis import (
    FAILING,
    HEALTH_CHECKS,
    METRICS,
    QUIET,
    REPEATED,
    Diagnosis,
    MetricHistory,
    findings_before,
)

ZERO = {"advantage/zero": 1.0, "return/std": 0.0, "return/max": 0.0, "return/mean": 0.0}

Planted = Callable[[int], dict[str, float]]


def falling(name: str, to: float, over: int = 20, **others: float) -> Planted:
    """The metric goes straight from its healthy value to another one."""

    def at(step: int) -> dict[str, float]:
        share = min(step / over, 1.0)
        return {name: HEALTHY[name] * (1 - share) + to * share, **others}

    return at


def always(values: dict[str, float]) -> Planted:
    return lambda step: values


PLANTED: dict[str, tuple[list[str], Planted, Options]] = {
    "a healthy run": ([], always({}), Options()),
    "solved": (["solved"], falling("success", 0.97), Options()),
    "solved, and nothing moves any more": (
        ["solved"],
        lambda step: {} if step < 20 else {
            "success": 1.0, "advantage/zero": 1.0, "return/std": 0.0, "return/min": 1.0, "return/mean": 1.0,
            "entropy": 1e-4, "value/spread": 0.0, "value/error": 0.02,
        },
        Options(has_critic=True),
    ),
    "solved from the start, and nothing moves": (
        ["solved"], always({"success": 1.0, "advantage/zero": 1.0, "policy_change": 0.0}), Options(),
    ),
    "every end of an episode is reported as a success": (["success_doubtful"], always({"success": 1.0}), Options()),
    "solved, and seeds make no difference": (["solved"], always({"success": 0.97, "seeds_alike": 1.0}), Options()),
    "all succeed from the start, some in fewer turns": (
        ["solved"], always({"success": 1.0, "return/min": 0.6}), Options(),
    ),
    "all succeed, once the policy has learned it": (
        ["solved"], lambda step: {"success": 0.4 if step < 5 else 1.0}, Options(),
    ),
    "no success": (["too_hard"], always({**ZERO, "success": 0.0}), Options()),
    "no success and no learning": (["too_hard"], always({**ZERO, "success": 0.0, "policy_change": 0.0}), Options()),
    "a constant reward, success unknown": (["zero_advantage_groups"], always({**ZERO, "success": math.nan}), Options()),
    "no advantage at half success": (["zero_advantage_groups"], always({"advantage/zero": 0.97}), Options()),
    "no advantage, and two states of fifty are left": (
        [], lambda step: {"advantage/zero": min(step / 20, 0.97), "success": min(0.4 + step / 20, 0.93)}, Options(),
    ),
    "a constant reward with a critic": (
        ["zero_advantage_groups"], always({**ZERO, "advantage/zero": 0.0, "value/spread": 0.5}), Options(has_critic=True),
    ),
    "some starts are solved, the others not any more": (
        ["starts_lost"], lambda step: {"groups_without_success": 0.6, "advantage/zero": 0.9} if step else {}, Options(),
    ),
    "some starts are learned, all others never succeed": (
        ["starts_lost"],
        lambda step: {"success": min(0.02 + step / 20, 0.5), "groups_without_success": max(0.97 - step / 20, 0.5)},
        Options(),
    ),
    "an environment that ignores the action": (
        ["zero_advantage_groups"],
        lambda step: {
            "success": 0.4 + 0.1 * (-1) ** step, "groups_without_success": 0.6 - 0.1 * (-1) ** step, "advantage/zero": 1.0,
        },
        Options(),
    ),
    "a start is lost where the others are learned": (
        ["starts_lost"],
        lambda step: {"success": min(0.4 + step / 20, 11 / 12), "groups_without_success": max(0.4 - step / 20, 1 / 12)},
        Options(),
    ),
    "groups of one episode": ([], always({"groups_without_success": 0.6}), Options(num_generations=1)),
    "starts are learned one after the other": (
        [], lambda step: {"success": 0.1 + step / 60, "groups_without_success": 0.9 - step / 60}, Options(),
    ),
    "easy from the start": (["too_easy"], always({"success": 0.85}), Options()),
    "entropy falls": (["entropy_collapse"], falling("entropy", 0.05), Options()),
    "entropy falls as the task is almost solved": (
        [], lambda step: {"entropy": max(1 - step / 20, 0.05), "success": min(0.4 + step / 20, 0.85)}, Options(),
    ),
    "no entropy from the start": (["entropy_collapse"], always({"entropy": 0.001}), Options()),
    "entropy falls while the return rises": (
        [], lambda step: {"entropy": max(1 - step / 20, 0.02), "return/mean": 0.01 * step + 0.002 * (step % 2)}, Options(),
    ),
    "answers forget the prompt": (["template_collapse"], falling("prompt_information", 0.05), Options()),
    "answers forget the prompt, entropy too": (
        ["entropy_collapse"], lambda step: {"prompt_information": 0.9 - 0.02 * step, "entropy": max(1 - step / 20, 0.02)},
        Options(),
    ),
    "observations that say nothing": (["prompts_unread"], always({"observations_empty": 1.0}), Options()),
    "observations that say nothing, and need not": (
        [], lambda step: {"observations_empty": 1.0, "success": min(0.4 + 0.2 * step, 0.9)}, Options(),
    ),
    "a last reward that is discounted away": (
        ["reward_discounted"], always({"return/early_std": 0.0}), Options(gamma=0.5),
    ),
    "a last reward that no earlier turn is credited with": (
        ["reward_discounted"], always({"return/early_std": 0.1}), Options(turn_credit="reward"),
    ),
    "turns that are rewarded for themselves": ([], always({}), Options(gamma=0.0)),
    "single turns, discounted": ([], always({"turns/mean": 1.0, "return/early_std": math.nan}), Options(gamma=0.0)),
    "answers that never knew the prompt": (["prompts_unread"], always({"prompt_information": 0.02}), Options()),
    "answers that do not read their prompts yet": ([], always({"prompt_information": 0.0}), Options()),
    "a measurement of few prompts is off now and then": (
        [], lambda step: {"prompt_information": 0.5 if step % 7 == 0 else 0.05}, Options(),
    ),
    "answers that hardly knew the prompt": ([], always({"prompt_information": 0.021}), Options()),
    "answers without the prompt, which still become better": (
        [], lambda step: {"prompt_information": 0.0, "reward": 0.4 + 0.01 * step}, Options(),
    ),
    "cut answers that return less": (["cut_answers"], always({"answers_cut": 0.3}), Options()),
    "cut answers that return as much": ([], always({"answers_cut": 0.3, "return/answers_cut": 0.4}), Options()),
    "one-token answers are cut by design": (
        [], always({"answers_cut": 1.0, "return/answers_cut": 0.4}), Options(max_new_tokens=1),
    ),
    "every long answer is cut": (
        ["cut_answers"], always({"answers_cut": 1.0, "return/answers_cut": 0.4}), Options(max_new_tokens=16),
    ),
    "the context is full": (["context_full"], always({"stop/context_full": 0.15}), Options()),
    "rewritten contexts are too long": (["rewrite_full"], always({"stop/rewrite_full": 0.15}), Options()),
    "rewritten contexts are always too long": (
        ["rewrite_full", "episodes_cut"], always({"stop/rewrite_full": 1.0, "success": 0.0}), Options(),
    ),
    "a window that moves with every turn": (
        ["rewritten_every_turn"], always({"rewrites/context": 0.87, "rewrites/questions": 0.0}), Options(),
    ),
    "a question and a rewrite for every answer": (
        ["rewritten_every_turn"], always({"turns/mean": 8.0, "rewrites/context": 0.4, "rewrites/questions": 0.5}), Options(),
    ),
    "a window as long as most episodes": ([], always({"rewrites/context": 0.4, "rewrites/questions": 0.0}), Options()),
    "episodes of two turns, the second rewritten": (
        [], always({"turns/mean": 2.0, "rewrites/context": 0.5, "rewrites/questions": 0.0}), Options(),
    ),
    "a template that rewrites at every turn, and no history": (
        [], always({"rewrites/template": 0.9, "rewrites/context": 0.0, "rewrites/questions": 0.0}), Options(),
    ),
    "everything is cut and masked": (
        ["episodes_cut"], always({"stop/max_turns": 1.0}), Options(mask_truncated_completions=True),
    ),
    "every answer is cut, by design, and masked": (
        ["cut_answers"], always({"answers_cut": 1.0}), Options(mask_truncated_completions=True, max_new_tokens=4),
    ),
    "everything is cut by the environment and masked": (
        ["episodes_cut"], always({"stop/truncated": 0.9, "stop/max_turns": 0.1}), Options(mask_truncated_completions=True),
    ),
    "every episode runs to its limit and earns on the way": (
        [], always({"stop/max_turns": 1.0, "success": math.nan}), Options(),
    ),
    "every episode is cut and none succeeds": (
        ["episodes_cut"], always({"stop/max_turns": 1.0, "success": 0.0}), Options(),
    ),
    "clipped tokens": (["ratio_clipped"], always({"clip_ratio/region_mean": 0.4}), Options()),
    "clipped tokens of a policy that learns": (
        [], lambda step: {"clip_ratio/region_mean": 0.4, "success": min(0.04 + 0.03 * step, 0.9)}, Options(),
    ),
    "sequences leave a narrow range": (
        [], always({"clip_ratio/region_mean": 0.4}), Options(importance_sampling_level="sequence"),
    ),
    "clipped weights": (["ratio_clipped"], always({"cispo_clip_ratio": 0.4}), Options(loss_type="cispo")),
    "the reference is left behind": (["kl_runaway"], lambda step: {"kl": min(0.1 * step, 2.0)}, Options(beta=0.01)),
    "a distance from the reference that shrinks": ([], lambda step: {"kl": 4 - 0.1 * step}, Options(beta=0.01)),
    "a teacher that is left behind, for worse": (
        ["teacher_left"],
        lambda step: {"teacher/kl": 0.1 + 0.02 * step, "success": 0.4 - 0.01 * step, "reward": 0.4 - 0.01 * step},
        Options(),
    ),
    "a teacher that is left behind, for better": (
        [], lambda step: {"teacher/kl": 0.1 + 0.02 * step, "success": min(0.4 + 0.01 * step, 0.9)}, Options(),
    ),
    "a teacher that is followed, for worse": (
        ["worse_than_start"],
        lambda step: {"teacher/kl": 0.9 - 0.02 * step, "success": 0.4 - 0.01 * step, "reward": 0.4 - 0.01 * step},
        Options(),
    ),
    "an expert that the policy does not follow": (
        ["expert_alone"],
        always({**ZERO, "success": 0.0, "demonstrations/alone": 1.0, "demonstrations/log_prob": -3.0}), Options(),
    ),
    "an expert that the policy comes nearer to": (
        [],
        lambda step: {**ZERO, "success": 0.0, "demonstrations/alone": 1.0, "demonstrations/log_prob": 0.1 * step - 3},
        Options(),
    ),
    "a teacher alone": ([], always(ZERO), Options(rewarded=False)),
    "a judge that is given what it likes": (
        ["judge_overoptimized"],
        lambda step: {"judges/score": 0.4 + 0.01 * step, "judges/held_out": 0.5 - 0.01 * abs(step - 10) + 0.02 * (step % 2)},
        Options(),
    ),
    "judges that agree on a fall": (
        [], lambda step: {"judges/score": 0.9 - 0.01 * step, "judges/held_out": 0.9 - 0.01 * step}, Options(),
    ),
    "judges that agree on a rise": (
        [], lambda step: {"judges/score": 0.3 + 0.01 * step, "judges/held_out": 0.3 + 0.01 * step}, Options(),
    ),
    "a judge that fails at times": ([], always({"judges/failed": 0.05}), Options()),
    "a judge that fails": (["judge_failing"], always({"judges/failed": 0.3}), Options()),
    "a critic that learns nothing": (["value_not_learning"], always({"value/error": 1.0}), Options(has_critic=True)),
    "a critic that says the mean": ([], always({"value/error": 0.5}), Options(has_critic=True)),
    "a critic that catches up": ([], falling("value/error", 0.1, over=15, **{"value/spread": 0.3}),
                                 Options(has_critic=True)),
    "weights that stay": (["no_weight_change"], always({"policy_change": 1e-5}), Options()),
    "an environment that fails at times": (["environment_failing"], always({"stop/environment_error": 0.01}), Options()),
    "an environment that hangs": (["environment_failing"] * 4, always({"stop/environment_timeout": 0.2}), Options()),
    "an environment that dies, and the entropy with it": (
        ["environment_failing"] * 3,
        lambda step: {} if step < 10 else {
            "stop/environment_error": 0.9, "success": 1.0, "entropy": 1e-3, "answers_cut": 1.0, "advantage/zero": 1.0,
        },
        Options(),
    ),
    "all that do not fail succeed": (["environment_failing"], always({"stop/environment_error": 0.01, "success": 1.0}),
                                     Options()),
    "success is known of the winners alone": ([], always({"success": 1.0, "success/unreported": 0.4}), Options()),
    "a reward that is not a number": (["rewards_missing"], always({"rewards/nan": 0.1, "success": 1.0}), Options()),
    "a flipped sign": (
        ["reward_misses_success"],
        lambda step: {
            "reward_success_correlation": -1.0, "success": max(0.4 - 0.05 * step, 0.0), **(ZERO if step > 8 else {}),
        },
        Options(),
    ),
    "a random reward": (
        ["reward_misses_success"], lambda step: {"reward_success_correlation": 0.1 * (-1) ** step}, Options(),
    ),
    "a reward that pays little for success": ([], lambda step: {"reward_success_correlation": 0.3 + 0.1 * (-1) ** step},
                                              Options()),
    "the reward rises as success falls": (
        ["reward_misses_success"],
        lambda step: {"reward": 0.4 + 0.01 * step, "success": 0.4 - 0.01 * step, "answers_cut": min(0.02 * step, 1.0)},
        Options(),
    ),
    "the policy forgets": (
        ["worse_than_start"],
        lambda step: {
            "success": 0.4 if step < 10 else 0.01, "advantage/zero": 1.0 if step > 10 else 0.1, "entropy": 1 - step / 60,
            "reward": 0.4 if step < 10 else 0.01,
        },
        Options(),
    ),
    "updates destroy the policy": (
        ["policy_destroyed"],
        lambda step: {} if step == 0 else {
            "success": 0.02, "reward": 0.0, "answers_cut": 0.9, "entropy": 2.0, "prompt_information": 0.0,
            "policy_change": 5.0,
            "stop/max_turns": 0.95, "advantage/zero": 0.96 if step > 10 else 0.5, "kl": 3.0, "clip_ratio/region_mean": 0.5,
            "reward_success_correlation": 0.9 if step < 20 else 0.0,
        },
        Options(entropy_coef=0.08),
    ),
    "updates destroy the policy, whose answers still end": (
        ["policy_destroyed"],
        lambda step: {} if step == 0 else {"success": 0.1, "reward": 0.1, "policy_change": 1.0}, Options(),
    ),
    "updates destroy the policy, from which its batches ahead are then far away": (
        ["policy_destroyed"],
        lambda step: {} if step == 0 else {
            "success": 0.1, "reward": 0.1, "policy_change": 1.0, "drift/kl": 0.3, "drift/effective_sample_size": 0.2,
        },
        Options(),
    ),
    "giving up pays": (
        ["giving_up_pays"],
        lambda step: {
            "success": 0.4 - 0.008 * step, "reward": 0.4 + 0.01 * step, "turns/mean": 11 - 0.2 * step,
            "reward_success_correlation": 0.9 - 0.03 * step,
        },
        Options(),
    ),
    "most episodes are cut from the start on": (
        ["episodes_cut"], always({"stop/max_turns": 0.61, "success": 0.4}), Options(),
    ),
    "most episodes are cut, and fewer with time": (
        [], lambda step: {"stop/max_turns": 0.9 - 0.015 * step, **dict.fromkeys(("success", "reward"), 0.1 + 0.015 * step)},
        Options(),
    ),
    "episodes that are cut succeed": ([], always({"stop/max_turns": 0.8, "success": 0.4}), Options()),
    "the policy forgets, success unknown": (
        ["worse_than_start"], lambda step: {"success": math.nan, "reward": 0.4 if step < 10 else 0.2}, Options(),
    ),
    "hard rows are drawn more often": (
        [], lambda step: {"success": 0.4 if step < 10 else 0.1}, Options(task_sampling="adaptive"),
    ),
    "rows are sorted by difficulty": (
        [], lambda step: {"success": 0.4 if step < 10 else 0.1}, Options(shuffle_dataset=False),
    ),
    "the first update destroys the policy": (
        ["worse_than_start"], lambda step: dict.fromkeys(("success", "reward"), 0.6 if step == 0 else 0.1), Options(),
    ),
    "the first of few groups was lucky": (
        [], lambda step: dict.fromkeys(("success", "reward"), 0.6 if step == 0 else 0.1) | {"success_sem": 0.17}, Options(),
    ),
    "a small loss, success unknown": (
        [], lambda step: {"success": math.nan, "reward": 0.4 if step < 10 else 0.32}, Options(),
    ),
    "a small loss": ([], lambda step: dict.fromkeys(("success", "reward"), 0.4 if step < 10 else 0.33), Options()),
    "a loss within the noise": (
        [], lambda step: dict.fromkeys(("success", "reward"), (0.4 if step < 10 else 0.3) + 0.2 * (-1) ** step) | {
            "success_sem": 0.2
        },
        Options(),
    ),
    "variety for its own sake": (
        ["entropy_runaway"],
        lambda step: {"entropy": 1 + 0.2 * step, "answers_cut": 0.05 + 0.02 * step, "success": 0.4 - 0.005 * step},
        Options(entropy_coef=0.5),
    ),
    "a penalty that nothing outweighs": (
        ["kl_pins_policy"], lambda step: {"kl": 2e-4 * (1 + step % 3), "policy_change": 1e-4}, Options(beta=10.0),
    ),
    "a penalty, and steps that are small": (
        [], lambda step: {"kl": 1e-6 * step**2}, Options(beta=1.0),
    ),
    "a penalty that leaves room to learn": (
        [], lambda step: {"kl": 2e-4 * (1 + step % 3), "reward": 0.4 + 0.01 * step, "success": 0.4 + 0.01 * step},
        Options(beta=1.0),
    ),
    "a weak penalty, and a policy that stays": ([], always({"kl": 2e-4}), Options(beta=0.1)),
    "a sampler that is too old": (
        ["sampler_too_old"], always({"drift/kl": 0.3, "drift/effective_sample_size": 0.2}), Options(),
    ),
    "a sampler that is too old, and the policy is lost": (
        ["sampler_too_old"],
        lambda step: {"drift/kl": 0.3, "drift/effective_sample_size": 0.2} | (
            {} if step < 25 else {"success": 0.0, "reward": 0.0, "advantage/zero": 1.0}
        ),
        Options(),
    ),
    "an old sampler, from which the policy learns": (
        [], lambda step: {"drift/kl": 0.3, "drift/effective_sample_size": 0.2, "reward": 0.4 + 0.01 * step,
                          "success": 0.4 + 0.01 * step},
        Options(),
    ),
    "one row": (
        ["one_task"], lambda step: {"distinct_tasks": 1.0, "success": min(0.4 + 0.05 * step, 1.0)}, Options(),
    ),
    "starts that differ": (["environment_ignores_seed"], always({"groups_with_different_starts": 0.5}), Options()),
}  # fmt: skip


def steps_of(what: str) -> int:
    """Steps of a planted run: unread prompts are named after a hundred batches."""
    return 110 if "knew the prompt" in what or what == "prompts_unread" else 40


def told(planted: Planted, options: Any, steps: int = 40) -> list[str]:
    diagnosis = Diagnosis(options)
    return [finding.name for step in range(steps) for finding in diagnosis.look(step, {**HEALTHY, **planted(step)})]


@pytest.mark.parametrize("case", PLANTED)
def test_each_planted_failure_is_named_once_and_nothing_else(case: str) -> None:
    expected, planted, options = PLANTED[case]
    assert told(planted, options, steps_of(case)) == expected


def test_every_finding_is_planted() -> None:
    named = {name for expected, _, _ in PLANTED.values() for name in expected}
    noted = {"sampler_mismatch"}  # by the monitor; see below and tests/trainers/test_mismatch_runs.py
    assert named | noted == {check.name for check in HEALTH_CHECKS}


def test_conditions_read_the_metrics_that_the_table_states() -> None:
    """Each finding is made from its own row's metrics alone, and every metric of a row is one of a run's."""
    assert HEALTHY.keys() | {"cispo_clip_ratio"} >= METRICS
    for case, (expected, planted, options) in PLANTED.items():
        for name in expected:
            check = next(check for check in HEALTH_CHECKS if check.name == name)
            own = {*check.reads}
            history = MetricHistory(groups=12)
            for step in range(steps_of(case)):
                values = {**HEALTHY, **planted(step)}
                history.add({metric: value for metric, value in values.items() if metric in own})
            assert check.shown_by(history, options) is not None, case


@pytest.mark.parametrize("values", [{}, {"success": 0.0, "return/mean": 0.0}])
def test_answers_that_are_alike_from_the_start_are_a_matter_of_sampling(values: dict[str, float]) -> None:
    """The temperature is named first, and what follows from it is not named; a policy that varied has another advice."""
    for entropy, first in ((0.05, True), (0.06, False)):
        diagnosis = Diagnosis(Options(temperature=0.01))
        alike = {**HEALTHY, "advantage/zero": 1.0, "entropy": entropy, **values}
        found = [one for step in range(20) for one in diagnosis.look(step, {**alike, "entropy": entropy * 0.05**step})]
        assert [one.name for one in found] == ["too_hard" if values else "zero_advantage_groups"]
        assert found[0].advice.startswith("Raise temperature") == first == ("temperature=0.01" in found[0].evidence)


@pytest.mark.parametrize(("mean", "spread", "rounded"), [(0.0, 9e-7, True), (1e6, 0.5, True), (0.0, 2e-6, False)])
def test_rewards_that_differ_by_rounding_alone_are_told_so(mean: float, spread: float, rounded: bool) -> None:
    diagnosis, metrics = Diagnosis(Options()), {**HEALTHY, "advantage/zero": 1.0, "success": math.nan}
    found = [
        one for step in range(9) for one in diagnosis.look(step, {**metrics, "return/mean": mean, "return/std": spread})
    ]
    assert [one.name for one in found] == ["zero_advantage_groups"]
    assert (f"deviation of {spread:.2g} around {mean:.6g}" in found[0].evidence) == rounded
    assert found[0].advice.startswith("Multiply the reward") == rounded


def test_a_solved_task_that_seeds_do_not_change_is_told_so() -> None:
    for alike, said in ((1.0, True), (0.0, False)):
        (found,) = findings_before({**HEALTHY, "success": 1.0, "seeds_alike": alike}, Options())
        assert (
            ("derive the task from the seed" in found.advice) == ("seeds make no difference" in found.evidence) == said
        )


def verdicts(groups: int, success: float, seed: int, batches: int = 100) -> dict[str, int]:
    """Play batches of groups of 8, of tasks of which this share is always won and the rest never: finding to its batch."""
    rng, found = random.Random(seed), dict[str, int]()
    diagnosis = Diagnosis(Options(generation_batch_size=8 * groups))
    for batch in range(1, batches + 1):
        won = sum(rng.random() < success for _ in range(groups)) / groups
        for one in diagnosis.look(
            batch, {**HEALTHY, "success": won, "advantage/zero": 1.0, "groups_without_success": 1 - won}
        ):
            found.setdefault(one.name, batch)
    return found


@pytest.mark.parametrize(
    ("groups", "success", "name", "batches"),
    [(1, 0.5, "solved", 0), (8, 0.8, "solved", 0), (1, 0.5, "too_hard", 0), (8, 1.0, "solved", 8), (1, 1.0, "solved", 59),
     (8, 0.98, "solved", 50), (8, 0.0, "too_hard", 5), (1, 0.0, "too_hard", 28)],
)  # fmt: skip
def test_a_verdict_needs_enough_groups(groups: int, success: float, name: str, batches: int) -> None:
    """Tasks that are always won may come up five batches in a row: 59 = log(.002) / log(.9) groups are enough, not 5."""
    found = [verdicts(groups, success, seed) for seed in range(3)]
    assert [one.get(name, 0) <= batches and (name in one) == bool(batches) for one in found] == [True] * 3, found
    if success == 0.8:
        assert all("zero_advantage_groups" in one for one in found), (
            "what only looks solved now and then explains nothing"
        )


def test_a_task_that_is_solved_in_training_alone_is_told_so() -> None:
    """It is called solved before the evaluation, and after it again; one that agrees or has failed episodes says nothing."""
    for success, failed, said in ((0.1, 0.0, 2), (0.9, 0.0, 1), (0.1, 3.0, 1)):
        diagnosis, found = Diagnosis(Options()), list[Any]()
        for step in range(40):
            if step in (6, 25):  # the first is from before the task was learned
                diagnosis.evaluated("eval", {"eval_success": success, "eval_episodes": 64.0, "eval_failed": failed})
            found += diagnosis.look(step, {**HEALTHY, "success": 0.4 if step < 8 else 0.99})
        assert [one.name for one in found] == ["solved"] * said and "alone" not in found[0].evidence
        assert ("but eval_success is 10% of 64 episodes" in found[-1].evidence) == (said == 2)


@pytest.mark.parametrize(
    ("name", "metrics", "options"),
    [
        ("solved", {"success": 0.949}, {}),
        ("too_hard", {**ZERO, "success": 0.03}, {}),
        ("zero_advantage_groups", {"advantage/zero": 0.94}, {}),
        ("zero_advantage_groups", {"advantage/zero": 0.97, "success": 0.91}, {}),
        ("too_easy", {"success": 0.79}, {}),
        ("starts_lost", {"groups_without_success": 0.56}, {}),
        ("entropy_collapse", {"entropy": 0.0051}, {}),
        ("cut_answers", {"answers_cut": 0.24}, {}),
        ("context_full", {"stop/context_full": 0.09}, {}),
        ("rewrite_full", {"stop/rewrite_full": 0.09}, {}),
        ("rewritten_every_turn", {"rewrites/context": 0.72}, {}),  # 8 of 8.9 later turns
        ("episodes_cut", {"stop/max_turns": 0.99}, {"mask_truncated_completions": True}),
        ("ratio_clipped", {"clip_ratio/region_mean": 0.29}, {}),
        ("ratio_clipped", {"clip_ratio/region_mean": 0.49}, {"importance_sampling_level": "sequence"}),
        ("kl_runaway", {"kl": 0.99}, {}),
        ("sampler_too_old", {"drift/kl": 0.3, "drift/effective_sample_size": 0.41}, {}),
        ("sampler_too_old", {"drift/kl": 0.099, "drift/effective_sample_size": 0.2}, {}),
        ("value_not_learning", {"value/error": 0.62}, {"has_critic": True}),
        ("no_weight_change", {"policy_change": 1.1e-3}, {}),
        ("kl_pins_policy", {"kl": 0.011}, {"beta": 10.0}),
        ("one_task", {"distinct_tasks": 2.0}, {}),
        ("reward_misses_success", {"reward_success_correlation": 0.31}, {}),
        ("prompts_unread", {"observations_empty": 0.94}, {}),
        ("reward_discounted", {"return/early_std": 0.11}, {"gamma": 0.0}),
        ("reward_discounted", {"return/early_std": 0.0}, {"gamma": 0.64}),
    ],
)
def test_just_below_the_threshold_nothing_is_named(
    name: str, metrics: dict[str, float], options: dict[str, Any]
) -> None:
    assert name not in told(always(metrics), replace(Options(), **options), steps_of(name))


def test_weights_that_stay_may_have_no_gradient() -> None:
    """An adapter without trained layers moves nothing at any learning rate: the gradient is named first."""
    diagnosis = Diagnosis(Options())
    (finding,) = (f for step in range(40) for f in diagnosis.look(step, {**HEALTHY, "policy_change": 0.0}))
    assert finding.name == "no_weight_change" and finding.advice.startswith("If grad_norm is 0")


@pytest.mark.parametrize(
    ("name", "batches"),
    [("zero_advantage_groups", 5), ("solved", 8), ("cut_answers", 5), ("ratio_clipped", 10), ("no_weight_change", 15),
     ("value_not_learning", 30), ("environment_failing", 1), ("environment_ignores_seed", 1), ("one_task", 10),
     ("rewards_missing", 1),
     ("kl_pins_policy", 15), ("sampler_too_old", 20), ("starts_lost", 20)],
)  # fmt: skip
def test_patience(name: str, batches: int) -> None:
    """A condition must hold for a number of batches; failures of the environment are named at the first."""
    _, planted, options = next(row for row in PLANTED.values() if row[0] == [name])
    planted = always({"success": 0.99, "advantage/zero": 0.9}) if name == "solved" else planted
    assert name not in told(planted, options, batches - 1)
    assert name in told(planted, options, batches)


def test_a_finding_is_repeated_when_it_doubles_or_comes_back() -> None:
    diagnosis, told = Diagnosis(Options()), {}
    shares = {1: 10, 2: 10, 3: 19, 4: 20, 5: 30, 6: 40, 7: 0, 50: 40, 50 + QUIET: 40, 151 + QUIET: 10}
    for step, share in ((step, FAILING * share / 1000) for step, share in shares.items()):
        told[step] = len(diagnosis.look(step, {"stop/environment_error": share, "stop/environment_timeout": 0.0}))
    assert [step for step, count in told.items() if count] == [1, 4, 6, 151 + QUIET]


def test_a_failing_environment_is_repeated_while_it_holds() -> None:
    planted = always({"stop/environment_error": FAILING})
    diagnosis = Diagnosis(Options())
    steps = [step for step in range(3 * REPEATED) for _ in diagnosis.look(step, {**HEALTHY, **planted(step)})]
    assert steps == [0, REPEATED, 2 * REPEATED]


def test_a_fall_is_not_said_of_what_the_reward_pays_for() -> None:
    """Success falls and the reward does not: the learning rate is not to blame."""
    planted = lambda step: {"success": 0.4 if step < 10 else 0.01}  # noqa: E731
    assert not {"worse_than_start", "policy_destroyed"} & {*told(planted, Options())}


def test_of_two_findings_that_explain_each_other_one_remains() -> None:
    """The first of the table if both are made at once, otherwise the earlier, which the later one follows from."""
    both: dict[str, float] = {"success": 0.02, "reward": 0.0, "answers_cut": 0.9}

    def told_with(correlated: Callable[[int], float]) -> list[str]:
        return told(lambda step: {"reward_success_correlation": correlated(step)} | (both if step else {}), Options())

    assert told_with(lambda step: 0.0) == ["reward_misses_success"], "made at the fifth batch, before the sixth"
    assert told_with(lambda step: 0.0 if step else math.nan) == ["policy_destroyed"], "both at the sixth"
    assert told_with(lambda step: 0.9 if step < 9 else 0.0) == ["policy_destroyed"]


def test_a_finding_explains_others_for_a_while_after_it_has_passed() -> None:
    def planted(step: int) -> dict[str, float]:
        return {"distinct_tasks": 1.0} if step < 20 else {"success": 0.99, "advantage/zero": 0.9}

    diagnosis = Diagnosis(Options())
    said = [(found.name, step) for step in range(200) for found in diagnosis.look(step, {**HEALTHY, **planted(step)})]
    assert [name for name, _ in said] == ["one_task", "solved"] and said[1][1] > 19 + QUIET


def test_notes_are_the_evidence_until_they_are_withdrawn() -> None:
    diagnosis = Diagnosis(Options())
    diagnosis.note("sampler_mismatch", "They differ.")
    (finding,) = diagnosis.look(3, HEALTHY)
    assert (finding.name, finding.step, finding.evidence) == ("sampler_mismatch", 3, "They differ.")
    assert str(finding).startswith("[sampler_mismatch] They differ. Remove the cause")
    diagnosis.note("sampler_mismatch", None)
    diagnosis.look(4, HEALTHY)
    diagnosis.note("sampler_mismatch", "Again.")
    assert not diagnosis.look(5, HEALTHY), "said lately"
    assert diagnosis.look(6 + QUIET, HEALTHY)


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped() -> None:
    """It stops three times: what is lost then stays lost."""
    for case, (expected, planted, options) in PLANTED.items():
        diagnosis, said = Diagnosis(options), []
        for first, after in pairwise((0, 1, 13, 31, steps_of(case))):
            state = json.loads(json.dumps(diagnosis.state()))
            diagnosis = Diagnosis(options)
            diagnosis.restore(state)
            said += [f.name for step in range(first, after) for f in diagnosis.look(step, {**HEALTHY, **planted(step)})]
        assert said == expected


def test_the_state_stays_small() -> None:
    diagnosis = Diagnosis(Options())
    for step in range(500):
        diagnosis.look(step, HEALTHY)
    assert len(json.dumps(diagnosis.state())) < 20_000


def test_before_training_one_batch_is_enough() -> None:
    batch = {**HEALTHY, "stop/context_full": 0.5, "answers_cut": 0.5, "stop/environment_error": 0.25}
    found = findings_before(batch, Options(), {"environment_failing": "ValueError: no"})
    assert [finding.name for finding in found] == ["cut_answers", "context_full", "environment_failing"]
    assert found[2].evidence.endswith("ValueError: no.")
    assert findings_before(HEALTHY, Options()) == []
