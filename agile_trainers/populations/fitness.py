"""Fitness of members: the mean over evaluation episodes, its standard error, and paired differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from agile_trainers.evaluation.statistics import standard_error

TIE = 2.0
"""Number of standard errors up to which a difference is a tie: about the 95 % interval."""


@dataclass(frozen=True)
class Difference:
    """The paired difference of two members' fitness."""

    mean: float
    standard_error: float

    @property
    def tied(self) -> bool:
        """True if the difference may be chance: within :data:`TIE` standard errors of 0."""
        return not abs(self.mean) > TIE * self.standard_error

    def __str__(self) -> str:
        return f"{self.mean:+.4g} ± {self.standard_error:.2g}{' (tied)' if self.tied else ''}"


@dataclass(frozen=True)
class Score:
    """The fitness of one member in one round."""

    member: int
    values: tuple[float | None, ...]
    """One per evaluation episode, the same episodes for all members; None where the environment failed."""
    units: tuple[int, ...]
    """The unit of each episode; episodes of one unit depend on each other."""
    hyperparameters: dict[str, float]

    @property
    def mean(self) -> float:
        """The fitness; NaN without a sound episode."""
        kept = [value for value in self.values if value is not None]
        return fmean(kept) if kept else math.nan

    @property
    def standard_error(self) -> float:
        """Its standard error, over units."""
        return _error(self.values, self.units)

    def minus(self, other: Score) -> Difference:
        """Compare with another member on the episodes that are sound for both."""
        pairs = [None if a is None or b is None else a - b for a, b in zip(self.values, other.values, strict=True)]
        kept = [pair for pair in pairs if pair is not None]
        return Difference(fmean(kept) if kept else math.nan, _error(pairs, self.units))


def ranked(scores: Sequence[Score]) -> list[Score]:
    """Sort by fitness, the best first; equal ones by their number."""
    return sorted(scores, key=lambda score: (-score.mean, score.member))


def _error(values: Sequence[float | None], units: Sequence[int]) -> float:
    kept = [(value, unit) for value, unit in zip(values, units, strict=True) if value is not None]
    return standard_error([value for value, _ in kept], [unit for _, unit in kept])
