"""The metrics of the diagnosis on batches that are small enough to compute by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from agile_trainers.monitor.reporting import (
    groups_without_success,
    health_metrics,
    outcomes_of,
    reward_success_correlation,
    seeds_alike,
    success_sem,
    task_of,
    training_summary,
)
from agile_trainers.rollout.metrics import episode_metrics
from agile_trainers.types import StopReason, Trajectory, Turn


def test_correlation_is_pearsons_within_groups() -> None:
    """Two groups whose levels differ: numpy's coefficient of the differences from the groups' means."""
    rewards, successes = [1.0, 0.2, 0.1, 0.4, 9.0, 9.5, 8.0, 9.1], [True, False, False, True, False, True, False, True]
    centred = [np.array(column, float).reshape(2, 4) for column in (rewards, successes)]
    x, y = ((column - column.mean(1, keepdims=True)).ravel() for column in centred)
    expected = np.corrcoef(x, y)[0, 1]
    assert reward_success_correlation(rewards, successes, 4) == pytest.approx(expected)
    assert reward_success_correlation([-r for r in rewards], successes, 4) == pytest.approx(-expected)


def test_groups_that_compare_nothing_are_left_out() -> None:
    mixed, won = [1.0, 0.0], [5.0, 7.0]
    assert reward_success_correlation([*mixed, *won], [True, False, True, True], 2) == pytest.approx(1.0)
    assert reward_success_correlation(won, [True, True], 2) is None
    assert reward_success_correlation([1.0, 1.0], [True, False], 2) is None, "a constant reward"
    unknown = [1.0, 0.0, math.nan, 3.0], [True, False, False, None]
    assert reward_success_correlation(*unknown, 4) == pytest.approx(1.0)


def test_metrics_of_a_batch() -> None:
    rows = [
        {"success": success, "stop_reason": reason.value}
        for success, reason in [
            (True, StopReason.TERMINATED), (False, StopReason.MAX_TURNS),
            (None, StopReason.TERMINATED), (None, StopReason.ENVIRONMENT_ERROR),
        ]
    ]  # fmt: skip
    metrics = health_metrics(rows, [1.0, 0.0, 0.5, math.nan], ["a", "a", "b", None], 2, 2)
    assert metrics == {
        "reward_success_correlation": pytest.approx(1.0), "distinct_tasks": 2.0, "groups_without_success": 0.0,
    }  # fmt: skip
    assert "distinct_tasks" not in health_metrics(rows, [1.0] * 4, ["a"] * 4, 4, 4), "a single group always plays one"
    unknown = [row | {"success": None} for row in rows]
    assert health_metrics(unknown, [1.0] * 4, [None] * 4, 2, 2) == {}


def test_the_error_of_success_is_that_of_group_means() -> None:
    """Means 1, 0.5 and 0: standard deviation 0.5. Groups whose tasks differ err more than as many single episodes."""
    successes = [True, True, True, False, False, None]
    assert success_sem(successes, 2) == pytest.approx(0.5 / math.sqrt(3))
    assert success_sem(successes, 1) == pytest.approx(np.std([1, 1, 1, 0, 0], ddof=1) / math.sqrt(5))
    assert success_sem(successes, 6) is None and success_sem([None] * 4, 2) is None


def test_groups_that_nobody_solves() -> None:
    successes = [True, False, False, False, False, None, None, None]
    assert groups_without_success(successes, 2) == pytest.approx(2 / 3)  # the last group is not known
    assert groups_without_success(successes, 4) == 0.5
    assert groups_without_success(successes, 1) is None and groups_without_success([None] * 4, 2) is None


def test_a_task_is_a_row_with_what_its_reset_says() -> None:
    def episode(number: int | None, prompt: str = "Guess.", secret: int = 1) -> Trajectory:
        options = None if number is None else {"number": number}
        messages = [{"role": "user", "content": prompt}] if prompt else []
        return Trajectory([], [], [], [], StopReason.TERMINATED, messages, {"secret": secret}, options=options)

    assert task_of(episode(1)) == task_of(episode(1))
    assert len({task_of(one) for one in (episode(1), episode(2), episode(1, "Ask."), episode(1, secret=2))}) == 4
    assert task_of(episode(None)) is None, "seeds are the tasks"
    assert task_of(episode(1, prompt="")) is None, "the environment failed at reset"


def guessed(*said: tuple[str, float, str], prompt: str = "Guess.", options: dict[str, int] | None = None) -> Trajectory:
    """An episode of (answer, reward, observation)."""
    turns = [Turn(0, 1, answer, "stop", reward, observation) for answer, reward, observation in said]
    messages = [{"role": "user", "content": prompt}]
    return Trajectory([1], [2], [0.0], turns, StopReason.TERMINATED, messages, options=options)


LOW, WON, WORSE = ("3", 0.0, "higher"), ("7", 1.0, "right"), ("7", 0.0, "lower")


@pytest.mark.parametrize(
    ("groups", "alike"),
    [
        ([[guessed(LOW, WON), guessed(WON)], [guessed(LOW, WON), guessed(WON)]], 1.0),
        ([[guessed(LOW, WON), guessed(WON)], [guessed(LOW, WORSE), guessed(WORSE)]], 0.0),  # a secret
        ([[guessed(LOW, WON), guessed(LOW, WON)], [guessed(LOW, WORSE), guessed(LOW, WORSE)]], 0.0),  # shown late
        ([[guessed(WON), guessed(WON)], [guessed(LOW), guessed(LOW)]], 0.0),  # no answer was given twice
        ([[guessed(WON)] * 2, [guessed(WON, prompt="Ask.")] * 2], 0.0),
        ([[guessed(WON)] * 2], None),
        ([[guessed(WON, options={"secret": 7})] * 2] * 2, None),
    ],
)
def test_seeds_are_alike_if_the_same_answers_have_the_same_results(
    groups: list[list[Trajectory]], alike: float | None
) -> None:
    assert seeds_alike([outcomes_of(episode) for group in groups for episode in group], 2) == alike


def test_what_happens_between_turns_by_hand() -> None:
    """Three of four observations between answers say nothing; before the last turn 1, 0 and 0.5 are earned."""
    episodes = [
        guessed(("a", 1.0, ""), ("b", 5.0, "end")), guessed(("a", 0.0, " "), ("b", 0.5, ""), ("c", 0.0, "")),
        guessed(("a", 0.5, "b"), ("b", 9.0, "")), guessed(("a", 7.0, "")),
    ]  # fmt: skip
    summary = training_summary([episode_metrics(one) for one in episodes], 0)
    assert summary["observations_empty"] == 0.75
    assert summary["return/early_std"] == pytest.approx(np.std([1.0, 0.5, 0.5], ddof=1))
    assert "return/early_std" not in training_summary([episode_metrics(one) for one in episodes[2:]], 0)
