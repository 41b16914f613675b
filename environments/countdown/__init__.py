"""Countdown: make a target from some numbers, each used once. See README.md for results of good play."""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from agile_trainers.envs.questions.answers import exact_value, read_answer
from agile_trainers.envs.questions.environment import ReasoningEnvironment
from agile_trainers.envs.questions.rows import TRAIN, GeneratedRows, Row
from agile_trainers.envs.task import check_level, demonstrations_of
from agile_trainers.types import Message

LEVELS = {"easy": (3, 9, 30), "normal": (3, 25, 100), "hard": (4, 50, 100)}
"""Level to count of numbers, highest number and highest target."""

TEMPLATE = (
    "Use each of the numbers {numbers} exactly once, with + - * / and brackets, to make {target}. "
    "Answer with the expression alone, such as (1 + 2) * 3."
)
FORMAT_REWARD = 0.1
_OPERATORS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}


class Countdown(ReasoningEnvironment):
    """Asks for an expression that uses every number once and equals the target.

    An answer is an expression, or an equation of it with the target: alone, in ``<answer>`` tags or in ``\\boxed{}``.
    Reward: 1 for an expression that equals the target, .1 for one that uses the right numbers and has another value, 0 for
    other answers. Every puzzle has a solution. The text of a puzzle assigns it to ``train`` or ``test``.

    Args:
        level: ``easy`` (3 numbers up to 9), ``normal`` (3 up to 25) or ``hard`` (4 up to 50).
        split: ``train`` or ``test``.
        test_fraction: Share of the puzzles in ``test``.
        system_prompt: System message before the puzzle.
        few_shot: Number of solved puzzles before it.

    Raises:
        ValueError: If the level or split is unknown.
    """

    name = "agile:countdown"

    def __init__(
        self,
        level: str = "normal",
        *,
        split: str = TRAIN,
        test_fraction: float = 0.1,
        system_prompt: str | None = None,
        few_shot: int = 0,
    ):
        check_level(level, LEVELS)

        def generate(rng: random.Random) -> Row:
            return _puzzle(rng, *LEVELS[level])

        super().__init__(
            GeneratedRows(generate, test_fraction=test_fraction),
            split=split,
            system_prompt=system_prompt,
            few_shot=few_shot,
            reward_fn=reward,
        )

    def wrong(self, row: Row, rng: random.Random) -> str:
        """Return an expression of the right numbers with a wrong value."""
        while (expression := _random_expression(_numbers(row["question"])[0], rng)[0]) and reward(
            expression, None, row["question"]
        ) == 1.0:
            pass
        return expression


def reward(completion: str, answer: Any, question: str) -> float:
    """Return 1 for a solution, .1 for an expression of the right numbers, 0 for other answers.

    One side of an equation must use the numbers; the reward is .1 if its sides have different values.

    Args:
        completion: The model's answer.
        answer: Unused, since any solution counts.
        question: The puzzle.
    """
    numbers, target = _numbers(question)
    try:
        sides = [exact_value(side) for side in read_answer(completion).split("=")]
    except (ValueError, ZeroDivisionError):
        return 0.0
    if all(sorted(used) != sorted(numbers) for _, used in sides):
        return 0.0
    return 1.0 if all(value == target for value, _ in sides) else FORMAT_REWARD


def solve(numbers: list[int], target: int) -> str | None:
    """Search for an expression that uses every number once and equals the target; None if there is none."""

    def search(terms: list[tuple[Fraction, str]]) -> str | None:
        if len(terms) == 1:
            return terms[0][1] if terms[0][0] == target else None
        for i, left in enumerate(terms):
            for j, right in enumerate(terms):
                rest = [term for k, term in enumerate(terms) if k not in (i, j)]
                for symbol, apply in _OPERATORS.items():
                    # Sums and products are commutative: try one order only.
                    if i == j or (symbol in "+*" and i > j) or (symbol == "/" and right[0] == 0):
                        continue
                    found = search([*rest, (apply(left[0], right[0]), f"({left[1]} {symbol} {right[1]})")])
                    if found is not None:
                        return found
        return None

    expression = search([(Fraction(number), str(number)) for number in numbers])
    return None if expression is None else _without_outer_brackets(expression)


def expert_policy(messages: list[Message], rng: random.Random) -> str:
    """Answer with a solution, found by exhaustive search."""
    return solve(*_numbers(messages[-1]["content"])) or "0"


def random_policy(messages: list[Message], rng: random.Random) -> str:
    """Answer with a random expression of the right numbers."""
    return _random_expression(_numbers(messages[-1]["content"])[0], rng)[0]


demonstrations = demonstrations_of(Countdown, expert_policy)


def preferences(count: int, seed: int = 0, environment: Countdown | None = None) -> list[dict[str, list[Message]]]:
    """Make pairs of a right and a wrong answer to the questions of the seeds from ``seed`` on, for TRL's ``DPOTrainer``."""
    return (environment or Countdown()).preferences(count, seed)


def _puzzle(rng: random.Random, count: int, highest: int, highest_target: int) -> Row:
    while True:
        numbers = sorted(
            rng.randint(1, highest) for _ in range(count)
        )  # one order only, since a puzzle is identified by its text
        expression, value = _random_expression(numbers, rng)
        if value is not None and value.denominator == 1 and 1 <= value <= highest_target and value not in numbers:
            break
    listed = f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
    return {
        "question": TEMPLATE.format(numbers=listed, target=value),
        "answer": expression,
        "numbers": numbers,
        "target": int(value),
    }


def _random_expression(numbers: list[int], rng: random.Random) -> tuple[str, Fraction | None]:
    """Make a random expression of all numbers; return it and its value (None if it divides by zero)."""
    terms: list[tuple[str, Fraction | None]] = [(str(number), Fraction(number)) for number in numbers]
    while len(terms) > 1:
        (left, a), (right, b) = (terms.pop(rng.randrange(len(terms))) for _ in range(2))
        symbol, apply = rng.choice(list(_OPERATORS.items()))
        value = None if a is None or b is None or (symbol == "/" and b == 0) else apply(a, b)
        terms.append((f"({left} {symbol} {right})", value))
    return _without_outer_brackets(terms[0][0]), terms[0][1]


def _without_outer_brackets(expression: str) -> str:
    return expression[1:-1] if expression.startswith("(") else expression


def _numbers(question: str) -> tuple[list[int], int]:
    """Read the numbers and the target of a puzzle."""
    found = re.search(r"numbers ([\d, and]+) exactly once.* to make (\d+)\.", question)
    if found is None:
        raise ValueError(f"Expected a puzzle that says 'numbers ... exactly once, ... to make ...', got {question!r}.")
    return [int(number) for number in re.findall(r"\d+", found[1])], int(found[2])
