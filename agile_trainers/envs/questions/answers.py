"""Extracts the answer of a completion, normalizes it and grades it; see docs/reasoning.md."""

from __future__ import annotations

import ast
import importlib.util
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from agile_trainers.envs.isolation.calls import IsolatedError, run_isolated
from agile_trainers.envs.questions.mathematics import equal

_LONGEST = 10_000
"""Maximum number of characters of an answer; longer ones are wrong."""
_MOST_MARKS = 20
"""Maximum number of nested marks of a kind that are removed."""
_SECONDS = 5.0
"""CPU seconds for comparing two mathematical answers."""
_SIGNS = str.maketrans(
    dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d", "-")
    | dict.fromkeys("\u00d7\u00b7\u2022\u2217\u2219\u22c5\uff0a", "*")
    | dict.fromkeys("\u00f7\u2044\u2215\uff0f", "/")
    | dict.fromkeys("\u00a0\u2002\u2003\u2007\u2009\u200a\u202f\u3000", " ")
    | dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", "")
    | {"\uff0b": "+", "\uff1d": "=", "\uff08": "(", "\uff09": ")", "\uff0e": "."}
    | {chr(0xFF10 + digit): str(digit) for digit in range(10)}
)
_WRAPPINGS = (
    ("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("__", "__"), ("`", "`"),
    ("*", "*"), ('"', '"'), ("\u201c", "\u201d"), ("\\boxed{", "}"), ("\\text{", "}"), ("\\textbf{", "}"),
    ("\\mathrm{", "}"), ("\\mathbf{", "}"), ("\\displaystyle", ""), ("=", ""),
)  # fmt: skip
"""Marks around an answer that are not part of it."""
_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_NUMBER = re.compile(r"([-+]?)((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:[eE]([-+]?\d{1,3}))?", re.ASCII)
_FRACTION = re.compile(r"([-+]?)(?:\\[dt]?frac\{(\d+)\}\{(\d+)\}|(\d+)/(\d+))", re.ASCII)
_GROUPED = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])", re.ASCII)
_DOLLAR = re.compile(r"(?<![^-+*/(\s])\\?\$\s*(?=[-+.(\d\\])", re.ASCII)
_MIXED = re.compile(r"(?:\d[\s{]*|(?:^|[-+*/(\[])[\s{]*\d+[\s{}]*)\\[dt]?frac")  # not (3)\frac or 2^{3}\frac
_THIN_SPACES = re.compile(r"\\[,;! ]|~|\{,\}")


def final_answer(completion: str) -> str:
    """Extract the final answer of a completion.

    Returns:
        The content of the last ``<answer>...</answer>`` after ``</think>``, or the whole text after ``</think>`` without
        one; if that contains ``\\boxed{...}``, the content of its last box. Surrounding space is removed.
    """
    text = completion.rpartition("</think>")[2]
    start = text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))
    if start >= 0:
        text = text[start + len("<answer>") : text.index("</answer>", start)]
    boxed = last_boxed(text)
    return (text if boxed is None else boxed).strip()


def last_boxed(text: str) -> str | None:
    """Return the content of the last complete ``\\boxed{...}``, inner braces included; None if there is none."""
    opened: list[int | None] = []  # start of the content of each open brace, None if it is not a box's
    last: tuple[int, int] | None = None
    for token in _BRACES.finditer(text):
        if token[0].startswith("\\boxed"):
            opened.append(token.end())
        elif token[0] == "{":
            opened.append(None)
        elif token[0] == "}" and opened:
            start = opened.pop()
            if start is not None and (last is None or start > last[0]):
                last = start, token.start()
    return None if last is None else text[slice(*last)]


def tagged(text: str, *names: str) -> list[tuple[str, str]]:
    """Return name and content of every complete ``<name>...</name>`` in a text, in order; nested ones are content."""
    opening = re.compile(f"<({'|'.join(names)})>")
    found, unclosed, position = [], set[str](), 0
    while tag := opening.search(text, position):
        name, position = tag[1], tag.end()
        end = -1 if name in unclosed else text.find(f"</{name}>", position)
        if end < 0:
            unclosed.add(name)
        else:
            found.append((name, text[position:end]))
            position = end + len(name) + len("</>")
    return found


