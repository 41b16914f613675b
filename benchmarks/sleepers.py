"""The environments of ``slow_environments.py``, in a module that other processes import quickly."""

from __future__ import annotations

import asyncio
import time
from typing import Any

TURNS, SECONDS = 8, 0.05
HANGS = 13
"""Seed of the episode that hangs, if one does."""


class Sleeper:
    """An environment that sleeps in every step."""

    def __init__(self, hanging: bool = False):
        self.hanging = hanging

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.turn, self.seconds = 0, 3600.0 if self.hanging and seed == HANGS else SECONDS
        return "Go on.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        time.sleep(self.seconds)
        return self._answer()

    def _answer(self) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        return "And on.", 1.0, self.turn == TURNS, False, {}


class AsyncSleeper(Sleeper):
    """The same environment with coroutines."""

    async def reset(  # type: ignore[override]
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        return super().reset(seed, options)

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:  # type: ignore[override]
        await asyncio.sleep(self.seconds)
        return self._answer()
