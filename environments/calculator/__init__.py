"""Arithmetic with a calculator: a tool call, its result, the answer. See README.md for results of scripted play."""

from __future__ import annotations

import random
import re
from typing import Any

from agile_trainers.envs.questions.rows import GeneratedRows, Row
from agile_trainers.envs.task import check_level, demonstrations_of, preferences_of
from agile_trainers.envs.tools.calculator import calculate
from agile_trainers.envs.tools.environment import ToolEnvironment
from agile_trainers.types import Message

LEVELS = {"easy": ("a ± b", 20), "normal": ("a ± b * c", 99), "hard": ("( a ± b ) * ( c ± d )", 999)}
"""Level to form of the expression and largest number. ± is a random + or -; numbers start at 1."""
_RANGES = {"easy": (-19, 40), "normal": (1 - 99 * 99, 99 + 99 * 99), "hard": (-998 * 1998, 1998 * 1998)}
"""Level to smallest and largest value, the range of random guesses."""
_TEST_FRACTION = 0.2


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
