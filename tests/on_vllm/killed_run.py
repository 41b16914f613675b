"""Training that ends in the middle of a rollout: ``python killed_run.py MODEL OUTPUT`` kills itself."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

sys.path.append(str(Path(__file__).parents[1] / "trainers"))

from games import Chatter, make_trainer

from agile_trainers.trainers.trainer import MultiTurnTrainer

UPDATES, ENDS_IN = 4, 3


class Fatal(Chatter):
    """Something happens in its step number ``at``."""

    at: ClassVar[int | None] = None
    happens: ClassVar[Callable[[], None]]
    steps: ClassVar[int] = 0

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        Fatal.steps += 1
        if Fatal.steps == Fatal.at:
            Fatal.happens()
        return super().step(action)


def trainer(model: Path | str, output: Path | str) -> MultiTurnTrainer:
    """A run that saves after every update, of more than one turn each."""
    options = {"max_steps": UPDATES, "save_strategy": "steps", "save_steps": 1, "learning_rate": 0.5}
    return make_trainer(model, output, environment=Fatal, use_vllm=True, stop_strings=None, **options)


def middle_of_the_last_rollout(run: MultiTurnTrainer) -> int:
    """The number of a step in the middle of the rollout for update ``ENDS_IN``, from a run that went through."""
    turns = [entry["turns/mean"] * 8 for entry in run.state.log_history if "turns/mean" in entry]
    return round(sum(turns[: ENDS_IN - 1]) + turns[ENDS_IN - 1] / 2)


if __name__ == "__main__":
    Fatal.at = int(sys.argv[3])
    Fatal.happens = staticmethod(lambda: os.kill(os.getpid(), signal.SIGKILL))
    trainer(sys.argv[1], sys.argv[2]).train()
