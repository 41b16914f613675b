"""The model cards of the folders that a run leaves."""

from __future__ import annotations

from pathlib import Path

import yaml


def cards_of(root: Path) -> dict[str, str]:
    """The card of each folder with an adapter, by its path; none is PEFT's template, and each has metadata."""
    found = {}
    for config in root.rglob("adapter_config.json"):
        text = config.with_name("README.md").read_text(encoding="utf-8")
        assert "Information Needed" not in text and "How to Get Started" not in text, config
        assert yaml.safe_load(text.split("---")[1])["library_name"] == "peft"
        found[config.parent.relative_to(root).as_posix()] = text
    return found
