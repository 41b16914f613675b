"""What an evaluation counts: failed episodes, and the range that an environment declares."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest

from agile_environments.courier import Courier
from agile_trainers.evaluation.results import counted_mean, evaluation_metrics
from agile_trainers.evaluation.statistics import standard_error
from agile_trainers.rollout.environment_pool import EnvironmentPool

OK, FAILED = "terminated", "environment_error"


def row(value: float, reason: str = OK, success: bool | None = None, environment: str | None = None) -> dict[str, Any]:
    zero = dict.fromkeys(("turns", "action_tokens", "tokens", "answers_cut", "observations_cut"), 0)
    return {"return": value, "success": success, "stop_reason": reason, "environment": environment, **zero}


def test_failed_episodes_count_by_hand() -> None:
    """Of four episodes two failed; their rewards until then are no returns."""
    rows = [row(1.0, success=True), row(3.0, success=True), row(9.0, FAILED), row(9.0, FAILED)]
    metrics = evaluation_metrics(rows)
    assert (metrics["return"], metrics["return/mean"], metrics["success"]) == (1.0, 2.0, 0.5)
    assert metrics["return_sem"] == pytest.approx(math.sqrt(2.0) / 2)
    assert (metrics["episodes"], metrics["failed"]) == (4.0, 2.0)
    declared = evaluation_metrics(rows, {None: (-2.0, 3.0)})
    assert declared["return"] == (1 + 3 - 2 - 2) / 4
    negative = evaluation_metrics([row(-5.0), row(-7.0), row(0.0, FAILED)])
    assert negative["return"] == pytest.approx(-19 / 3), "the lowest return, not 0"


def test_a_member_that_fails_where_it_would_lose_gains_nothing() -> None:
    """235 of 256 fail, the others win: that is 21 of 256."""
    metrics = evaluation_metrics([row(0.0, FAILED)] * 235 + [row(1.0, success=True)] * 21)
    assert metrics["return"] == metrics["success"] == pytest.approx(21 / 256)


def test_each_environment_has_its_own_lowest_return() -> None:
    rows = [row(10.0, environment="a"), row(0.0, FAILED, environment="a"), row(-1.0, environment="b")]
    rows += [row(0.0, FAILED, environment="b"), row(0.0, FAILED, environment="c")]
    mean, _ = counted_mean([one["return"] for one in rows], rows, {"a": (5.0, 10.0)})
    assert mean == pytest.approx((10 + 5 - 1 - 1 - 1) / 5)


def test_success_is_of_the_environments_that_report_it() -> None:
    rows = [row(1.0, success=True, environment="a"), row(0.0, environment="a"), row(0.0, FAILED, environment="a")]
    rows += [row(9.0, environment="b"), row(9.0, FAILED, environment="b")]
    assert evaluation_metrics(rows)["success"] == pytest.approx(1 / 3)


def test_without_a_sound_episode_there_is_no_return() -> None:
    metrics = evaluation_metrics([row(0.0, FAILED)] * 3)
    assert math.isnan(metrics["return"]) and math.isnan(metrics["return_sem"]) and "success" not in metrics
    mean, error = counted_mean([math.nan, 2.0], [row(0.0), row(0.0)], {})
    assert mean == 2.0 and math.isnan(error), "an episode to which no reward function gave a value is no failed one"


class Declared:
    return_range: Any = (0, 2)


class InTheInstance:
    def __init__(self, high: float) -> None:
        self.return_range = (-high, high)


def test_an_instance_in_a_process_says_its_range_at_its_first_reset() -> None:
    class Unsendable(Courier):
        def __init__(self) -> None:
            super().__init__()
            self.return_range = lambda: None

    pool = EnvironmentPool(lambda: Courier(), processes=1)
    assert pool.return_range() is None
    broken = EnvironmentPool(lambda: Unsendable(), processes=1)
    broken.reset(0, 1, None)
    while not (found := broken.outcomes(block=True)):
        pass
    broken.close()
    assert found[0].error is None, "an attribute that cannot be sent costs no episode"
    try:
        pool.reset(0, 1, None)
        while not pool.outcomes(block=True):
            pass
        pool.release(0, reusable=True)
        assert pool.return_range() == Courier().return_range
    finally:
        pool.close()


def test_the_range_that_an_environment_declares() -> None:
    assert EnvironmentPool(Declared).return_range() == (0.0, 2.0)
    assert EnvironmentPool(functools.partial(Declared), processes=1).return_range() == (0.0, 2.0)
    assert EnvironmentPool(object).return_range() is None
    several = EnvironmentPool({"a": Declared, "b": functools.partial(InTheInstance, 3.0)})
    assert several.return_range("b") is None, "no instance was made yet"
    several.environment(0, "b")
    several.release(0, reusable=True)
    assert (several.return_range("a"), several.return_range("b")) == ((0.0, 2.0), (-3.0, 3.0))
    for wrong in (1.0, (2, 1), (0, math.inf), ("a", "b"), (1, 2, 3)):
        broken = type("Broken", (), {"return_range": wrong})
        with pytest.raises(ValueError, match=r"return_range=.*lowest and highest"):
            EnvironmentPool(broken).return_range()


def test_repetitions_are_one_unit() -> None:
    """Two starts, one of them played three times with the same result: the error is that of two sums over four episodes."""
    rows = [row(1.0), row(1.0), row(1.0), row(5.0)]
    units = ["a", "a", "a", "b"]
    metrics = evaluation_metrics(rows, units=units)
    assert metrics["return"] == 2.0
    # Sums of deviations are -3 and 3: sqrt(2 / (2 - 1) * (9 + 9)) / 4.
    assert metrics["return_sem"] == pytest.approx(1.5) == standard_error([1.0, 1.0, 1.0, 5.0], units)
    once = counted_mean([1.0, 5.0], [row(1.0), row(5.0)], {}, ["a", "b"])
    assert once == (3.0, pytest.approx(2.0))
    assert math.isnan(counted_mean([1.0, 1.0], [row(1.0), row(1.0)], {}, ["a", "a"])[1])
    failed = counted_mean(
        [1.0, None, 5.0, None], [row(1.0), row(0.0, FAILED), row(5.0), row(0.0, FAILED)], {}, [*"abab"]
    )
    assert failed == (1.5, pytest.approx(standard_error([1.0, 0.0, 5.0, 0.0], [*"abab"]))), (
        "failed ones keep their unit"
    )
