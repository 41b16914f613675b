"""Levels of isolation, for the tests of what executes a model's text."""

from __future__ import annotations

import pytest

from agile_trainers.envs.isolation import levels as isolation


@pytest.fixture(autouse=True)
def allowed_where_nothing_isolates(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not depend on the level is tested on every machine, also where the kernel offers none."""
    if isolation.level() == isolation.NONE:
        monkeypatch.setenv(isolation.OPTION, isolation.NONE)


@pytest.fixture(params=[pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("bubblewrap", "landlock")])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each level in turn."""
    monkeypatch.setenv(isolation.OPTION, request.param)
    print(f"level of isolation: {isolation.level()}")
    return request.param


@pytest.fixture
def nothing_isolates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose kernel and programs offer nothing."""
    monkeypatch.setattr(isolation, "why_not", lambda name: "" if name == isolation.NONE else "not here")
    monkeypatch.delenv(isolation.OPTION, raising=False)
