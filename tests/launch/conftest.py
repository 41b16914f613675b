"""Launched processes train the embedded model of two layers, which sharding splits."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest

# DeepSpeed compiles with `ninja`, one of its dependencies, which it looks for as in an environment that is activated.
os.environ["PATH"] = os.pathsep.join((sysconfig.get_path("scripts"), os.environ["PATH"]))


@pytest.fixture(scope="session")
def embedded_model(two_layers: Path) -> Path:
    return two_layers
