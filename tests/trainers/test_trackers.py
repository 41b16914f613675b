"""Runs with TensorBoard, W&B and Trackio, offline, read back from what each wrote.

They are skipped where these are missing; `pip install tensorboard wandb trackio` installs them.
"""

from __future__ import annotations

import json
import struct
from collections import defaultdict
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


def wandb_metrics(file: Path) -> dict[str, list[float]]:
    """Read the metrics of an offline run: a LevelDB log of protocol buffers in blocks of 32 KiB after 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts, found = file.read_bytes(), 7, b"", defaultdict(list)
    while at + 7 < len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left  # a header does not cross blocks
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record.FromString(parts)
            parts = b""
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                found[name.removeprefix("train/")].append(json.loads(item.value_json))
    return found


def test_wandb_offline(embedded_model, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    expected = train(embedded_model, tmp_path, "wandb")
    wandb.finish()
    (file,) = tmp_path.rglob("run-*.wandb")
    found = wandb_metrics(file)
    assert {"turn/1/reward", "turn/1/advantage", "turn/1/entropy"} <= set(expected) <= set(found)
    assert len(found["turn/1/reward"]) == 2, "once per log"
    tables = sorted(tmp_path.rglob("media/table/completions*.table.json"))
    assert tables and expected
    table = json.loads(tables[-1].read_text())
    shown = pd.DataFrame(table["data"], columns=table["columns"])
    spoken = [[message["role"] for message in conversation] for conversation in shown["completion"]]
    assert ["assistant", "user", "assistant"] in [roles[:3] for roles in spoken], "turn by turn"
    assert {"step", "prompt", "completion", "advantage"} <= set(shown.columns)


def test_trackio(embedded_model, tmp_path):
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    expected = train(embedded_model, tmp_path, "trackio")
    (project,) = SQLiteStorage.get_projects()
    (run,) = SQLiteStorage.get_runs(project)
    logs = SQLiteStorage.get_logs(project, run)
    found = {name.removeprefix("train/") for log in logs for name in log}
    assert {"turn/1/reward", "turn/1/advantage", "turn/1/entropy"} <= set(expected) <= found
    assert sum("train/turn/1/reward" in log for log in logs) == 2, "once per log"
    rows = [row for log in logs if "completions" in log for row in log["completions"]["_value"]]
    assert {"step", "prompt", "completion", "advantage"} <= set(rows[0])
    spoken = [[message["role"] for message in row["completion"]] for row in rows]
    assert ["assistant", "user", "assistant"] in [roles[:3] for roles in spoken], "turn by turn"
