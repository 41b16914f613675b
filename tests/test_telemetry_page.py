"""The page of what leaves the machine names switches that the installed libraries read."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/checkpoints.md").read_text(encoding="utf-8").partition("### Telemetry of the libraries")[2]
ROWS = re.findall(r"^\| `(\w+)`[^|]*\| ([^|]*) \| (.*) \|$", PAGE, flags=re.M)
READ_BY = {"trl": "huggingface_hub", "datasets": "huggingface_hub"}
"""Libraries that leave their switch to another one."""


def test_the_table_has_rows() -> None:
    assert [library for library, _, _ in ROWS] == [
        "trl", "huggingface_hub", "transformers", "datasets", "vllm", "wandb", "gradio",
    ]  # fmt: skip


@pytest.mark.parametrize(("library", "switches"), [(library, switches) for library, _, switches in ROWS])
def test_a_switch_is_read_by_its_library(library: str, switches: str) -> None:
    spec = find_spec(READ_BY.get(library, library))
    if spec is None or spec.origin is None:
        pytest.skip(f"{library} is not installed")
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in Path(spec.origin).parent.rglob("*.py")]
    for name in re.findall(r"`(\w+)=", switches):
        assert any(name in text for text in texts), f"{library} does not read {name}"
