"""Environments that are played in processes of their own: a module that is quick to import there."""

from __future__ import annotations

import os
import time
from typing import Any


class Elsewhere:
    """Two turns; what the step does is in the options."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.what, self.turns = (options or {}).get("what"), 0
        return "go", {"process": os.getpid(), "seed": seed}

    def step(self, action: str) -> Any:
        self.turns += 1
        if self.what == "raise":
            raise KeyError("a bug")
        if self.what == "die":
            os._exit(7)
        if self.what == "hang":
            time.sleep(600)
        if self.what == "unsendable":
            return "up", 0.0, False, False, {"function": lambda: None}
        return "up", float(self.turns), self.turns == 2, False, {"process": os.getpid()}


class AsyncElsewhere(Elsewhere):
    """The same, awaited over there."""

    async def step(self, action: str) -> Any:  # type: ignore[override]
        return super().step(action)


class Toy:
    """No ``options``, and a name of its own for the action."""

    def reset(self, seed: int | None = None) -> Any:
        return "go", {"seed": seed}

    def step(self, text: str) -> Any:
        return "up", float(len(text) > 0), True, False, {"process": os.getpid()}


class AsyncToy(Toy):
    """The same, awaited."""

    async def reset(self, seed: int | None = None) -> Any:  # type: ignore[override]
        return super().reset(seed)

    async def step(self, text: str) -> Any:  # type: ignore[override]
        return super().step(text)


class Scored(Elsewhere):
    """Never over by itself; its end is worth ten times its turns, less for a full context."""

    def step(self, action: str) -> Any:
        observation, reward, *_ = super().step(action)
        return observation, reward, False, False, {}

    def end(self, reason: str) -> float:
        if self.what == "raise at the end":
            raise KeyError("a bug")
        return {"max_turns": 10.0, "context_full": 5.0}[reason] * self.turns


class AsyncScored(Scored):
    """The same, awaited."""

    async def end(self, reason: str) -> float:  # type: ignore[override]
        return super().end(reason)
