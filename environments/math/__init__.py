"""Mathematics: generated arithmetic, and the data sets GSM8K, MATH and DAPO-Math. See README.md."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from agile_trainers.envs.questions.answers import exact_match, last_boxed, math_match, require_math_verify
from agile_trainers.envs.questions.environment import ReasoningEnvironment, RewardFunction
from agile_trainers.envs.questions.rows import TRAIN, GeneratedRows, Row, Rows, check_column, load_rows
from agile_trainers.envs.task import check_level, demonstrations_of
from agile_trainers.types import Message

LEVELS = {"easy": (2, 9, "+-"), "normal": (3, 20, "+-*"), "hard": (4, 99, "+-*")}
"""Level to number of terms, highest number and operators."""

BOXED = "{question}\n\nReason step by step and put the final answer in \\boxed{{}}."


@dataclass(frozen=True)
class Source:
    """A data set of the Hub."""

    path: str
    config: str | None
    question: str
    columns: tuple[str, ...]
    """Required columns beside the question."""
    answer: Callable[[Row], str]
    solution: Callable[[Row], str]
    """Function from a row to a worked solution that ends with the answer in ``\\boxed{}``."""


def _gsm8k_answer(row: Row) -> str:
    return row["answer"].rpartition("####")[2].strip().replace(",", "")


def _gsm8k_solution(row: Row) -> str:
    # <<48/2=24>> are annotations for a calculator
    steps = re.sub(r"<<.*?>>", "", row["answer"].rpartition("####")[0]).strip()
    return f"{steps}\nThe answer is \\boxed{{{_gsm8k_answer(row)}}}."


def _math_answer(row: Row) -> str:
    boxed = last_boxed(row["solution"])
    if boxed is None:
        raise ValueError(f"The solution of {row['problem'][:80]!r} holds no \\boxed{{}}.")
    return boxed


DATA_SETS = {
    "gsm8k": Source(
        "openai/gsm8k",
        "main",
        "question",
        ("answer",),
        _gsm8k_answer,
        _gsm8k_solution,
    ),
    "math": Source(
        "DigitalLearningGmbH/MATH-lighteval",
        "default",
        "problem",
        ("solution",),
        _math_answer,
        lambda row: row["solution"],
    ),
    "dapo_math": Source(
        "open-r1/DAPO-Math-17k-Processed",
        "en",
        "prompt",
        ("solution",),
        lambda row: row["solution"],
        lambda row: f"\\boxed{{{row['solution']}}}",
    ),
}
"""Name to data set on the Hub."""


class Math(ReasoningEnvironment):
    """Asks for the solution of a problem: arithmetic of a level, or a problem of a data set.

    The answer to arithmetic is a number, compared by value. The answer to a data set's problem is in ``\\boxed{}``, compared
    by ``math-verify``. Reward: 1 for the right answer, 0 for any other.

    Args:
        level: ``easy`` (``4 - 7``), ``normal`` (three terms up to 20, with products) or ``hard`` (four up to 99).
        dataset: ``gsm8k``, ``math`` or ``dapo_math`` instead of arithmetic. DAPO-Math has no test split, so a part of its
            questions is set aside.
        path: Another source of the data set than its Hub id: an id, a folder or a file with the same columns.
        split: Split to play. ``train`` and ``test`` always exist; a data set may have more.
        test_fraction: Share of the questions in ``test``, if there is no such split.
        template: The user message. Default: the question, with a request to use ``\\boxed{}`` for a data set.
        system_prompt: System message.
        few_shot: Number of worked examples, taken from ``train``.
        streaming: Do not download the whole data set; needs ``max_rows``.
        max_rows: Number of rows taken from the beginning of each split. Default: all.

    Raises:
        ValueError: If the level, data set or split is unknown, or an argument has no effect.
        ImportError: If ``dataset`` is given and ``math-verify`` is not installed.
    """

    name = "agile:math"

    def __init__(
        self,
        level: str | None = None,
        *,
        dataset: str | None = None,
        path: str | None = None,
        split: str = TRAIN,
        test_fraction: float = 0.1,
        template: str | Sequence[Message] | None = None,
        system_prompt: str | None = None,
        few_shot: int = 0,
        streaming: bool = False,
        max_rows: int | None = None,
    ):
        if dataset is None:
            idle = {"path": path, "streaming": streaming or None, "max_rows": max_rows}
            if given := [name for name, value in idle.items() if value is not None]:
                raise ValueError(f"{', '.join(given)} have an effect on a data set only: set `dataset` too.")
            task = _arithmetic(level or "normal", test_fraction)
        else:
            if level is not None:
                raise ValueError(
                    f"level={level!r} has no effect on a data set: leave it unset, or leave `dataset` unset."
                )
            task = _of_data_set(dataset, path, test_fraction, streaming, max_rows)
        super().__init__(
            task.rows,
            question=task.question,
            answer=task.answer,
            demonstration=task.solution,
            reward_fn=task.reward,
            template=task.template if template is None else template,
            split=split,
            system_prompt=system_prompt,
            few_shot=few_shot,
        )
        self._arithmetic = dataset is None

    def wrong(self, row: Row, rng: random.Random) -> str:
        """Return a number near the right one; for a data set, the solution of another problem."""
        if not self._arithmetic:
            return super().wrong(row, rng)
        return str(int(row["answer"]) + rng.choice((-2, -1, 1, 2)))


def expert_policy(messages: list[Message], rng: random.Random) -> str:
    """Answer with the right number (arithmetic only)."""
    return str(_value(_expression(messages)))


def random_policy(messages: list[Message], rng: random.Random) -> str:
    """Answer with a random number up to the largest sum of the terms, of either sign (arithmetic only)."""
    bound = sum(map(int, re.findall(r"\d+", _expression(messages))))
    return str(rng.randint(-bound, bound))


demonstrations = demonstrations_of(Math, expert_policy)


def preferences(count: int, seed: int = 0, environment: Math | None = None) -> list[dict[str, list[Message]]]:
    """Make pairs of a right and a wrong answer to the questions of the seeds from ``seed`` on, for TRL's ``DPOTrainer``."""
    return (environment or Math()).preferences(count, seed)


