"""A safe calculator for models, which walks the syntax tree of an expression and executes no code."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

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
