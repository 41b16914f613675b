"""Fitness of members: the mean over evaluation episodes, its standard error, and paired differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from agile_trainers.evaluation.failures import failed_value
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
    values: tuple[float, ...]
    """One per evaluation episode, the same episodes for all members; failed ones as :func:`with_failures` counts them."""
    units: tuple[int, ...]
    """The unit of each episode; episodes of one unit depend on each other."""
    hyperparameters: dict[str, float]

    @property
    def mean(self) -> float:
        """The fitness."""
        return fmean(self.values)

    @property
    def standard_error(self) -> float:
        """Its standard error, over units."""
        return standard_error(self.values, self.units)

    def minus(self, other: Score) -> Difference:
        """Compare with another member, episode by episode."""
        pairs = [a - b for a, b in zip(self.values, other.values, strict=True)]
        # In greedy play the same game for one member may be several for another.
        units = list(zip(self.units, other.units, strict=True))
        return Difference(fmean(pairs), standard_error(pairs, units))


def with_failures(values: Sequence[Sequence[float | None]], lowest: float | None) -> list[tuple[float, ...]]:
    """Count failed episodes against the members: with the lowest value that any of them could have had.

    Args:
        values: Of each member, the fitness of each evaluation episode; None where the environment failed.
        lowest: The lowest possible value. None if it is not known: the lowest of all members' values and 0.
    """
    known = [value for member in values for value in member if value is not None]
    failed = failed_value(known, None if lowest is None else (lowest, lowest))
    return [tuple(failed if value is None else value for value in member) for member in values]


def ranked(scores: Sequence[Score]) -> list[Score]:
    """Sort by fitness, the best first; equal ones by their number."""
    return sorted(scores, key=lambda score: (-score.mean, score.member))
