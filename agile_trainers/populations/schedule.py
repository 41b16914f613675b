"""The rounds of a population, and how many steps and episodes they take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any


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