@dataclass(frozen=True)
class _Task:
    rows: Rows
    question: str
    answer: str | Callable[[Row], Any]
    solution: str | Callable[[Row], str]
    reward: RewardFunction
    template: str


def _arithmetic(level: str, test_fraction: float) -> _Task:
    check_level(level, LEVELS)

    def generate(rng: random.Random) -> Row:
        terms, highest, operators = LEVELS[level]
        expression = str(rng.randint(1, highest))
        for _ in range(terms - 1):
            expression += f" {rng.choice(operators)} {rng.randint(1, highest)}"
        return {"question": f"What is {expression}? Answer with one number.", "answer": _value(expression)}

    rows = GeneratedRows(generate, test_fraction=test_fraction)
    return _Task(rows, "question", "answer", "{answer}", exact_match, "{question}")


def _of_data_set(name: str, path: str | None, test_fraction: float, streaming: bool, max_rows: int | None) -> _Task:
    if name not in DATA_SETS:
        raise ValueError(f"Unknown data set {name!r}; choose one of {', '.join(DATA_SETS)}.")
    require_math_verify()
    source = DATA_SETS[name]
    rows = load_rows(
        path or source.path,
        None if path else source.config,
        question=source.question,
        test_fraction=test_fraction,
        streaming=streaming,
        max_rows=max_rows,
    )
    for column in source.columns:
        check_column(column, rows.columns, f"data set {name}")
    template = BOXED.replace("{question}", f"{{{source.question}}}")
    return _Task(rows, source.question, source.answer, source.solution, math_match, template)


def _expression(messages: list[Message]) -> str:
    found = re.search(r"What is (.+)\? Answer", messages[-1]["content"])
    if found is None:
        raise ValueError(f"Expected a question that says 'What is ...? Answer', got {messages[-1]['content']!r}.")
    return found[1]


def _value(expression: str) -> int:
    """Evaluate integers joined by +, - and *, products first."""
    total = 0
    for sign, product in re.findall(r"(^|[+-]) ?(\d+(?: \* \d+)*)", expression):
        total += (-1 if sign == "-" else 1) * prod(map(int, product.split(" * ")))
    return total
