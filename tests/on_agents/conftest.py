"""The real clients of agents, in an environment of their own (``make test-agents``)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OPENAI_AGENTS_DISABLE_TRACING", "1")  # these would report to their makers
os.environ.setdefault("LANGSMITH_TRACING", "false")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "true")
os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")

import pytest

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / name) for name in ("rollout/agents", "trainers", "envs", "viewer")]


@pytest.fixture(scope="session")
def embedded_model(two_layers: Path) -> Path:
    return two_layers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.agents)


@pytest.fixture
def weather() -> Iterator[object]:
    """An endpoint whose model asks the tool for the weather in two towns, one after the other, and then answers."""
    from served_agents import Weather

    with Weather() as served:
        yield served
