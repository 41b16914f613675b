"""From a completion to its answer, and from an answer to a reward."""

from __future__ import annotations

import importlib.util
import re
import threading
from typing import Any

_NUMBER = re.compile(r"[-+]?(\d+(,\d{3})*(\.\d+)?|\.\d+)")


def final_answer(completion: str) -> str:
    """The answer a completion ends with.

    Returns:
        What stands in the last ``<answer>...</answer>``; without one, in the last ``\\boxed{...}``; without either, the
        text after ``</think>``, or all of it. Surrounding space is cut off.
    """
    tagged = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
    if tagged:
        return tagged[-1].strip()
    boxed = last_boxed(completion)
    return (completion.rpartition("</think>")[2] if boxed is None else boxed).strip()


def last_boxed(text: str) -> str | None:
    """What stands in the last complete ``\\boxed{...}``, inner braces included; None if there is none."""
    end = len(text)
    while (start := text.rfind("\\boxed{", 0, end)) >= 0:
        depth = 0
        for position in range(start + len("\\boxed"), len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[start + len("\\boxed{") : position]
        end = start
    return None


def exact_match(completion: str, answer: Any, question: str = "") -> float:
    """1 if the completion's final answer is the answer, else 0. Numbers are compared as numbers, text as it is."""
    given, expected = final_answer(completion), str(answer).strip()
    return float(given == expected or (_number(given) is not None and _number(given) == _number(expected)))


def math_match(completion: str, answer: Any, question: str = "") -> float:
    """1 if the completion's final answer equals the answer mathematically, else 0.

    Fractions, LaTeX, sets, intervals and so on are compared by the package ``math-verify``. Without ``\\boxed{}`` it
    takes the last expression that looks like an answer.

    Raises:
        ImportError: If ``math-verify`` is not installed.
    """
    require_math_verify()
    from math_verify import parse, verify

    # Its time limit is an alarm signal, which only the main thread can set.
    seconds = 5 if threading.current_thread() is threading.main_thread() else None
    boxed = last_boxed(completion)
    given = parse(completion if boxed is None else f"\\boxed{{{boxed}}}", parsing_timeout=seconds)
    expected = parse(f"\\boxed{{{answer}}}", parsing_timeout=seconds)
    return float(verify(expected, given, timeout_seconds=seconds))


def require_math_verify() -> None:
    """Raise an ``ImportError`` that names the command if ``math-verify`` is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError("Comparing mathematical answers needs math-verify. Run: pip install math-verify")


def _number(text: str) -> float | None:
    return float(text.replace(",", "")) if _NUMBER.fullmatch(text) else None
