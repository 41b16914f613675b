"""Settings and fixtures of the whole suite. The environment variables come before anything imports torch."""

from __future__ import annotations

import os
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a second thread on tiny tensors costs ten times what it brings
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Keep what `datasets` caches out of the home folder."""
    folder = tempfile.TemporaryDirectory(prefix="datasets-")
    config.add_cleanup(folder.cleanup)
    os.environ["HF_DATASETS_CACHE"] = folder.name


class Clock:
    """Stands still until something hangs: no machine is so slow that anything else takes longer than it may."""

    now, pace = 0.0, 0.0
    """The time, and by how much each look at the clock moves it."""

    def monotonic(self) -> float:
        self.now += self.pace
        return self.now

    def run_out(self) -> None:
        """All that is under way has taken too long."""
        self.now += 1e6


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What environments are timed by. A limit is still the seconds after which the clock is looked at."""
    made = Clock()
    for module in ("rollout.environment_pool", "envs.checker"):
        monkeypatch.setattr(f"agile_trainers.{module}.time", made)
    return made


@pytest.fixture(scope="session")
def embedded_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an untrained embedded model and its tokenizer. Read only: it is shared by all tests of a worker."""
    from agile_trainers.embedded import make_embedded_model

    return make_embedded_model(tmp_path_factory.mktemp("embedded") / "model")
