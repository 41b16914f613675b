"""Adapts the data sets of reasoning-gym (https://github.com/open-thought/reasoning-gym), each with its own scorer."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from agile_trainers.envs.base import EnvironmentFactory
from agile_trainers.envs.isolation import levels as isolation
from agile_trainers.envs.isolation.calls import IsolatedDeath, run_isolated
from agile_trainers.envs.libraries import LIBRARIES, check_arguments, scorers
from agile_trainers.envs.libraries.global_random import LOCK, OwnRandomState
from agile_trainers.envs.questions.answers import final_answer
from agile_trainers.envs.questions.environment import ReasoningEnvironment
from agile_trainers.envs.questions.rows import TRAIN, GeneratedRows, Row
from agile_trainers.types import Message

_CACHED_ROWS = 4096
_SECONDS, _MEMORY = 5.0, 2048
"""CPU seconds and megabytes for scoring one answer in a separate process."""
_MAKING_SECONDS = 120.0
"""CPU seconds for making one item there."""
_EVALUATOR = re.compile(r"\b(?:eval|exec|parse_expr|sympify|parse_latex)\(")
_HARMLESS = ("number_sorting", "propositional_logic")
"""Data sets that do not evaluate the answer: one evaluates the expected answer, one has its own parser."""
HASHED = ("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder")
"""Data sets that draw from Python's sets of texts, whose order is another in each process, unless its hash seed is set."""
_made: dict[str, _Items] = {}


def listed() -> list[str]:
    """List the data sets, except ``composite``, which combines others.

    Raises:
        ImportError: If reasoning-gym is not installed.
    """
    return sorted(set(_registry()) - {"composite"})


def make_factory(name: str, **kwargs: Any) -> EnvironmentFactory:
    """Make a factory of a data set, and reject arguments that it does not read.

    Raises:
        ValueError: If an argument is unknown.
    """
    return functools.partial(ReasoningGymEnvironment, name, **_check_kwargs(name, kwargs))


