"""A build lock that a killed run left is removed; one that a process holds stays."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from launching import run
from torch.utils.file_baton import FileBaton

from agile_trainers.config.build_locks import remove_abandoned_locks
from agile_trainers.trainers import MultiTurnGRPOConfig, build_locks


def _build(lock: Path, holding: Any) -> None:
    FileBaton(str(lock)).try_acquire()
    FileBaton(str(lock.with_name("other"))).try_acquire()
    held = FileBaton(str(lock))
    held.fd = os.open(lock, os.O_RDONLY)
    holding.set()
    multiprocessing.Event().wait()


def test_only_a_lock_that_nobody_holds_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(build_locks, "_is_shared", lambda folder: False)
    lock = tmp_path / "py311_cpu" / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    context = multiprocessing.get_context("spawn")
    holding = context.Event()
    process = context.Process(target=_build, args=(lock, holding))
    process.start()
    holding.wait()
    assert remove_abandoned_locks(tmp_path) == [] and lock.is_file()
    process.kill()
    process.join()
    assert remove_abandoned_locks(tmp_path) == [lock] and not lock.exists()
    assert FileBaton(str(lock)).try_acquire(), "the next build takes the lock"


def test_on_a_shared_file_system_the_lock_is_named_and_stays(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(build_locks, "_is_shared", lambda folder: True)
    monkeypatch.setattr(build_locks.logger, "warning", lambda text, *values: said.append(text % values))
    (tmp_path / "extension").mkdir()
    (tmp_path / "extension" / "lock").touch()
    assert remove_abandoned_locks(tmp_path) == []
    assert str(tmp_path / "extension" / "lock") in said[0] and "remove the file" in said[0]


def test_a_configuration_for_deepspeed_looks_for_locks_before_deepspeed_builds(tmp_path, monkeypatch):
    class LookedError(Exception):
        """Stops the configuration there: nothing of DeepSpeed may be set up in this process."""

    def look() -> None:
        raise LookedError

    monkeypatch.setattr("agile_trainers.config.config.remove_abandoned_locks", look)
    MultiTurnGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(LookedError):
        MultiTurnGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)


def test_a_test_that_times_out_ends_what_it_launched(tmp_path):
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], start_new_session=True)"
    with pytest.raises(subprocess.TimeoutExpired) as stop:
        run([sys.executable, "-c", launcher], timeout=2)
    printed = stop.value.output
    assert not printed or not psutil.pid_exists(int(printed))
