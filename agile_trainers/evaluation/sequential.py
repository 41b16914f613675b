"""Tests, batch by batch, whether a metric of a run has left the value that it had before any update.

The first batch is the start. Later batches form blocks of 5, 10, 20, ... of them. Each block is compared once, when it is
complete: with the start, and with all batches up to the end of the first block of its size or of ``PREFIX`` batches. So a
large change is found within five batches, and a small one because more batches are averaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import erfc, log, sqrt
from typing import Any

BLOCK = 5
"""Batches of the smallest block."""
PREFIX = 20
"""Batches after the first, at most, with which later ones are compared. Their mean is near the start, and less noisy."""
ALPHA = 2e-3
"""Probability that a metric which never changes is ever said to fall, however long the run, and the same for a rise. The
comparisons spend it by Bonferroni's inequality: the j-th block of ``BLOCK * 2**i`` batches gets
``ALPHA / (j * (j + 1) * (i + 1) * (i + 2))``, half of it for each of its two comparisons; these shares add up to ``ALPHA``.
(Alpha spending: Lan and DeMets, Biometrika 70, 1983.)"""
MANY = 20
"""Batches after which the spread between batches counts too where the error of each is known."""


@dataclass(frozen=True)
class Shift:
    """The difference of a block of batches from the start of a run."""

    first: float
    """Value at the start."""
    now: float
    """Mean of the block."""
    p: float
    """Probability of such a difference, in its direction, of a metric that does not change."""
    share: float
    """Share of ``ALPHA`` that the comparison may spend."""
    batch: int
    """Number of the block's last batch, the first of the run being 1."""

    @property
    def clearness(self) -> float:
        """Logarithm of ``share`` over ``p``; above 0, noise does not explain the difference."""
        return log(self.share / max(self.p, 1e-300))

    @property
    def rose(self) -> bool:
        """True if the difference is a rise that noise does not explain."""
        return self.now > self.first and self.clearness > 0

    @property
    def fell(self) -> bool:
        """True if the difference is a fall that noise does not explain."""
        return self.now < self.first and self.clearness > 0


@dataclass
class Level:
    """The blocks of one size: the mean of the first, that of one that waits for its neighbour, and the latest comparison."""

    first: float
    waiting: float = 0.0
    shift: dict[str, Any] = field(default_factory=dict)


@dataclass
class Course:
    """The comparisons of one metric with its start, whose size grows with the logarithm of the run's length."""

    start: float
    """Value of the first batch."""
    count: int = 0
    """Batches after the first."""
    last: float = 0.0
    total: float = 0.0
    """Sum of the batches of the block that is not complete."""
    squares: float = 0.0
    """Sum of the squared differences of successive batches, without the first."""
    errors: list[float] = field(default_factory=list)
    """Squared standard errors of the batches, where they are known: that of the first, and the sum of all."""
    levels: list[Level] = field(default_factory=list)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Course:
        """Return the course whose ``asdict`` is given."""
        return cls(**{**state, "levels": [Level(**level) for level in state["levels"]]})

    def add(self, value: float, error: float | None, groups: int) -> None:
        """Take the value of a batch after the first.

        Args:
            value: Mean of the batch.
            error: Its standard error; None if it is not known.
            groups: Independent groups of a batch, from which the error was computed.
        """
        self.squares += (value - self.last) ** 2 if self.count else 0.0
        self.count, self.last, self.total = self.count + 1, value, self.total + value
        self.errors = [self.errors[0], self.errors[1] + error**2] if self.errors and error is not None else []
        if self.count % BLOCK:
            return
        mean, level, self.total = self.total / BLOCK, 0, 0.0
        while True:
            if level == len(self.levels):
                self.levels.append(Level(mean))
            own = self.levels[level]
            own.shift = asdict(self._compare(level, mean, groups))
            if (self.count // (BLOCK << level)) % 2:
                own.waiting = mean
                return
            mean, level = (own.waiting + mean) / 2, level + 1

    def shift(self) -> Shift | None:
        """Return the clearest of the latest comparisons, those of long blocks first; None before the first block."""
        found = [Shift(**level.shift) for level in reversed(self.levels)]
        return max(found, key=lambda shift: shift.clearness, default=None)

    def _compare(self, level: int, now: float, groups: int) -> Shift:
        size = BLOCK << level
        block = self.count // size
        share = ALPHA / (2 * block * (block + 1) * (level + 1) * (level + 2))
        references = [(self.start, 1)]
        if block > 1:
            sizes = [BLOCK << below for below in range(level + 1) if BLOCK << below <= PREFIX]
            means = [((self.start + n * own.first) / (n + 1), n + 1) for n, own in zip(sizes, self.levels)]
            # What was learned meanwhile is not the start: a fall is one from the lowest of these means.
            references.append(min(means) if now < means[-1][0] else max(means))
        found = []
        for first, batches in references:
            p = max(
                tail(abs(now - first) / sqrt(max(variance, 1e-12) * (1 / batches + 1 / size)), freedom)
                for variance, freedom in self._variances(groups)
            )
            found.append(Shift(first, now, p, share, self.count + 1))
        return min(found, key=lambda shift: shift.p)

    def _variances(self, groups: int) -> list[tuple[float, float]]:
        """Return estimates of the variance of a batch with their degrees of freedom, of which each must show a difference.

        One is half the mean square of successive differences, to which a trend adds little (von Neumann, 1941). The other,
        where batches come with their errors, is their mean, or that of the first batch if it is larger.
        """
        n = self.count
        between = self.squares / (2 * (n - 1)), 2 * (n - 1) ** 2 / (3 * n - 4)
        if not self.errors or groups < 2:
            return [between]
        within = max(self.errors[0], self.errors[1] / (n + 1)), (groups - 1) * (n + 1.0)
        return [within] if n < MANY else [within, between]


def tail(errors: float, freedom: float) -> float:
    """Return the probability that Student's t exceeds a number of standard errors, by Wallace's approximation (1959)."""
    z = (8 * freedom + 1) / (8 * freedom + 3) * sqrt(freedom * log(1 + errors**2 / freedom))
    return erfc(z / sqrt(2)) / 2
