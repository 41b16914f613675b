"""Runs that are pushed to a Hub."""

from __future__ import annotations

import os
from pathlib import Path

import forks
from hub_server import Hub

SCRIPT = Path(__file__).with_name("hub_push.py")


def environment(hub: Hub, home: Path) -> dict[str, str]:
    return {
        **os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }  # fmt: skip


def run(hub: Hub, command: str, model: Path, folder: Path, script: Path = SCRIPT) -> None:
    done = forks.run([script, command, model, folder], env=environment(hub, folder / f"home-{command}"))
    assert done.returncode == 0, done.stderr[-4000:]
