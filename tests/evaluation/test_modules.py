"""Metrics as modules of the real package ``evaluate``, offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agile_trainers.evaluation.modules import (
    METRICS_FOLDER,
    compute_metrics,
    load_metrics,
    metric_columns,
    metric_names,
)
from agile_trainers.evaluation.results import EpisodeResults, start_of_episode
from agile_trainers.evaluation.statistics import wilson_interval
from agile_trainers.rollout.metrics import episode_metrics
from agile_trainers.types import StopReason, Trajectory, Turn

evaluate = pytest.importorskip("evaluate", reason="evaluate is not installed: pip install 'agile-trainers[eval]'")

LENGTHS = """
import datasets
import evaluate


class Lengths(evaluate.Metric):
    def _info(self):
        text = datasets.Value("string")
        features = datasets.Features({"predictions": text, "references": text})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        return {"characters": sum(map(len, predictions)) / len(predictions), "right": sum(map(len, references))}
"""


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    """A user's own metric over predictions and references."""
    path = tmp_path / "lengths" / "lengths.py"
    path.parent.mkdir()
    path.write_text(LENGTHS)
    return path.parent


def episode(
    number: int, text: str, success: bool | None, reason: StopReason = StopReason.TERMINATED, **row: Any
) -> Any:
    turn = Turn(0, 1, text, "stop", float(bool(success)), "", {} if success is None else {"success": success})
    return Trajectory([1], [2], [0.0], [turn], reason, [], {"secret": number}, number, options=row or None)


def results(*episodes: Trajectory) -> EpisodeResults:
    rows, starts = [episode_metrics(one) for one in episodes], [start_of_episode(one) for one in episodes]
    return EpisodeResults([], list(episodes), list(range(len(episodes))), rows, starts)


PLAYED = results(
    episode(1, "so <answer> 12 </answer>", True, answer="12.0"),
    episode(2, "thinking</think>7", False, answer="8"),
    episode(3, "$x$", True, answer="x"),
    episode(4, "crashed", None, StopReason.ENVIRONMENT_ERROR, answer="1"),
)


def test_each_of_ours_is_opened_from_its_folder_and_agrees_with_the_functions() -> None:
    assert metric_names() == ["answer_match", "episode_return", "pass_at_k", "success"]
    inputs: dict[str, Any] = {
        "success": {"successes": [True, False, True], "units": ["a", "b", "c"]},
        "episode_return": {"returns": [1.0, 0.0, 4.0], "units": ["a", "b", "c"]},
        "pass_at_k": {"successes": [True, False, False, False], "starts": ["a", "a", "b", "b"]},
        "answer_match": {"predictions": ["\\boxed{1/2}", "3"], "references": ["0.5", "4"]},
    }
    low, high = wilson_interval(2, 3)
    expected: dict[str, Any] = {
        "success": {"success": 2 / 3, "success_low": low, "success_high": high},
        "episode_return": {"return": 5 / 3, "return_low": None, "return_high": None},
        "pass_at_k": {"pass@1": 0.25, "pass@2": 0.5},
        "answer_match": {"answer_match": 0.5},
    }
    for name in metric_names():
        assert evaluate.load(str(METRICS_FOLDER / name)).compute(**inputs[name]) == pytest.approx(expected[name])


def test_combine_takes_ours_beside_a_users_own(lengths: Path) -> None:
    ours = [evaluate.load(str(METRICS_FOLDER / name)) for name in ("answer_match", "success")]
    both = evaluate.combine([ours[0], evaluate.load(str(lengths))])
    assert both.compute(predictions=["a", "bcd"], references=["a", "b"]) == {
        "answer_match": 0.5, "characters": 2.0, "right": 2,
    }  # fmt: skip
    every = evaluate.combine([*ours, evaluate.load(str(lengths))])
    every.add_batch(predictions=["a"], references=["a"], successes=[True], units=["x"])
    assert every.compute().keys() == {"answer_match", "success", "success_low", "success_high", "characters", "right"}


def test_metrics_over_episodes_by_name_and_by_path(lengths: Path) -> None:
    columns = metric_columns(PLAYED)
    assert columns["predictions"] == ["12", "7", "$x$"] and columns["references"] == ["12.0", "8", "x"]
    assert columns["successes"] == [True, False, True] and len(set(columns["units"])) == 3
    of_others = results(episode(5, "a", True, secret=None))  # a column that rows of another environment fill
    assert metric_columns(of_others, "secret")["references"] == [5]
    for path in (lengths, lengths / "lengths.py"):
        values = compute_metrics(["answer_match", str(path), "success"], PLAYED)
        assert values["answer_match"] == values["success"] == 2 / 3 and values["characters"] == 2.0
    assert compute_metrics([evaluate.load(str(lengths))], PLAYED, reference="secret")["right"] == 3, "numbers as text"
    path = lengths / "lengths.py"
    path.write_text(LENGTHS.replace('"string"', '"int32"').replace("map(len, predictions)", "predictions"))
    with pytest.raises(ValueError, match=r"metric lengths cannot take .*\$x\$"):
        compute_metrics([str(path)], PLAYED, reference="secret")


@pytest.mark.parametrize(
    ("metric", "reference", "message"),
    [
        ("sucess", "answer", r"no metric 'sucess'.*answer_match, episode_return, pass_at_k, success"),
        ("./nowhere", "answer", r"no metric './nowhere'"),
        ("answer_match", "solution", r"answer_match needs references.*'solution'"),
    ],
)
def test_what_cannot_be_computed_is_named(metric: str, reference: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute_metrics([metric], PLAYED, reference=reference)


def test_success_that_is_not_reported(lengths: Path) -> None:
    with pytest.raises(ValueError, match=r"success needs successes, but 1 episodes"):
        compute_metrics(["success"], results(episode(1, "a", None, answer="a")))


def test_without_the_package_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"agile-trainers\[eval\]"):
        compute_metrics(["success"], PLAYED)


@pytest.mark.parametrize("name", ["exact_match", "someone/metric", "https://example.org/metric.py"])
def test_code_of_the_hub_runs_with_consent_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(evaluate, "load", asked.append)
    with pytest.raises(ValueError, match=r"runs code of its repository.*--trust_remote_code"):
        compute_metrics([name], PLAYED)
    assert asked == []
    load_metrics([name, "success"], trust_remote_code=True)
    assert asked == [name, str(METRICS_FOLDER / "success")]
    load_metrics(["success"])
    assert len(asked) == 3
