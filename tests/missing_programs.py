"""Lets a test wait for a program of the system, and says in the last lines which are missing and how many tests wait.

A plugin of pytest. A test that needs such a program has its mark; pip installs everything else.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Generator
from functools import partial

import pytest

_WAITS = "waits for"


def _why_not_isolated_by(level: str) -> str:
    from agile_trainers.envs.isolation import levels as isolation

    reason = isolation.why_not(level)
    assert not reason.startswith(isolation.LEAK), f"{level}: {reason}"
    return reason


def chromium() -> str | None:
    """The path of Chromium."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


WHY_NOT = {
    "bubblewrap": partial(_why_not_isolated_by, "bubblewrap"),
    "landlock": partial(_why_not_isolated_by, "landlock"),
    "node": lambda: "" if shutil.which("node") else "Node.js is not installed (apt install nodejs)",
    "browser": lambda: "" if chromium() else "Chromium is not installed (apt install chromium)",
}
"""Marks, and why what they need is missing here; empty if it is there."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark, why_not in WHY_NOT.items():
        if item.get_closest_marker(mark) and (reason := why_not()):
            item.user_properties.append((_WAITS, (mark, reason)))
            pytest.skip(reason)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None, object, object]:
    result = yield
    reports = terminalreporter.getreports("skipped")
    said = [one for report in reports for one in getattr(report, "user_properties", ())]  # none of a skipped file
    for (mark, reason), count in Counter(tuple(what) for name, what in said if name == _WAITS).items():
        terminalreporter.write_line(f"Tests that wait for {mark}: {count} ({reason})", yellow=True)
    return result
