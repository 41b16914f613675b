"""Selection: which members go on, which are copied, and with which hyperparameters. Pure functions of scores and a seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from statistics import fmean
from typing import Any, Protocol

import numpy as np

from agile_trainers.evaluation.statistics import failed_value, standard_error
from agile_trainers.populations.hyperparameters import SearchSpace, Values

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


_ATTEMPTS = 100
"""Mutations that are tried to make a copy differ; a range of few whole numbers may have no further value."""


@dataclass(frozen=True)
class Successor:
    """A member of the next round: a member that goes on, or a copy of one."""

    parent: int
    """The member whose weights and optimizer it takes."""
    hyperparameters: Values
    reason: str = ""


@dataclass(frozen=True)
class Selection:
    """The outcome of a selection."""

    successors: list[Successor]
    """The members of the next round. Of several with one parent, one goes on in its folder, and the others are copies."""
    reasons: dict[int, str]
    """The reasons of members without a successor."""


class Strategy(Protocol):
    """Selects the members of the next round."""

    @property
    def name(self) -> str:
        """Its name in the lineage."""
        ...

    def select(self, scores: Sequence[Score], started: int, space: SearchSpace, rng: np.random.Generator) -> Selection:
        """Select the members of the next round.

        Args:
            scores: Of the members that finished the round, in order of their numbers; at least one.
            started: Number of members that started the round, failed ones included.
            space: Ranges of the hyperparameters.
            rng: Source of random numbers, seeded by population and round.
        """
        ...


@dataclass(frozen=True)
class Halving:
    """Successive halving: after each round the worse half of the members stops, and the others go on unchanged.

    The number of members that stop does not depend on the differences, so that the cost is known before. The reason of a
    stop says when its difference is a tie.

    Source: Jamieson and Talwalkar (2016), "Non-stochastic Best Arm Identification and Hyperparameter Optimization".
    """

    name: str = "halving"

    def select(self, scores: Sequence[Score], started: int, space: SearchSpace, rng: np.random.Generator) -> Selection:
        """See :class:`Strategy`."""
        order = ranked(scores)
        kept = order[: math.ceil(started / 2)]
        last = kept[-1]
        reasons = {one.member: _against(one, last) for one in order[len(kept) :]}
        return Selection([Successor(one.member, one.hyperparameters) for one in kept], reasons)


@dataclass(frozen=True)
class Tournament:
    """Tournament selection with mutation, as in AgileRL: each place of the next round goes to the winner of a tournament.

    Members that tie with the best of a tournament share its chances.

    Args:
        size: Members of a tournament, drawn with replacement.
        elitism: The best member goes on unchanged.
        mutation_probability: Probability that a successor, the elite apart, has one hyperparameter moved. One that would
            equal another always has.

    Raises:
        ValueError: If a number is out of range.
    """

    size: int = 2
    elitism: bool = True
    mutation_probability: float = 0.5
    name: str = "tournament"

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.mutation_probability <= 1:
            raise ValueError(
                "Tournament needs size of at least 1 and mutation_probability in [0, 1], got "
                f"size={self.size}, mutation_probability={self.mutation_probability}."
            )

    def select(self, scores: Sequence[Score], started: int, space: SearchSpace, rng: np.random.Generator) -> Selection:
        """See :class:`Strategy`."""
        best = ranked(scores)[0]
        successors = [Successor(best.member, best.hyperparameters, "elite")] if self.elitism else []
        while len(successors) < started:
            drawn = [scores[int(index)] for index in rng.integers(len(scores), size=self.size)]
            first = ranked(drawn)[0]
            tied = [one for one in {one.member: one for one in drawn}.values() if first.minus(one).tied]
            winner = first if len(tied) < 2 else tied[int(rng.integers(len(tied)))]
            others = ", ".join(str(one.member) for one in drawn)
            reason = f"won the tournament of {others}{' by lot among ties' if len(tied) > 1 else ''}"
            values = winner.hyperparameters
            if rng.random() < self.mutation_probability:
                values = space.mutate(values, rng)
            successors.append(_distinct(Successor(winner.member, values, reason), successors, space, rng))
        parents = {one.parent for one in successors}
        return Selection(
            successors,
            {one.member: f"no tournament won; {_against(one, best)}" for one in scores if one.member not in parents},
        )


STRATEGIES: dict[str, type[Halving] | type[Tournament]] = {"halving": Halving, "tournament": Tournament}
LARGEST_HALVING = 16
"""Number of members up to which the default is successive halving."""


def strategy_of(name: str | Strategy | None, members: int) -> Strategy:
    """Find a strategy.

    Args:
        name: A name, a strategy, or None for the default of this number of members.
        members: Number of members.

    Raises:
        ValueError: If there is none of this name.
    """
    if name is None:
        return Halving() if members <= LARGEST_HALVING else Tournament()
    if not isinstance(name, str):
        return name
    if name not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, or a Strategy, got {name!r}.")
    return STRATEGIES[name]()


def _distinct(made: Successor, others: Sequence[Successor], space: SearchSpace, rng: np.random.Generator) -> Successor:
    """Mutate a successor until it equals none of the others: members share their seeds, so it would be the same run."""
    for _ in range(_ATTEMPTS):
        if all((made.parent, made.hyperparameters) != (one.parent, one.hyperparameters) for one in others):
            break
        made = replace(made, hyperparameters=space.mutate(made.hyperparameters, rng))
    return made


def _against(one: Score, other: Score) -> str:
    return f"{one.minus(other)} against member {other.member}"


@dataclass(frozen=True)
class Schedule:
    """Ends of the rounds, in steps of a member with the ``num_iterations`` of the shared configuration."""

    ends: tuple[int, ...]
    """Increasing; the last is ``max_steps``."""
    per_batch: Fraction
    """Steps on one generation batch."""
    batch: int
    """Episodes of one generation batch."""
    num_iterations: int
    """The option of the shared configuration."""
    quantum: int
    """Rounds end at multiples of this number of steps."""

    @classmethod
    def of(cls, args: Any, rounds: int | Sequence[int], *, iterations_differ: bool) -> Schedule:
        """Plan the rounds.

        Args:
            args: The shared configuration.
            rounds: Their number, or their ends; after the last of these, one more goes to ``max_steps``.
            iterations_differ: True if members differ in ``num_iterations``: rounds then end with generation batches.

        Raises:
            ValueError: If the rounds do not fit into ``max_steps``.
        """
        steps, accumulation = args.steps_per_generation, args.gradient_accumulation_steps
        per_batch = Fraction(steps * args.num_iterations, accumulation)
        if iterations_differ and steps % accumulation:
            raise ValueError(
                "hyperparameters: num_iterations can differ only where optimizer steps end with generation batches, but "
                f"gradient_accumulation_steps={accumulation} does not divide steps_per_generation={steps}."
            )
        quantum, last = int(per_batch) if iterations_differ else 1, args.max_steps
        if last % quantum:
            raise ValueError(
                f"max_steps={last} ends inside a generation batch, which takes {quantum} steps, and members differ in "
                f"num_iterations. Set a multiple of {quantum}."
            )
        if isinstance(rounds, int):
            if not 1 <= rounds <= last // quantum:
                raise ValueError(f"rounds must be between 1 and {last // quantum} (max_steps={last}), got {rounds}.")
            ends = [quantum * round(n * last / rounds / quantum) for n in range(1, rounds)]
        else:
            ends = [int(end) for end in rounds if end != last]
        ends.append(last)
        if any(a >= b for a, b in zip([0, *ends], ends)) or any(end % quantum for end in ends):
            raise ValueError(
                f"rounds={rounds!r}: the steps at which rounds end must increase from above 0 to at most max_steps={last}"
                + (f", in multiples of {quantum} (whole generation batches)." if quantum > 1 else ".")
            )
        return cls(tuple(ends), per_batch, args.generation_batch_size, args.num_iterations, quantum)

    def steps(self, step: int, num_iterations: int) -> int:
        """Return the step of a member that has played as many generation batches with another ``num_iterations``."""
        return step * num_iterations // self.num_iterations

    def episodes(self, start: int, end: int) -> int:
        """Return the episodes that one member plays from step ``start`` to ``end``."""
        return (math.ceil(end / self.per_batch) - math.ceil(start / self.per_batch)) * self.batch

    def end(self, start: int, members: int, episodes: int | None) -> int | None:
        """Return the end of the round that begins at a step; None if there is none.

        Args:
            start: Its first step.
            members: Number of members that train.
            episodes: What is left of the budget; the round is cut to it. None: no limit.
        """
        end = next((end for end in self.ends if end > start), None)
        if end is None or episodes is None:
            return end
        while end > start and members * self.episodes(start, end) > episodes:
            end -= self.quantum
        return end if end > start else None
