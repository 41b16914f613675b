"""Arithmetic with a calculator: a tool call, its result, the answer. See README.md for results of scripted play."""

from __future__ import annotations

import ast
import math
import operator
import random
import re
from collections.abc import Callable
from typing import Any

from agile_trainers.envs.questions.rows import GeneratedRows, Row
from agile_trainers.envs.task import check_level, demonstrations_of, preferences_of
from agile_trainers.envs.tools.environment import ToolEnvironment
from agile_trainers.types import Message

LEVELS = {"easy": ("a ± b", 20), "normal": ("a ± b * c", 99), "hard": ("( a ± b ) * ( c ± d )", 999)}
"""Level to form of the expression and largest number. ± is a random + or -; numbers start at 1."""
_RANGES = {"easy": (-19, 40), "normal": (1 - 99 * 99, 99 + 99 * 99), "hard": (-998 * 1998, 1998 * 1998)}
"""Level to smallest and largest value, the range of random guesses."""
_TEST_FRACTION = 0.2


Number = int | float

_MAX_CHARACTERS = 200
_MAX_BITS = 4096
"""Bits of an integer (about 1200 digits), which limits the time of every operation."""
_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _round(value: Number, digits: int = 0) -> Number:
    if abs(digits) > 100:
        raise ValueError(f"cannot round to {digits} digits")
    return round(value, digits)


_FUNCTIONS: dict[str, Callable[..., Number]] = {"abs": abs, "max": max, "min": min, "round": _round, "sqrt": math.sqrt}


def calculate(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % **, brackets, and the functions abs, max, min, round and sqrt.

    Returns:
        The value.

    Raises:
        ValueError: If the expression is no arithmetic, too long, or its value too large.
    """
    if len(expression) > _MAX_CHARACTERS:
        raise ValueError(f"the expression has {len(expression)} characters, at most {_MAX_CHARACTERS} are allowed")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"{expression!r} is no arithmetic expression") from error
    except ZeroDivisionError as error:
        raise ValueError("division by zero") from error
    except (OverflowError, TypeError) as error:
        raise ValueError(f"the value cannot be computed: {error}") from error
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _value(node: ast.expr) -> Number:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _bounded(_power(left, right))
        if type(node.op) in _BINARY:
            return _bounded(_BINARY[type(node.op)](left, right))
    if isinstance(node, ast.Call) and not node.keywords and ast.unparse(node.func) in _FUNCTIONS:
        return _bounded(_FUNCTIONS[ast.unparse(node.func)](*map(_value, node.args)))
    raise ValueError(
        f"{ast.unparse(node)[:40]!r} is not allowed: use numbers, + - * / // % **, brackets and {', '.join(_FUNCTIONS)}"
    )


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > _MAX_BITS:
        raise ValueError("the power is too large")
    value = base**exponent
    if isinstance(value, complex):
        raise ValueError("the value is not a real number")
    return value


def _bounded(value: Number) -> Number:
    too_large = value.bit_length() > _MAX_BITS if isinstance(value, int) else not math.isfinite(value)
    if too_large:
        raise ValueError("the value is too large")
    return value


class Calculator(ToolEnvironment):
    """Asks for the value of an expression, with a calculator as a tool.

    The answer is a number alone (or in ``<answer>`` tags or ``\\\\boxed{}``). Reward: 1 for the right one, -0.2 for a
    malformed call, 0 otherwise. A wrong answer ends the episode, and so does the fourth answer. A fifth of all expressions
    belongs to the split ``test`` at every level, so that none of them is trained on.

    Args:
        level: ``easy`` (two numbers up to 20), ``normal`` (three up to 99) or ``hard`` (four up to 999, in brackets).
        split: ``train`` or ``test``.
        options: Further arguments of :class:`~agile_trainers.envs.tools.environment.ToolEnvironment`: ``call_format``, ...

    Raises:
        ValueError: If the level is unknown or an option is wrong.
    """

    name = "agile:calculator"

    def __init__(self, level: str = "easy", split: str = "train", **options: Any):
        check_level(level, LEVELS)
        self.level = level
        defaults = {"template": "Compute {question}", "max_turns": 4, "invalid_reward": -0.2}
        super().__init__([calculate], _rows(level), split=split, **{**defaults, **options})


def _rows(level: str) -> GeneratedRows:
    form, largest = LEVELS[level]

    def generate(rng: random.Random) -> Row:
        expression = re.sub(
            "[a-d±]", lambda slot: rng.choice("+-") if slot[0] == "±" else str(rng.randint(1, largest)), form
        )
        return {"question": expression, "answer": calculate(expression)}

    return GeneratedRows(generate, test_fraction=_TEST_FRACTION)


def expert_policy(messages: list[Message], rng: random.Random) -> str:
    """Call the calculator and answer with its result."""
    result = re.fullmatch(r"<tool_response>\n(.*)\n</tool_response>", messages[-1]["content"])
    return result[1] if result else call(_expression(messages))


def random_policy(messages: list[Message], rng: random.Random) -> str:
    """Answer at once with a random number of the level's range."""
    expression = _expression(messages)
    level = "hard" if "(" in expression else "normal" if "*" in expression else "easy"
    return str(rng.randint(*_RANGES[level]))


def careless_policy(messages: list[Message], rng: random.Random) -> str:
    """Call the calculator in 40% of the games, and answer with its result in 90% of those; guess otherwise."""
    asked = "<tool_response>" not in messages[-1]["content"]
    return (expert_policy if rng.random() < (0.4 if asked else 0.9) else random_policy)(messages, rng)


def call(expression: str) -> str:
    """Write a call of the calculator, with the blanks that a tokenizer of whole words needs."""
    return f'<tool_call> {{"name": "calculate", "arguments": {{"expression": " {expression} "}}}} </tool_call>'


demonstrations = demonstrations_of(Calculator, careless_policy)
"""Careless play teaches the format of calls and answers; reinforcement learning can then learn to use the calculator."""
preferences = preferences_of(Calculator, expert_policy, careless_policy)
"""Pairs of a call, or an answer with the calculator's result, and a guess."""


def _expression(messages: list[Message]) -> str:
    asked = next((m["content"] for m in messages if m["role"] == "user"), "")
    found = re.search(r"Compute (.+)$", asked)
    if found is None:
        raise ValueError(f"Expected a question that says 'Compute ...', got {asked!r}.")
    return found[1]
