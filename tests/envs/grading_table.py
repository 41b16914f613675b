"""Prints how the tasks grade every pair of ``grading_pairs.json``, beside math-verify.

python tests/envs/grading_table.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from agile_environments.countdown import TEMPLATE
from agile_environments.countdown import reward as countdown_reward
from agile_environments.grid_navigation import GridNavigation
from agile_environments.guess_number import GuessNumber
from agile_environments.mastermind import Mastermind
from agile_environments.wordle import Wordle
from agile_trainers.envs.questions.answers import exact_match, math_match
from agile_trainers.envs.tools.search import answer_match

Pair = tuple[str, str, str, bool]
"""Task, right answer (the puzzle, for countdown), what the model says, and whether that is right."""


def pairs() -> list[Pair]:
    """All pairs, by task."""
    tasks = json.loads(Path(__file__).with_name("grading_pairs.json").read_text())
    return [(task, *pair) for task, rows in tasks.items() for pair in rows]


def countdown(completion: str, puzzle: str) -> float:
    numbers, _, target = puzzle.partition(" -> ")
    *others, last = numbers.split()
    question = TEMPLATE.format(numbers=f"{', '.join(others)} and {last}", target=target)
    return countdown_reward(completion, None, question)


def wordle(completion: str, secret: str) -> float:
    environment = Wordle()
    environment.reset(options={"secret": secret})
    return environment.step(completion)[1]


def mastermind(completion: str, secret: str) -> float:
    environment = Mastermind()
    environment.reset(options={"secret": secret})
    return environment.step(completion)[1]


def guess_number(completion: str, secret: str) -> float:
    environment = GuessNumber(high=24)
    environment.reset(options={"secret": int(secret)})
    return environment.step(completion)[1]


def grid_navigation(completion: str, direction: str) -> float:
    environment = GridNavigation()
    environment.reset(options={"map": {"right": "A G", "left": "G A"}[direction]})
    return environment.step(completion)[1]


GRADERS: dict[str, Callable[[str, str], float]] = {
    "arithmetic": exact_match,
    "countdown": countdown,
    "math": math_match,
    "search": answer_match,
    "guess_number": guess_number,
    "wordle": wordle,
    "mastermind": mastermind,
    "grid_navigation": grid_navigation,
}


def by_math_verify(completion: str, gold: str) -> bool:
    """As its README calls it."""
    from math_verify import parse, verify

    return bool(verify(parse(f"\\boxed{{{gold}}}"), parse(completion)))


def main() -> int:
    wrong = 0
    print(f"{'task':16} {'right answer':24} {'model says':44} expected ours math-verify")
    for task, gold, completion, right in pairs():
        ours = GRADERS[task](completion, gold) == 1.0
        theirs = f"{by_math_verify(completion, gold):d}" if task in ("math", "arithmetic") else "-"
        wrong += ours != right
        mark = "" if ours == right else "  <-- wrong"
        print(f"{task:16} {gold!r:24} {completion!r:44} {right:^8d} {ours:^4d} {theirs:^11}{mark}")
    print(f"{len(pairs())} pairs, {wrong} graded wrongly")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
