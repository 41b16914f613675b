"""Settings and fixtures of the whole suite. The environment variables come before anything imports torch."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a second thread on tiny tensors costs ten times what it brings
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def embedded_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an untrained embedded model and its tokenizer. Read only: it is shared by all tests of a worker."""
    from agile_trainers.embedded import make_embedded_model

    return make_embedded_model(tmp_path_factory.mktemp("embedded") / "model")
