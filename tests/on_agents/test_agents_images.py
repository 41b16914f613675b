"""Screenshots by the clients of this environment, over several turns: a training step."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("langgraph", reason="the clients of agents are not installed; make test-agents installs them")

from image_episodes import ASK, saved, train_on_screenshots


@pytest.mark.parametrize("dialect", ASK)
def test_a_training_step_on_screenshots(dialect: str, tmp_path: Path) -> None:
    train_on_screenshots(saved("idefics3", tmp_path / "model"), tmp_path / "run", dialect)
