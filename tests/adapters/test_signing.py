"""Checkpoints whose reading could run code: DeepSpeed's, and sharded FSDP ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agile_trainers.adapters.folders import RECORD, CheckpointError, write_json
from agile_trainers.checkpoints.integrity import (
    KEY_FILE,
    MARKER,
    OPTION,
    check_complete,
    is_trusted,
    keyed_digest,
    mark_complete,
    sign,
)

STATES = {"deepspeed": "global_step4/mp_rank_00_model_states.pt", "fsdp": "optimizer_0/.metadata"}


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(OPTION, raising=False)
    monkeypatch.setenv(KEY_FILE, str(tmp_path / "home" / "key"))
    return tmp_path / "home" / "key"


@pytest.fixture(params=STATES)
def states(request: pytest.FixtureRequest) -> str:
    return request.param


def save(folder: Path, engine: str) -> Path:
    write_json(folder / RECORD, {"lora": {}, "algorithm": "Multi-turn GRPO", "global_step": 4})
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    (folder / STATES[engine]).parent.mkdir(parents=True)
    (folder / STATES[engine]).write_bytes(b"a pickle")
    if engine == "deepspeed":
        (folder / "latest").write_text("global_step4")
    mark_complete(folder)
    return folder


def test_ones_own_is_read_and_another_users_is_not(
    tmp_path: Path, key: Path, states: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path / "checkpoint-4", states)
    assert check_complete(folder) == folder and key.stat().st_mode & 0o777 == 0o600
    kept = key.read_bytes()
    save(tmp_path / "checkpoint-5", states)
    assert key.read_bytes() == kept and check_complete(folder) == folder
    for other in ("others", "short"):
        monkeypatch.setenv(KEY_FILE, str(tmp_path / other))
        if other == "short":
            (tmp_path / other).write_bytes(b"")
        with pytest.raises(CheckpointError, match=rf"{STATES[states]}.*{OPTION}=1"):
            check_complete(folder)
    monkeypatch.setenv(OPTION, "1")
    assert check_complete(folder) == folder


@pytest.mark.parametrize("forgery", ["changed and marked anew", "a file more", "no signature", "signature of another"])
def test_forgeries(tmp_path: Path, key: Path, states: str, forgery: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path / "checkpoint-4", states)
    marker = json.loads((folder / MARKER).read_text())
    if forgery == "changed and marked anew":
        (folder / STATES[states]).write_bytes(b"an evil pickle")
        monkeypatch.setenv(KEY_FILE, str(tmp_path / "theirs"))
        mark_complete(folder)
        monkeypatch.setenv(KEY_FILE, str(key))
    elif forgery == "a file more":
        more = folder / STATES[states].replace("rank_00", "rank_01").replace("optimizer_0", "optimizer_1")
        more.parent.mkdir(exist_ok=True)
        more.write_bytes(b"an evil pickle")
    elif forgery == "no signature":
        del marker["signature"]
        write_json(folder / MARKER, marker)
    else:
        marker["signature"] = json.loads((save(tmp_path / "checkpoint-5", states) / MARKER).read_text())["signature"]
        marker["files"]["README"] = marker["files"].pop("adapter_model.safetensors")
        (folder / "adapter_model.safetensors").rename(folder / "README")
        write_json(folder / MARKER, marker)
    with pytest.raises(CheckpointError, match=rf"{OPTION}=1|without"):
        check_complete(folder)


def test_other_checkpoints_need_no_key(tmp_path: Path, key: Path) -> None:
    folder = tmp_path / "checkpoint-1"
    write_json(folder / RECORD, {"lora": {}, "algorithm": "Multi-turn GRPO", "global_step": 1})
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    (folder / "optimizer.pt").write_bytes(b"states")
    mark_complete(folder)
    assert check_complete(folder) == folder and not key.exists()
    assert "signature" not in json.loads((folder / MARKER).read_text())


def test_without_a_place_for_the_key_the_user_is_told(
    tmp_path: Path, key: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key.parent.write_text("no folder")
    folder = save(tmp_path / "checkpoint-4", "deepspeed")
    assert OPTION in caplog.text and KEY_FILE in caplog.text
    with pytest.raises(CheckpointError, match=OPTION):
        check_complete(folder)


def test_what_is_not_pushed_may_be_missing(tmp_path: Path, key: Path) -> None:
    """A checkpoint from the Hub comes without the pickled arguments, and is whole."""
    folder = save(tmp_path / "checkpoint-4", "deepspeed")
    (folder / "training_args.bin").write_bytes(b"a pickle")
    mark_complete(folder)
    (folder / "training_args.bin").unlink()
    assert check_complete(folder) == folder


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_that_others_can_read_signs_nothing(tmp_path: Path, monkeypatch, caplog, mode: int) -> None:
    """Whoever reads it can sign a pickle."""
    monkeypatch.setenv(KEY_FILE, str(tmp_path / "key"))
    listed = {"latest": {"size": 1}}
    signature = sign(listed)
    assert is_trusted(listed, listed, signature) and (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    (tmp_path / "key").chmod(mode)
    assert sign(listed) is None and not is_trusted(listed, listed, signature) and keyed_digest("x") is None
    assert f"others may use it (mode {mode:03o}). Run chmod 600" in caplog.text
