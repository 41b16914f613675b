"""Evaluates arithmetic expressions in Python's or LaTeX's notation exactly."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_LONGEST = 200
_SPELLINGS = (
    (r"\\(?:times|cdot|ast)(?![a-zA-Z])", " * "),
    (r"\\div(?![a-zA-Z])", " / "),
    (r"\\(?:left|right|displaystyle|[Bb]igg?[lr]?)(?![a-zA-Z])", ""),
    (r"\\[,;! ]|~", " "),
    (r"(?<=[\d)\]}\s])[xX](?=[\d(\[{\s])", "*"),
)
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")


def exact_value(expression: str) -> tuple[Fraction, list[int]]:
    """Return the exact value of an expression of integers, ``+ - * /`` and brackets, and the integers in it.

    ``\\times``, ``\\cdot``, ``\\div``, ``\\frac{}{}``, ``x`` between numbers, square brackets, braces and a factor right
    before a bracket are supported.

    Raises:
        ValueError: If the text is anything else, or longer than 200 characters.
        ZeroDivisionError: If the expression divides by zero.
    """
    expression = expression.strip()
    if len(expression) > _LONGEST:
        raise ValueError(f"The expression has {len(expression)} characters; at most {_LONGEST} are read.")
    text = expression
    for pattern, meaning in _SPELLINGS:
        text = re.sub(pattern, meaning, text)
    while text != (inner := _FRACTION.sub(r"((\1)/(\2))", text)):
        text = inner
    text = re.sub(r"(?<=[\d)])\s*(?=\()", "*", text.translate(str.maketrans("[]{}", "()()")))
    text = re.sub(r"(?<=\))\s*(?=\d)", "*", text)
    if not re.fullmatch(r"[0-9\s+\-*/()]*", text):
        raise ValueError(f"{expression!r} holds something other than integers, + - * / and brackets.")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression!r} is not an expression.") from error
    used: list[int] = []

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            used.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError(f"{expression!r} holds something other than integers, + - * / and brackets.")

    return value(tree.body), used
