"""Compares mathematical answers with GEM's grader, without executing one; runs in an isolated process.

GEM's grader passes an answer with at most two letters besides ``sqrt`` and ``frac`` to sympy's ``parse_expr``, which
evaluates it. Two letters are enough: ``frac`` evaluates a string again, and the string can be put together from characters
of others. Therefore only text that consists of numbers, names, operators and brackets reaches the parser.
"""

from __future__ import annotations

import re
import sys
from types import ModuleType
from typing import Any

_NO_FORMULA = re.compile(r"[^\w\s+\-*/^().,!=<>|]|_|\.\s*[^\W\d]")
"""Anything but numbers, names, operators and brackets: no quotes, attributes, indices, underscores or lambdas."""


def prepare() -> None:
    """Load GEM's grader before the clock of a call starts."""
    # GEM imports reasoning-gym and with it matplotlib, which needs a writable folder; see `scorers.py`.
    sys.modules.setdefault("cellpylib", ModuleType("cellpylib"))
    from gem.utils import math_grader

    parse = math_grader._sympy_parse

    def parse_formula(text: str) -> Any:
        if _NO_FORMULA.search(text):
            raise ValueError(f"{text!r} is no formula.")
        return parse(text)

    math_grader._sympy_parse = parse_formula


def is_correct(answer: str, expected: Any) -> bool:
    """Return the verdict of ``gem.envs.math_env.MathEnv.check_correct``; one of several expected answers is enough."""
    from gem.utils.math_grader import boxed_reward_fn

    wanted = expected if isinstance(expected, list) else [str(expected)]
    options: dict[str, Any] = {"fast": False, "correct_reward": 1, "incorrect_reward": 0}
    return any(boxed_reward_fn(answer, one, **options)[1] for one in wanted)
