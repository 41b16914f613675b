"""The environment of most trainer tests, in a module that is quick to import."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any


class Chatter:
    """Talks for one to four turns (by the seed), more or less, and rewards what it hears by an arbitrary rule."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.options, self.turn = options, 0
        self.length = 1 + (seed or 0) % 4
        return f"start {(seed or 0) % 7} " + "more " * ((seed or 0) % 5), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        reward = sum(map(ord, action)) % 5 / 4
        done = self.turn >= self.length
        return "again " * (1 + len(action) % 4), reward, done, False, {"success": reward > 0.5}


class Late(Chatter):
    """Takes one of ``seconds`` for a step, drawn by ``chance``."""

    seconds: Sequence[float] = (0.0, 0.0, 0.02)
    chance = random.Random()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        time.sleep(self.chance.choice(self.seconds))
        return super().step(action)
