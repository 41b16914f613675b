"""Runs with TensorBoard and W&B, offline, read back from what each wrote.

They are skipped where these are missing; `pip install tensorboard wandb` installs them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from games import make_trainer

pytestmark = pytest.mark.slow


def train(model: Path, folder: Path, tracker: str) -> list[str]:
    """Train with a tracker, and return the metrics of turns that it should hold."""
    trainer = make_trainer(
        model, folder, report_to=[tracker], log_completions=True, max_steps=2, logging_steps=1, max_turns=2
    )
    trainer.train()
    logs = {name for entry in trainer.state.log_history for name in entry}
    return sorted(name for name in logs if name.startswith("turn/"))


def test_tensorboard(embedded_model, tmp_path, monkeypatch):
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    expected = train(embedded_model, tmp_path, "tensorboard")
    (file,) = (tmp_path / "events").rglob("events.out.tfevents.*")
    events = reading.EventAccumulator(str(file))
    events.Reload()
    found = {tag.removeprefix("train/") for tag in events.Tags()["scalars"]}
    assert {"turn/1/reward", "turn/1/advantage", "turn/1/entropy"} <= set(expected) <= found
    assert [event.step for event in events.Scalars("train/turn/1/reward")] == [1, 2]


def test_wandb_offline(embedded_model, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    expected = train(embedded_model, tmp_path, "wandb")
    tables = sorted(tmp_path.rglob("media/table/completions*.table.json"))
    assert tables and expected
    table = json.loads(tables[-1].read_text())
    shown = pd.DataFrame(table["data"], columns=table["columns"])
    spoken = [[message["role"] for message in conversation] for conversation in shown["completion"]]
    assert ["assistant", "user", "assistant"] in [roles[:3] for roles in spoken], "turn by turn"
    assert {"step", "prompt", "completion", "advantage"} <= set(shown.columns)
