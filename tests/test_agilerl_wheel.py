"""AgileRL's wheel, where `make test-agilerl` installed it: what the tests of docs/agilerl.md read of it is so."""

from __future__ import annotations

import json

import pytest
from agilerl_wheel import RECORDED, read, wheel

PACKAGE = wheel()
pytestmark = pytest.mark.skipif(
    PACKAGE is None, reason="AgileRL is not installed in .venv-agilerl: run `make test-agilerl`"
)


def test_the_recorded_defaults_and_methods_are_the_wheels() -> None:
    assert PACKAGE is not None
    assert json.loads(json.dumps(read(PACKAGE))) == json.loads(RECORDED.read_text(encoding="utf-8"))


def test_the_optimizer_is_adamw_with_its_own_defaults() -> None:
    assert PACKAGE is not None and read(PACKAGE)["optimizer"] == "AdamW"
