"""The table of findings on recorded histories: each planted failure is named once, and nothing in a healthy run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from agile_trainers.evaluation.diagnosis import METRICS, QUIET, SYMPTOMS, Diagnosis, History, findings_before


@dataclass(frozen=True)
class Options:
    """The options that conditions look at."""

    has_critic: bool = False
    max_new_tokens: int = 64
    max_turns: int = 4
    max_model_length: int | None = 512
    mask_truncated_completions: bool = False
    loss_type: str = "grpo"
    importance_sampling_level: str = "token"
    beta: float = 0.0


HEALTHY: dict[str, float] = {
    "success": 0.4, "advantage/silent": 0.2, "return/mean": 0.4, "return/std": 0.5, "return/min": 0.0, "return/max": 1.0,
    "entropy": 1.0, "answers_cut": 0.05, "return/answers_cut": 0.0, "stop/truncated": 0.0, "stop/max_turns": 0.1,
    "stop/context_full": 0.0, "stop/environment_error": 0.0, "stop/environment_timeout": 0.0,
    "groups_with_different_starts": 0.0, "clip_ratio/region_mean": 0.02,
    "sampling/sampling_logp_difference/mean": 1e-6, "kl": 0.05, "prompt_information": 0.9, "policy_change": 0.05,
    "value/error": 0.4, "value/spread": 0.5,
}  # fmt: skip
"""The metrics of a step of a healthy run."""
SILENT = {"advantage/silent": 1.0, "return/std": 0.0, "return/max": 0.0, "return/mean": 0.0}

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
            "success": 1.0, "advantage/silent": 1.0, "return/std": 0.0, "return/min": 1.0, "return/mean": 1.0,
            "entropy": 1e-4, "value/spread": 0.0, "value/error": 0.02,
        },
        Options(has_critic=True),
    ),
    "solved from the start, and nothing moves": (
        ["solved"], always({"success": 1.0, "advantage/silent": 1.0, "policy_change": 0.0}), Options(),
    ),
    "no success": (["too_hard"], always({**SILENT, "success": 0.0}), Options()),
    "no success and no learning": (["too_hard"], always({**SILENT, "success": 0.0, "policy_change": 0.0}), Options()),
    "a constant reward, success unknown": (["dead_groups"], always({**SILENT, "success": math.nan}), Options()),
    "no signal at half success": (["dead_groups"], always({"advantage/silent": 0.97}), Options()),
    "no signal, and two states of fifty are left": (
        [], lambda step: {"advantage/silent": min(step / 20, 0.97), "success": min(0.4 + step / 20, 0.93)}, Options(),
    ),
    "a constant reward with a critic": (
        ["dead_groups"], always({**SILENT, "advantage/silent": 0.0, "value/spread": 0.5}), Options(has_critic=True),
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
    "answers that never knew the prompt": ([], always({"prompt_information": 0.02}), Options()),
    "cut answers that return less": (["cut_answers"], always({"answers_cut": 0.3}), Options()),
    "cut answers that return as much": ([], always({"answers_cut": 0.3, "return/answers_cut": 0.4}), Options()),
    "one-token answers are cut by design": (
        [], always({"answers_cut": 1.0, "return/answers_cut": 0.4}), Options(max_new_tokens=1),
    ),
    "every long answer is cut": (
        ["cut_answers"], always({"answers_cut": 1.0, "return/answers_cut": 0.4}), Options(max_new_tokens=16),
    ),
    "the context is full": (["context_full"], always({"stop/context_full": 0.15}), Options()),
    "everything is cut and masked": (
        ["episodes_cut"], always({"stop/max_turns": 1.0}), Options(mask_truncated_completions=True),
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
    "sequences leave a narrow range": (
        [], always({"clip_ratio/region_mean": 0.4}), Options(importance_sampling_level="sequence"),
    ),
    "clipped weights": (["ratio_clipped"], always({"cispo_clip_ratio": 0.4}), Options(loss_type="cispo")),
    "the reference is left behind": (["kl_runaway"], lambda step: {"kl": min(0.1 * step, 2.0)}, Options(beta=0.01)),
    "a distance from the reference that shrinks": ([], lambda step: {"kl": 4 - 0.1 * step}, Options(beta=0.01)),
    "a critic that learns nothing": (["value_not_learning"], always({"value/error": 1.0}), Options(has_critic=True)),
    "a critic that says the mean": ([], always({"value/error": 0.5}), Options(has_critic=True)),
    "a critic that catches up": ([], falling("value/error", 0.1, over=15, **{"value/spread": 0.3}),
                                 Options(has_critic=True)),
    "weights that stay": (["no_weight_change"], always({"policy_change": 1e-5}), Options()),
    "an environment that fails at times": (["environment_failing"], always({"stop/environment_error": 0.01}), Options()),
    "an environment that hangs": (["environment_failing"], always({"stop/environment_timeout": 0.2}), Options()),
    "starts that differ": (["environment_ignores_seed"], always({"groups_with_different_starts": 0.5}), Options()),
}  # fmt: skip


def told(planted: Planted, options: Any, steps: int = 40) -> list[str]:
    diagnosis = Diagnosis(options)
    return [finding.name for step in range(steps) for finding in diagnosis.look(step, {**HEALTHY, **planted(step)})]


@pytest.mark.parametrize("case", PLANTED)
def test_each_planted_failure_is_named_once_and_nothing_else(case: str) -> None:
    expected, planted, options = PLANTED[case]
    assert told(planted, options) == expected


def test_every_finding_is_planted() -> None:
    named = {name for expected, _, _ in PLANTED.values() for name in expected}
    noted = {"sampler_gap"}  # by the monitor; see below and tests/trainers/test_gap.py
    assert named | noted == {symptom.name for symptom in SYMPTOMS}


def test_conditions_read_the_metrics_that_the_table_states() -> None:
    """Each finding is made from its own row's metrics alone, and every metric of a row is one of a run's."""
    assert HEALTHY.keys() | {"cispo_clip_ratio"} >= METRICS
    for case, (expected, planted, options) in PLANTED.items():
        for name in expected:
            symptom = next(symptom for symptom in SYMPTOMS if symptom.name == name)
            own = {*symptom.reads}
            history = History()
            for step in range(40):
                values = {**HEALTHY, **planted(step)}
                history.add({metric: value for metric, value in values.items() if metric in own})
            assert symptom.shown_by(history, options) is not None, case


@pytest.mark.parametrize(
    ("name", "metrics", "options"),
    [
        ("solved", {"success": 0.949}, {}),
        ("too_hard", {**SILENT, "success": 0.03}, {}),
        ("dead_groups", {"advantage/silent": 0.94}, {}),
        ("dead_groups", {"advantage/silent": 0.97, "success": 0.91}, {}),
        ("too_easy", {"success": 0.79}, {}),
        ("entropy_collapse", {"entropy": 0.0051}, {}),
        ("cut_answers", {"answers_cut": 0.24}, {}),
        ("context_full", {"stop/context_full": 0.09}, {}),
        ("episodes_cut", {"stop/max_turns": 0.99}, {"mask_truncated_completions": True}),
        ("ratio_clipped", {"clip_ratio/region_mean": 0.29}, {}),
        ("ratio_clipped", {"clip_ratio/region_mean": 0.49}, {"importance_sampling_level": "sequence"}),
        ("kl_runaway", {"kl": 0.99}, {}),
        ("value_not_learning", {"value/error": 0.62}, {"has_critic": True}),
        ("no_weight_change", {"policy_change": 1.1e-3}, {}),
    ],
)
def test_just_below_the_threshold_nothing_is_named(
    name: str, metrics: dict[str, float], options: dict[str, Any]
) -> None:
    assert name not in told(always(metrics), replace(Options(), **options))


@pytest.mark.parametrize(
    ("name", "batches"),
    [("dead_groups", 5), ("solved", 5), ("cut_answers", 5), ("ratio_clipped", 10), ("no_weight_change", 20),
     ("value_not_learning", 30), ("environment_failing", 1), ("environment_ignores_seed", 1)],
)  # fmt: skip
def test_patience(name: str, batches: int) -> None:
    """A condition must hold for a number of batches; failures of the environment are named at the first."""
    _, planted, options = next(row for row in PLANTED.values() if row[0] == [name])
    planted = always({"success": 0.97}) if name == "solved" else planted
    assert name not in told(planted, options, batches - 1)
    assert name in told(planted, options, batches)


def test_a_finding_is_repeated_when_it_doubles_or_comes_back() -> None:
    diagnosis, told = Diagnosis(Options()), {}
    shares = {1: 0.1, 2: 0.1, 3: 0.19, 4: 0.2, 5: 0.3, 6: 0.4, 7: 0.0, 50: 0.4, 50 + QUIET: 0.4, 151 + QUIET: 0.1}
    for step, share in shares.items():
        told[step] = len(diagnosis.look(step, {"stop/environment_error": share, "stop/environment_timeout": 0.0}))
    assert [step for step, count in told.items() if count] == [1, 4, 6, 151 + QUIET]


def test_notes_are_the_evidence_until_they_are_withdrawn() -> None:
    diagnosis = Diagnosis(Options())
    diagnosis.note("sampler_gap", "They differ.")
    (finding,) = diagnosis.look(3, HEALTHY)
    assert (finding.name, finding.step, finding.evidence) == ("sampler_gap", 3, "They differ.")
    assert str(finding).startswith("[sampler_gap] They differ. Remove the cause")
    diagnosis.note("sampler_gap", None)
    diagnosis.look(4, HEALTHY)
    diagnosis.note("sampler_gap", "Again.")
    assert not diagnosis.look(5, HEALTHY), "said lately"
    assert diagnosis.look(6 + QUIET, HEALTHY)


@pytest.mark.parametrize("cut", range(1, 40, 6))
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(cut: int) -> None:
    for expected, planted, options in PLANTED.values():
        first = Diagnosis(options)
        said = [f.name for step in range(cut) for f in first.look(step, {**HEALTHY, **planted(step)})]
        second = Diagnosis(options)
        second.restore(json.loads(json.dumps(first.state())))
        said += [f.name for step in range(cut, 40) for f in second.look(step, {**HEALTHY, **planted(step)})]
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
