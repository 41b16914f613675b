"""The page of the clients of agents names the versions that ``make test-agents`` installs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_versions_are_those_that_are_tested() -> None:
    pins = dict(
        re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "requirements/agents.txt").read_text(encoding="utf-8"), flags=re.M)
    )
    page = (ROOT / "docs/agent_clients.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w-]+)(?:, `\w+`)? \| ([\d.]+) \|", page, flags=re.M)
    assert len(rows) == 10 and {name: pins.get(name) for name, _ in rows} == dict(rows)
