"""Where a trainer's environments run, and how many at once: the episodes are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from games import Chatter, make_trainer
from recorded import recorded


def completions(folder: Path) -> list[list[int]]:
    records = recorded(folder)
    return [record["completion_ids"] for record in records]


def test_a_limit_on_environments_changes_how_many_are_made_and_no_episode(embedded_model: Path, tmp_path: Path) -> None:
    made: list[Chatter] = []

    def factory() -> Chatter:
        made.append(Chatter())
        return made[-1]

    counts = []
    for name, limit in (("all", None), ("two", 2)):
        made.clear()
        make_trainer(embedded_model, tmp_path / name, environment=factory, max_environments=limit).train()
        counts.append(len(made))
    all_at_once, two = (completions(tmp_path / name) for name in ("all", "two"))
    assert all_at_once == two and counts[0] > counts[1] >= 2


@pytest.mark.slow
def test_processes_play_the_same_episodes_as_inline(embedded_model: Path, tmp_path: Path) -> None:
    """The processes import this test's module, and with it the training libraries."""
    make_trainer(embedded_model, tmp_path / "inline").train()
    make_trainer(embedded_model, tmp_path / "processes", environment_processes=2).train()
    inline, processes = (completions(tmp_path / name) for name in ("inline", "processes"))
    assert inline == processes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_environments": 0}, "max_environments must be 1 or more"),
        (
            {"environment_processes": 2, "environment_workers": 2},
            "Leave environment_workers and max_environments unset",
        ),
    ],
)
def test_limits_are_checked_at_construction(
    embedded_model: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(embedded_model, tmp_path, **changes)
