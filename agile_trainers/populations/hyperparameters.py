"""Ranges of hyperparameters: how a first value is drawn, and how a value is moved."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from agile_trainers.config.multi_turn import MultiTurnConfig

Values = dict[str, float]
"""Option name to value."""
Changes = dict[str, tuple[float, float]]
"""Option name to the values before and after a mutation."""
MOVABLE = (
    "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "beta", "epsilon",
    "epsilon_high", "delta", "entropy_coef", "gamma", "temperature", "top_p", "top_k", "min_p", "num_iterations",
    "advantage_clip_range", "vllm_importance_sampling_clip_max",
)  # fmt: skip
"""Options of all algorithms in which members may differ, besides those of their own algorithm."""
_BY_START = ("critic_layers", "critic_warmup_steps", "num_generations")
"""Numbers among an algorithm's own options that fix shapes or act at the start only."""


@dataclass(frozen=True)
class Range:
    """The values that a hyperparameter may take.

    Args:
        low: Smallest value, above 0.
        high: Largest value, above ``low``.
        log: Draw the first value uniformly on a logarithmic scale.
        grow: Factor of a mutation upwards, above 1. Whole numbers move by at least one.
        shrink: Factor of a mutation downwards, between 0 and 1.

    Raises:
        ValueError: If a number is out of range.
    """

    low: float
    high: float
    log: bool = False
    grow: float = 1.25
    shrink: float = 0.8

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high < math.inf or not self.grow > 1 > self.shrink > 0:
            raise ValueError(
                f"A Range needs 0 < low < high, grow above 1 and shrink between 0 and 1, got {self}. A value of 0 could not "
                "be moved by a factor; set an option that is the same for all members in `args`."
            )

    def at(self, share: float, *, whole: bool = False) -> float:
        """Return the value below which lies this share of the range.

        Args:
            share: In [0, 1).
            whole: Return a whole number; each has the same share, or that of its logarithmic interval.
        """
        low, high = (self.low - 0.5, self.high + 0.5) if whole else (self.low, self.high)
        value = (
            math.exp((1 - share) * math.log(low) + share * math.log(high)) if self.log else low + share * (high - low)
        )
        return self._inside(value, whole)

    def move(self, value: float, factor: float, *, whole: bool = False) -> float:
        """Multiply a value, and keep it in the range.

        Args:
            value: The value.
            factor: Above or below 1; a whole number moves by at least one in its direction.
            whole: Round to a whole number.
        """
        moved = value * factor
        if whole:
            moved = max(round(moved), value + 1) if factor > 1 else min(round(moved), value - 1)
        return self._inside(moved, whole)

    def _inside(self, value: float, whole: bool) -> float:
        inside = min(max(value, self.low), self.high)
        return round(inside) if whole else float(inside)


class HyperparameterConfig(dict[str, Range]):
    """The options in which the members of a population differ, each with its :class:`Range`.

    ``HyperparameterConfig(learning_rate=Range(1e-5, 1e-3, log=True), num_iterations=Range(1, 4))``. The names are those of
    the algorithm's configuration.

    Raises:
        ValueError: Without any range.
        TypeError: If a value is no ``Range``.
    """

    def __init__(self, **ranges: Range) -> None:
        if not ranges:
            raise ValueError(
                "HyperparameterConfig() names no option, so all members would be the same run. Give at least one, such as "
                "learning_rate=Range(1e-5, 1e-3, log=True)."
            )
        for name, one in ranges.items():
            if not isinstance(one, Range):
                raise TypeError(f"{name}={one!r} must be a Range, such as Range(1e-5, 1e-3, log=True).")
        super().__init__(ranges)

    def __repr__(self) -> str:
        return f"HyperparameterConfig({', '.join(f'{name}={one!r}' for name, one in self.items())})"


@dataclass(frozen=True)
class SearchSpace:
    """The ranges of a population, and which of them are of whole numbers."""

    ranges: dict[str, Range]
    whole: frozenset[str]

    def draw(self, count: int, rng: np.random.Generator) -> list[Values]:
        """Draw the first values of members, spread evenly: each option has one value in each ``count``-th of its range.

        Source: McKay, Beckman and Conover (1979), Latin hypercube sampling.
        """
        shares = {name: (rng.permutation(count) + rng.random(count)) / count for name in self.ranges}
        return [
            {name: one.at(float(shares[name][n]), whole=name in self.whole) for name, one in self.ranges.items()}
            for n in range(count)
        ]

    def mutate(self, values: Values, rng: np.random.Generator) -> Values:
        """Move one option, drawn at random, up or down: AgileRL's mutation."""
        name, one = list(self.ranges.items())[int(rng.integers(len(self.ranges)))]
        factor = one.grow if rng.random() < 0.5 else one.shrink
        return {**values, name: one.move(values[name], factor, whole=name in self.whole)}


def search_space(config: type[MultiTurnConfig], hyperparameters: Mapping[str, Range]) -> SearchSpace:
    """Check that members may differ in these options, and find the whole numbers among them.

    Args:
        config: The algorithm's configuration class.
        hyperparameters: Option name to range.

    Raises:
        ValueError: For an option that does not exist or must be the same for all members, or a range of fractions for a
            whole number.
    """
    there = {one.name: one for one in fields(config)}
    shared = {one.name for one in fields(MultiTurnConfig)}
    numeric = {name for name, one in there.items() if re.search(r"\b(int|float)\b", str(one.type))}
    own = numeric - shared - set(_BY_START)
    movable = sorted(own | (numeric & set(MOVABLE)))
    for name in hyperparameters:
        if name not in movable:
            reason = "is the same for all members" if name in there else f"is no option of {config.__name__}"
            raise ValueError(
                f"hyperparameters: {name} {reason}. Members share model, LoRA settings, batch shapes, lengths, schedule and "
                f"seeds; they may differ in {', '.join(movable)}."
            )
    whole = frozenset(name for name in hyperparameters if not re.search(r"\bfloat\b", str(there[name].type)))
    for name in whole:
        one = hyperparameters[name]
        if one.low != int(one.low) or one.high != int(one.high):
            raise ValueError(f"hyperparameters: {name} takes whole numbers, got Range({one.low}, {one.high}).")
    return SearchSpace(dict(hyperparameters), whole)


def changes_between(before: Values, after: Values) -> Changes:
    """Return the options whose value differs, with both values."""
    return {name: (before[name], after[name]) for name in after if before[name] != after[name]}


def with_values(args: Any, values: Values) -> Any:
    """Copy a configuration with these values of hyperparameters; whole numbers become ``int``."""
    made = copy.copy(args)
    for name, value in values.items():
        setattr(made, name, value)
    return made
