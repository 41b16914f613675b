"""Writes ``agile_trainers/evaluation/panels.json``, from which the panels of the ready tasks follow (``make panels``)."""

from __future__ import annotations

from typing import Any

from agile_environments import TASKS
from agile_trainers.adapters.folders import write_json
from agile_trainers.evaluation.panels import SHIPPED, SHIPPED_EPISODES, make_panel

OF_QUESTIONS = ("calculator", "countdown", "math", "search_qa")
"""Tasks with a split for tests."""


def shipped() -> dict[str, Any]:
    """The content of the file."""
    arguments = {name: {"split": "test"} if name in OF_QUESTIONS else {} for name in TASKS}
    return {
        f"agile:{name}": {
            "arguments": given,
            "panel": make_panel(f"agile:{name}", SHIPPED_EPISODES, arguments=given).hash,
        }
        for name, given in arguments.items()
    }


if __name__ == "__main__":
    write_json(SHIPPED, shipped())