def normalized(answer: str) -> str:
    """Remove the marks around an answer and convert its signs to ASCII. All tasks use this function.

    Signs (minus, times, divided by, full-width digits) become ASCII and special spaces plain ones. Then these are removed
    repeatedly: surrounding space, ``$...$``, ``\\(...\\)``, ``**...**``, ``__...__``, backquotes, double quotes,
    ``\\text{...}`` and similar commands, a leading ``=`` and one full stop at the end. At most 20 marks of a kind are
    removed, so that the time is linear in the length.
    """
    text = answer.translate(_SIGNS).strip()
    for _ in range(_MOST_MARKS):
        before = text
        for opening, closing in _WRAPPINGS:
            if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening + closing):
                inner = text[len(opening) : len(text) - len(closing)]
                if _closed(inner) if closing == "}" else not closing or closing not in inner:
                    text = inner.strip()
        if text.endswith(".") and not text.endswith("..") and not text.endswith("\\."):
            text = text[:-1].strip()
        if text == before:
            break
    return text


def read_answer(completion: str) -> str:
    """Return the normalized :func:`final_answer`; empty if it is longer than 10,000 characters."""
    answer = final_answer(completion)
    return normalized(answer) if len(answer) <= _LONGEST else ""


def read_number(text: str) -> Fraction | None:
    """Return the exact value of a normalised text that is a number, otherwise None.

    Digits may be grouped by commas. A dollar sign, an exponent and surrounding brackets are allowed. A fraction (``3/4``,
    ``\\frac{3}{4}``) is a number only in lowest terms.
    """
    text = _DOLLAR.sub("", _without_thin_spaces(text), count=1).strip()
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1].strip()
    if (text.startswith(("-", "+"))) and text[1:2] == " ":
        text = text[0] + text[1:].lstrip()
    if len(text) > 1000:
        return None
    if found := _NUMBER.fullmatch(text):
        sign, digits, exponent = found.groups()
        return Fraction(f"{sign}{digits.replace(',', '')}e{exponent or 0}".replace(".e", "e"))
    if found := _FRACTION.fullmatch(text):
        numerator, denominator = (int(part) for part in found.groups()[1:] if part is not None)
        if denominator > 1 and Fraction(numerator, denominator).denominator == denominator:
            return Fraction(numerator, denominator) * (-1 if found[1] == "-" else 1)
    return None


def exact_match(completion: str, answer: Any, question: str = "") -> float:
    """Return 1 if the completion's final answer equals the answer, else 0.

    Numbers are compared exactly by value; text, after :func:`normalized`, letter by letter. If the answer is a number, an
    equation (``x = 12``, ``9 + 3 = 12``) counts if one side is the number and no side has another value.
    """
    given, expected = read_answer(completion), normalized(str(answer))
    number = read_number(expected)
    if number is None or "=" not in given:
        return float(bool(given) and (given == expected or (number is not None and read_number(given) == number)))
    sides = [normalized(side) for side in given.split("=")]
    values = [read_number(side) for side in sides]
    others = [side for side, value in zip(sides, values) if value is None]
    return float(number in values and all(value in (None, number) for value in values) and _agree(others, number))


def math_match(completion: str, answer: Any, question: str = "") -> float:
    """Return 1 if the completion's final answer equals the answer mathematically, else 0.

    The package ``math-verify`` compares fractions, LaTeX, sets, intervals and so on, in a separate process with limits of
    five seconds of CPU time and a gigabyte; answers that exceed them are wrong. Words (three letters or more) are compared
    as words, without case. Without ``<answer>`` and ``\\boxed{}``, the last expression of the text that looks like an
    answer counts.

    Raises:
        ImportError: If ``math-verify`` is not installed.
    """
    require_math_verify()
    found, expected = final_answer(completion), normalized(str(answer))
    marked = found != completion.rpartition("</think>")[2].strip()
    given = normalized(found) if len(found) <= _LONGEST else "" if marked else found[-_LONGEST:]
    if not given or not expected:
        return 0.0
    if given == expected:
        return 1.0
    if _is_words(expected) or _is_words(given):
        return float(_folded(given) == _folded(expected))
    try:
        text = f"\\boxed{{{given}}}" if marked else given
        return float(run_isolated(equal, text, f"\\boxed{{{expected}}}", timeout=_SECONDS))
    except (TimeoutError, IsolatedError):
        return 0.0


