"""vLLM on CPU, in this process. The environment variables come before anything imports vLLM."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the trainer's threads are vLLM's
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import pytest

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / name) for name in ("trainers", "rollout", "launch", "populations")]


@pytest.fixture(scope="session")
def embedded_model(two_layers: Path) -> Path:
    return two_layers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from engines import make_engine  # needs vLLM

    return make_engine(tmp_path_factory.mktemp("base"))
