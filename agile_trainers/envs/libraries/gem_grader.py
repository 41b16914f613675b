"""Compares mathematical answers with GEM's grader, which evaluates them; runs in an isolated process."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


def prepare() -> None:
    """Load GEM's grader before the clock of a call starts."""
    # GEM imports reasoning-gym and with it matplotlib, which needs a writable folder; see `scorers.py`.
    sys.modules.setdefault("cellpylib", ModuleType("cellpylib"))
    import gem.utils.math_grader  # noqa: F401


def is_correct(answer: str, expected: Any) -> bool:
    """Return the verdict of ``gem.envs.math_env.MathEnv.check_correct``; one of several expected answers is enough."""
    from gem.utils.math_grader import boxed_reward_fn

    wanted = expected if isinstance(expected, list) else [str(expected)]
    options: dict[str, Any] = {"fast": False, "correct_reward": 1, "incorrect_reward": 0}
    return any(boxed_reward_fn(answer, one, **options)[1] for one in wanted)
