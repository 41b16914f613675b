"""One run with TensorBoard, W&B and Trackio, offline, read back from what each wrote, and searched for secrets."""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest

pytest.importorskip("tensorboard", reason="the trackers are not installed: pip install 'agile-trainers[dev]'")
pytest.importorskip("trackio", reason="the same")
pytest.importorskip("wandb", reason="the same")

import wandb
from games import make_trainer
from planted import SECRETS, arguments, files_of, found_in
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trackio.sqlite_storage import SQLiteStorage
from trackio.utils import TRACKIO_DIR
from transformers import AutoTokenizer
from wandb.proto import wandb_internal_pb2

from agile_trainers.envs.registry import make_environment_factory

TURNS = {"turn/1/reward", "turn/1/advantage", "turn/1/entropy"}


@dataclass
class Reported:
    """What a run wrote for the trackers."""

    folder: Path
    model: Path
    metrics: set[str]
    """Names of its metrics of turns."""


@pytest.fixture(scope="module")
def reported(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reported]:
    """A run of an environment whose arguments are secrets, as options and the process's variables are."""
    folder = tmp_path_factory.mktemp("reported")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        for place in ("", "_CACHE", "_CONFIG", "_DATA"):
            patch.setenv(f"WANDB{place}_DIR", str(folder))
        patch.setenv("TENSORBOARD_LOGGING_DIR", str(folder / "events"))
        for name, value in SECRETS.items():
            patch.setenv(name.upper(), value)
        trainer = make_trainer(
            embedded_model, folder / "run", environment=make_environment_factory("planted:Keeper", **arguments()),
            report_to=["tensorboard", "wandb", "trackio"], log_completions=True, max_steps=2, logging_steps=1, max_turns=2,
            run_name="a run", hub_token=SECRETS["hugging_face"], model_init_kwargs={"token": SECRETS["hugging_face"]},
            chat_template_kwargs={"license": SECRETS["license"]}, stop_strings=[SECRETS["pin_code"], *"aeiou01234 !"],
        )  # fmt: skip
        trainer.train()
        wandb.finish()
    logs = {name for entry in trainer.state.log_history for name in entry}
    yield Reported(folder, embedded_model, {name for name in logs if name.startswith("turn/")})


def test_no_value_of_an_argument_option_or_variable_is_reported(reported: Reported) -> None:
    trackers = (reported.folder / "events", reported.folder / "wandb", Path(TRACKIO_DIR))
    files = [one for folder in trackers for one in files_of(folder)]
    assert len(files) > 5 and found_in(files, AutoTokenizer.from_pretrained(reported.model)) == set()
    everything = b"".join(content for _, content in files)
    assert everything.count(b"planted:Keeper") or b"withheld" in everything or b"hub_token" in everything, (
        "options are there"
    )


def test_tensorboard(reported: Reported) -> None:
    (file,) = (reported.folder / "events").rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file))
    events.Reload()
    found = {tag.removeprefix("train/") for tag in events.Tags()["scalars"]}
    assert TURNS <= reported.metrics <= found
    assert [event.step for event in events.Scalars("train/turn/1/reward")] == [1, 2]


def wandb_metrics(file: Path) -> dict[str, list[float]]:
    """Read the metrics of an offline run: a LevelDB log of protocol buffers in blocks of 32 KiB after 7 bytes."""
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


def test_wandb_offline(reported: Reported) -> None:
    (file,) = reported.folder.rglob("run-*.wandb")
    found = wandb_metrics(file)
    assert TURNS <= reported.metrics <= set(found)
    assert len(found["turn/1/reward"]) == 2, "once per log"
    tables = sorted(reported.folder.rglob("media/table/completions*.table.json"))
    assert tables
    table = json.loads(tables[-1].read_text())
    shown = pd.DataFrame(table["data"], columns=table["columns"])
    spoken = [[message["role"] for message in conversation] for conversation in shown["completion"]]
    assert ["assistant", "user", "assistant"] in [roles[:3] for roles in spoken], "turn by turn"
    assert {"step", "prompt", "completion", "advantage"} <= set(shown.columns)


def test_trackio(reported: Reported) -> None:
    (project,) = SQLiteStorage.get_projects()
    (run,) = SQLiteStorage.get_runs(project)
    logs = SQLiteStorage.get_logs(project, run)
    found = {name.removeprefix("train/") for log in logs for name in log}
    assert TURNS <= reported.metrics <= found
    assert sum("train/turn/1/reward" in log for log in logs) == 2, "once per log"
    rows = [row for log in logs if "completions" in log for row in log["completions"]["_value"]]
    assert {"step", "prompt", "completion", "advantage"} <= set(rows[0])
    spoken = [[message["role"] for message in row["completion"]] for row in rows]
    assert ["assistant", "user", "assistant"] in [roles[:3] for roles in spoken], "turn by turn"