def require_math_verify() -> None:
    """Raise an ``ImportError`` that names the command if ``math-verify`` is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError("Comparing mathematical answers needs math-verify. Run: pip install math-verify")


def _without_thin_spaces(text: str) -> str:
    """Write the groups of digits of LaTeX with commas (``1{,}234``) or together (``1\\,234``)."""
    return _THIN_SPACES.sub(lambda found: "," if found[0] == "{,}" else "", text)


def _closed(text: str) -> bool:
    """Return whether every brace in a text is closed, so that a brace after it belongs to the text before."""
    depth = 0
    for token in _BRACES.finditer(text):
        depth += 1 if token[0].endswith("{") and token[0] != "\\{" else -1 if token[0] == "}" else 0
        if depth < 0:
            return False
    return depth == 0


def _agree(sides: list[str], number: Fraction) -> bool:
    """Return whether each of the other sides of an equation is empty, a letter, or an expression of the same value."""
    for side in sides:
        if side and not re.fullmatch(r"[A-Za-z]", side):
            plain = _GROUPED.sub(lambda found: found[0].replace(",", ""), _without_thin_spaces(side))
            try:
                if exact_value(_DOLLAR.sub("", plain), extended=True)[0] != number:
                    return False
            except (ValueError, ZeroDivisionError):
                return False
    return True


def _is_words(text: str) -> bool:
    """Return whether the text is words rather than a product of variables, for which Paris would equal pairs."""
    return re.fullmatch(r"[^\W\d_]{3,}(?:[ '-][^\W\d_]+)*", text) is not None


def _folded(text: str) -> str:
    return " ".join(text.casefold().split())


# ---------------------------------------------------------------------------------------------------------- arithmetic


_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_LONGEST_EXPRESSION = 200
_MOST_BITS = 4096
"""Maximum length of a power in an expression."""
_SPELLINGS = (
    (r"\\(?:times|cdot|ast)(?![a-zA-Z])", " * "),
    (r"\\div(?![a-zA-Z])", " / "),
    (r"\\(?:left|right|displaystyle|[Bb]igg?[lr]?)(?![a-zA-Z])", ""),
    (r"\\[,;! ]|~", " "),
    (r"(?<=[\d)\]}\s])[xX](?=\s*[\d.(\[{\\])|(?<=\s)[xX](?=\s+[-+][\d.(\[{\\])", "*"),  # 2 x -6; 2x + 6 has an unknown
)
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")


def exact_value(expression: str, *, extended: bool = False) -> tuple[Fraction, list[int]]:
    """Return the exact value of an expression of integers, ``+ - * /`` and brackets, and the integers in it.

    ``extended`` also reads signs before a number or bracket, decimals, and whole exponents (``^``, ``**``) of moderate size.

    ``\\times``, ``\\cdot``, ``\\div``, ``\\frac{}{}``, ``x`` between numbers, square brackets, braces and a factor right
    before a bracket are supported.

    Raises:
        ValueError: If the text is anything else, or longer than 200 characters.
        ZeroDivisionError: If the expression divides by zero.
    """
    expression = expression.strip()
    if len(expression) > _LONGEST_EXPRESSION:
        raise ValueError(f"The expression has {len(expression)} characters; at most {_LONGEST_EXPRESSION} are read.")
    text = expression
    for pattern, meaning in _SPELLINGS:
        text = re.sub(pattern, meaning, text)
    if extended and _MIXED.search(text):  # one and a half, or half of one
        raise ValueError(f"{expression!r} has a mixed number, or a product that looks like one.")
    while text != (inner := _LATEX_FRACTION.sub(r"((\1)/(\2))", text)):
        text = inner
    text = re.sub(r"(?<=[\d)])\s*(?=\()", "*", text.translate(str.maketrans("[]{}", "()()")))
    text = re.sub(r"(?<=\))\s*(?=\d)", "*", text)
    text = text.replace("^", "**") if extended else text
    other = f"{expression!r} holds something other than integers, + - * / and brackets."
    if not re.fullmatch(r"[0-9\s.+\-*/()]*", text):
        raise ValueError(other)
    try:
        tree = ast.parse(text := text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression!r} is not an expression.") from error
    used: list[int] = []

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            used.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        if extended and isinstance(node, ast.Constant):
            return Fraction(ast.get_source_segment(text, node) or "")
        if extended and isinstance(node, ast.UnaryOp):
            return value(node.operand) * (-1 if isinstance(node.op, ast.USub) else 1)
        if extended and isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            return _power(value(node.left), value(node.right))
        raise ValueError(other)

    return value(tree.body), used


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    """Return a power with a whole exponent.

    Raises:
        ValueError: If the exponent is none, or the result has too many digits.
    """
    bits = max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(exponent)
    if exponent.denominator != 1 or bits > _MOST_BITS:
        raise ValueError(f"A power with the exponent {exponent} is not computed.")
    return Fraction(base ** int(exponent))
