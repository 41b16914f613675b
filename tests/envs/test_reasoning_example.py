"""The example trains, and what it learns holds on questions it never saw."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from installed import needs
from recorded import recorded

needs("reasoning_gym")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "reasoning_gym_chain.py"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_success_on_held_out_questions_rises(seed: int, tmp_path: Path) -> None:
    subprocess.run([sys.executable, EXAMPLE, "--seed", str(seed), "--output_dir", tmp_path], check=True)
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    # 1000 questions: one standard error is about .013
    assert summary["after"] > summary["before"] + 0.03 and summary["after"] > 0.8
    asked = {kind: {one["prompt"][0]["content"] for one in recorded(tmp_path, kind)} for kind in ("train", "eval")}
    assert len(asked["eval"]) > 300 and not asked["train"] & asked["eval"]
