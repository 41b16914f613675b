"""Launched processes train the embedded model of two layers, which sharding splits."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def embedded_model(two_layers: Path) -> Path:
    return two_layers
