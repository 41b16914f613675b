"""Episodes as numbers."""

from __future__ import annotations

from dataclasses import replace

from agile_trainers.rollout.forest import Fork
from agile_trainers.rollout.metrics import episode_metrics, summarize, with_success
from agile_trainers.types import StopReason, Trajectory, Turn


def episode(stop: StopReason, turns: list[tuple[int, str, float]], success: bool | None = None) -> Trajectory:
    """Turns of (tokens, finish reason, reward), with one observation token after each; three prompt tokens."""
    made, position = [], 0
    for tokens, finish_reason, reward in turns:
        made.append(Turn(position, position + tokens, "", finish_reason, reward))
        position += tokens + 1
    if success is not None:
        made[-1].info["success"] = success
    return Trajectory([1, 2, 3], [4] * position, [0.0] * position, made, stop)


def test_a_row_by_hand() -> None:
    played = episode(StopReason.MAX_TURNS, [(4, "length", 0.5), (2, "stop", 1.0)], success=False)
    for turn in played.turns:
        turn.observation = " "
    row = episode_metrics(played)
    assert row == {
        "return": 1.5,
        "success": False,
        "turns": 2,
        "action_tokens": 6,
        "tokens": 3 + 8,
        "answers_cut": 1,
        "observations_cut": 0,
        "observations_empty": 1,
        "early_return": 0.5,
        "rewrites": dict.fromkeys(Fork, 0),
        "questions": 0,
        "read_again": None,
        "clipped": True,
        "stop_reason": "max_turns",
        "environment": None,
    }


def test_a_summary_by_hand() -> None:
    """Returns 1, 3, -1 (mean 1, sample deviation 2); the failed episode counts for tokens and stop reasons alone.

    The third episode reports no success, as others of its environment do, and counts as unsuccessful.
    """
    episodes = [
        episode(StopReason.TERMINATED, [(2, "stop", 0.5), (4, "length", 0.5)], success=True),
        replace(episode(StopReason.MAX_TURNS, [(3, "stop", 3.0)], success=False), observations_cut=2),
        episode(StopReason.TERMINATED, [(1, "stop", -1.0)]),
        episode(StopReason.ENVIRONMENT_ERROR, [(5, "length", 100.0)], success=True),
    ]
    assert summarize([episode_metrics(trajectory) for trajectory in episodes]) == {
        "return/mean": 1.0,
        "return/std": 2.0,
        "return/min": -1.0,
        "return/max": 3.0,
        "success": 1 / 3,
        "success/unreported": 1 / 3,
        "turns/mean": 4 / 3,
        "turns/max": 2.0,
        "tokens_per_turn": 3.0,
        "answers_cut": 0.4,
        "observations_cut": 0.5,
        "stop/terminated": 0.5,
        "stop/truncated": 0.0,
        "stop/max_turns": 0.25,
        "stop/context_full": 0.0,
        "stop/rewrite_full": 0.0,
        "stop/environment_error": 0.25,
        "stop/environment_timeout": 0.0,
    }


def test_success_is_reported_by_environment() -> None:
    """One environment's word says nothing of another; what is known of earlier episodes counts."""
    silent = replace(episode(StopReason.TERMINATED, [(1, "stop", 1.0)]), environment_name="a")
    other = replace(episode(StopReason.TERMINATED, [(1, "stop", 1.0)], success=True), environment_name="b")
    rows = [episode_metrics(one) for one in (silent, other)]
    assert summarize(rows)["success"] == 1.0 and "success/unreported" not in summarize(rows)
    assert summarize(rows, {"a"})["success"] == 0.5 and summarize(rows[:1], {"a"})["success"] == 0.0
    assert summarize(rows[:1], {"a"})["success/unreported"] == 1.0
    failed = episode_metrics(replace(episode(StopReason.ENVIRONMENT_ERROR, []), environment_name="a"))
    assert with_success([failed], {"a"}) == [failed] and "success" not in summarize([failed], {"a"})


def test_a_summary_leaves_out_what_has_no_episodes() -> None:
    failed = summarize([episode_metrics(episode(StopReason.ENVIRONMENT_TIMEOUT, []))])
    assert {name: value for name, value in failed.items() if value} == {"stop/environment_timeout": 1.0}
    assert set(failed) == {"observations_cut", *(f"stop/{reason.value}" for reason in StopReason)}
    single = summarize([episode_metrics(episode(StopReason.TERMINATED, [(1, "stop", 2.0)]))])
    assert single["return/std"] == 0.0 and "success" not in single
    assert all(type(value) is float for value in single.values())
