"""State scores as rewards of turns: a turn is rewarded for the change of the score, which leaves the best policy as it is.

`docs/late_turns.md` shows a run. The file needs nothing of this library: copy it and change it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class StateScores:
    """Adds ``gamma * score(next state) - score(state)`` to each reward of another environment.

    The other environment scores its states by ``info["score"]`` of ``reset`` and ``step``: how close the state is to a
    solution. A state without one has the score of the state before it, so that its change is paid with the next score. The
    end counts 0 (Ng, Harada and Russell, 1999, "Policy invariance under reward transformations").

    Args:
        make: Makes the other environment.
        gamma: Discount per turn, that of the trainer.
        keep_last: Let the last state keep its score, so that the return is the other environment's plus that score. This is
            another task: its best policy may be another one.
    """

    def __init__(self, make: Callable[[], Any], gamma: float = 1.0, keep_last: bool = False):
        self.environment, self.gamma, self.keep_last = make(), gamma, keep_last

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode of the other environment."""
        observation, info = self.environment.reset(seed=seed, options=options)
        self.score = float(info.get("score", 0.0))
        return observation, info

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a turn, and add the change of the score to its reward."""
        observation, reward, terminated, truncated, info = self.environment.step(action)
        ends = terminated and not self.keep_last
        before, self.score = self.score, 0.0 if ends else float(info.get("score", self.score))
        return observation, reward + self.gamma * self.score - before, terminated, truncated, info

    def end(self, reason: str) -> float:
        """Let an episode that a limit of the trainer ends count 0 at its end, as any other."""
        return 0.0 if self.keep_last else -self.score
