"""Keeps the results of named cases in a file, a line each, so that a run that is cut off goes on where it ended."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

LASTING = ("passed", "skipped")
"""Outcomes that are not tried again."""


class CaseLog:
    """The last result of each case.

    Args:
        file: JSON lines; made with its folder at the first result.
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    def results(self) -> dict[str, dict[str, Any]]:
        """Read the last result of each case, by name; a line that was cut off is passed over."""
        found: dict[str, dict[str, Any]] = {}
        for line in self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []:
            try:
                result = json.loads(line)
            except json.JSONDecodeError:
                continue
            found.pop(result["case"], None)
            found[result["case"]] = result
        return found

    def write(self, case: str, outcome: str, seconds: float, **more: Any) -> None:
        """Add the result of a case: ``passed``, ``skipped``, ``failed``, or ``died`` where its process ended."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        result = {"case": case, "outcome": outcome, "seconds": round(seconds, 2), "at": time.time(), **more}
        with self.file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(result) + "\n")

    def finished(self, since: float) -> set[str]:
        """Names of the cases that have a lasting result, or any result since a time (seconds since 1970)."""
        return {name for name, one in self.results().items() if one["outcome"] in LASTING or one["at"] >= since}

    def table(self) -> str:
        """The results as a Markdown table."""
        lines = ["| case | outcome | seconds | figures |", "|---|---|---|---|"]
        for name, one in self.results().items():
            figures = ", ".join(f"{key} {_short(value)}" for key, value in one.get("figures", {}).items())
            text = figures or one.get("reason", "")
            lines.append(f"| {name} | {one['outcome']} | {one['seconds']:.1f} | {text.replace('|', '/')} |")
        return "\n".join(lines) + "\n"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