def _check_kwargs(name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Check that the environment or the data set's configuration reads all of ``kwargs``, and return them.

    Raises:
        ValueError: If an argument is unknown; the message names the nearest known one.
    """
    own = ReasoningGymEnvironment.__init__.__kwdefaults__ or {}
    known = [*own, *(f.name for f in dataclasses.fields(_registry()[name][1]) if f.name not in ("seed", "size"))]
    check_arguments(f"reasoning_gym:{name}", kwargs, known)
    return kwargs


class ReasoningGymEnvironment(ReasoningEnvironment):
    """One data set of reasoning-gym.

    The reward is the data set's own score of the completion's :func:`~agile_trainers.envs.questions.answers.final_answer`,
    between 0 and 1 and often above 0 for a wrong answer; 1 is a success. An answer for which the scorer raises scores 0. A
    question's text assigns it to ``train`` or ``test``, so both splits can be used of one data set.

    No scorer executes an answer. Those that would evaluate one run in an isolated process (see
    :mod:`~agile_trainers.envs.isolation.levels`) and read only answers in their data set's grammar; see
    :mod:`~agile_trainers.envs.libraries.scorers`. An answer of more than 10,000 characters (or twice the data set's own
    answer, if that is more) scores 0.

    Args:
        name: The data set, for example ``chain_sum``.
        template: See :class:`~agile_trainers.envs.questions.environment.ReasoningEnvironment`, as for the next three;
            columns are ``question``, ``answer`` and ``metadata``.
        system_prompt: System message.
        few_shot: Worked examples before the question.
        demonstration: An ideal answer, in which ``{answer}`` stands for the answer.
        split: ``train`` or ``test``.
        test_fraction: Share of the questions in ``test``. Default .2. Finding a row of a split takes one divided by its
            share attempts on average, and some data sets are slow.
        size: Number of items that questions are drawn from; several items may have the same question.
        config: The data set's own settings.

    Raises:
        ImportError: If reasoning-gym is not installed.
        ValueError: If the data set or a setting is unknown, its configuration rejects a value, or its scorer executes
            answers and there is no grammar for them (a newer release of reasoning-gym).
        IsolationError: If its scorer evaluates answers, but this machine has no isolation and running without it is not
            allowed.
    """

    def __init__(
        self,
        name: str,
        *,
        template: str | Sequence[Message] = "{question}",
        system_prompt: str | None = None,
        few_shot: int | Sequence[Row] = 0,
        demonstration: str | Callable[[Row], str] = "{answer}",
        split: str = TRAIN,
        test_fraction: float = 0.2,
        size: int = 10_000,
        **config: Any,
    ):
        self.name = f"reasoning_gym:{name}"
        self.items = _items(name, size, _check_kwargs(name, config))
        super().__init__(
            GeneratedRows(self.items.draw, test_fraction=test_fraction),
            template=template,
            system_prompt=system_prompt,
            few_shot=few_shot,
            demonstration=demonstration,
            split=split,
        )

    def score(self, completion: str, row: Row) -> float:
        """Return the data set's own score of a completion."""
        return self.items.score(final_answer(completion), row)

    def ideal(self, row: Row) -> str:
        """Return the data set's own answer.

        Raises:
            ValueError: If it has none, since a few data sets score answers without a reference.
        """
        if row["answer"] is None:
            raise ValueError(f"{self.name} scores answers but gives none, so there is nothing to demonstrate.")
        return super().ideal(row)


class _Items:
    """A data set of reasoning-gym whose items depend only on their number."""

    def __init__(self, name: str, size: int, config: dict[str, Any]):
        self.name, self._settings = name, json.dumps({"seed": 0, "size": size, **config}, default=list)
        try:
            with OwnRandomState(0).in_place():
                self.data_set = LIBRARIES["reasoning_gym"].load().create_dataset(name, seed=0, size=size, **config)
        except (AssertionError, TypeError, ValueError) as error:
            raise ValueError(f"reasoning_gym:{name} cannot be made from size={size} and {config}: {error}") from error
        self.item = functools.lru_cache(maxsize=_CACHED_ROWS)(self._item)
        check_scorer(name, self.data_set, f"reasoning_gym:{name}")

    def draw(self, rng: random.Random) -> Row:
        """Draw a random item."""
        return self.item(rng.randrange(len(self.data_set)))

    def score(self, answer: str, item: Row) -> float:
        """Return the data set's score of an answer."""
        return score_answer(self.name, self.data_set, self._settings, answer, item, f"reasoning_gym:{self.name}")

    def _item(self, number: int) -> Row:
        if self.name in HASHED:  # where the hash seed is 0
            return run_isolated(
                scorers.item, self.name, self._settings, number, timeout=_MAKING_SECONDS, memory=_MEMORY
            )
        with OwnRandomState(number).in_place():
            return self.data_set[number]


def check_scorer(name: str, data_set: Any, required_by: str) -> None:
    """Check that this machine can score answers of a data set without executing one.

    Args:
        name: The data set's name.
        data_set: The data set.
        required_by: Name of the environment, for errors.

    Raises:
        ValueError: If the scorer executes answers and there is no grammar for them; newer releases may have such a scorer.
        IsolationError: If the scorer must be isolated, but this machine has no isolation and running without it is not
            allowed.
    """
    if name in scorers.EVALUATING:
        isolation.require(required_by)
    elif name not in _HARMLESS and _EVALUATOR.search(inspect.getsource(type(data_set).score_answer)):
        raise ValueError(
            f"{required_by} executes answers (score_answer of {type(data_set).__name__} calls eval, exec or a parser that "
            f"does), and agile_trainers has no grammar that limits them. Use another data set, or another release of "
            f"reasoning-gym."
        )


def score_answer(
    name: str, data_set: Any, settings: str, answer: str | None, entry: dict[str, Any], required_by: str
) -> float:
    """Score an answer with its data set, in an isolated process if the scorer evaluates answers or takes long.

    Args:
        name: The data set's name.
        data_set: The data set.
        settings: The data set's settings as JSON, to make it in the isolated process.
        answer: The answer; None if the completion has none.
        entry: The data set's item, with question and metadata.
        required_by: Name of the environment, for errors.

    Returns:
        The score between 0 and 1; 0 if the scorer raises or exceeds its limits.

    Raises:
        IsolationError: If this machine has no isolation and running without it is not allowed.
    """
    if name not in (*scorers.EVALUATING, *scorers.SLOW):
        with OwnRandomState(0).in_place():
            return scorers.evaluate(name, data_set, answer, entry)
    required = required_by if name in scorers.EVALUATING else None
    try:
        return float(
            run_isolated(
                scorers.score, name, settings, answer, entry, timeout=_SECONDS, memory=_MEMORY, required_by=required
            )
        )
    except (TimeoutError, IsolatedDeath):
        return 0.0


def _items(name: str, size: int, config: dict[str, Any]) -> _Items:
    """Make a data set once for all instances of an environment."""
    key = repr((name, size, sorted(config.items())))
    with LOCK:
        if key not in _made:
            _made[key] = _Items(name, size, config)
    return _made[key]


def _registry() -> dict[str, Any]:
    LIBRARIES["reasoning_gym"].load()
    return importlib.import_module("reasoning_gym.factory").DATASETS
