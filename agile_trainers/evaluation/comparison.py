"""Compares policies that played the same episodes, and says in a sentence whether the difference is real."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, Literal

from agile_trainers.evaluation.results import EpisodeResults
from agile_trainers.evaluation.statistics import bootstrap_interval, holm, sign_flip_p_value, smallest_p_value
from agile_trainers.types import StopReason

LEVEL = 0.05
"""Largest p-value, after Holm's correction, at which a difference counts as shown."""
Measure = Literal["success", "return"]
Verdict = Literal["better", "worse", "no difference shown"]


@dataclass(frozen=True)
class Comparison:
    """The paired difference between two policies in one measure."""

    measure: Measure
    first: float
    """The first policy's mean over the compared episodes."""
    second: float
    """The second policy's mean over the same episodes."""
    low: float
    """Lower bound of the 95 % interval of ``difference``, by the paired bootstrap over units."""
    high: float
    """Upper bound."""
    p_value: float
    """Two-sided: of the exact McNemar test if each episode is a unit of its own and the measure is success, otherwise of the
    paired randomization test over units."""
    adjusted_p_value: float
    """Value after Holm's correction for ``comparisons``."""
    episodes: int
    """Number of pairs."""
    units: int
    """Number of independent units that the pairs form."""
    left_out: int
    """Pairs without a value, since an environment failed or reported no success."""
    comparisons: int = 1
    """Number of comparisons that were made together."""

    @property
    def difference(self) -> float:
        """The first policy's mean minus the second's."""
        return self.first - self.second

    @property
    def verdict(self) -> Verdict:
        """The first policy against the second: better or worse if the difference is shown at ``LEVEL``."""
        if self.adjusted_p_value > LEVEL:
            return "no difference shown"
        return "better" if self.difference > 0 else "worse"

    @property
    def test(self) -> str:
        """The name of the test."""
        exact = self.measure == "success" and self.units == self.episodes
        return "exact McNemar test" if exact else "paired randomization test"

    def sentence(self, first: str, second: str) -> str:
        """Say whether the difference is real, how large it is, and how it was tested.

        Args:
            first: The first policy's name.
            second: The second policy's name.
        """
        verdict = self.verdict
        named = f"{first} is {verdict} than {second}"
        if verdict == "no difference shown":
            named = f"No difference shown between {first} and {second}"
        if self.measure == "success":
            values = f"success {self.first:.1%} against {self.second:.1%}"
            size = f"{100 * self.difference:+.1f} points (95% interval {100 * self.low:+.1f} to {100 * self.high:+.1f})"
        else:
            values = f"return {self.first:.3f} against {self.second:.3f}"
            size = f"{self.difference:+.3f} (95% interval {self.low:+.3f} to {self.high:+.3f})"
        pairs = f"{self.episodes:,} pairs of episodes"
        if self.units != self.episodes:
            pairs += f" of {self.units:,} different starts"
        corrected = f", Holm's correction for {self.comparisons} comparisons" if self.comparisons > 1 else ""
        text = f"{named}: {values}, {size}, p = {p_text(self.adjusted_p_value)} ({self.test}, {pairs}{corrected})."
        if smallest_p_value(self.units) * self.comparisons > LEVEL:
            text += f" With {self.units} different starts this test cannot show any difference; play more."
        if self.left_out:
            text += f" {self.left_out} pairs have no value and are left out."
        return text

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON-ready data."""
        return {**asdict(self), "difference": self.difference, "verdict": self.verdict, "test": self.test}


def compare_policies(
    policy: EpisodeResults, *others: EpisodeResults, measure: Measure | None = None
) -> list[Comparison]:
    """Compare a policy with others that played the same episodes.

    Episodes are paired by environment, seed, row and attempt. Play them with ``sampling_seed`` of each policy's own, so that
    the noise is independent.

    Args:
        policy: The first policy's episodes.
        others: The episodes of each of the others.
        measure: ``"success"`` or ``"return"``. Default: success if the environment reports it, else the return.

    Returns:
        One comparison with each of the others, in their order. Their p-values are adjusted by Holm's method.

    Raises:
        ValueError: If the episodes differ, or no pair has a value.
    """
    return corrected([compare_pairs(policy, other, measure or common_measure([policy, other])) for other in others])


def common_measure(results: Sequence[EpisodeResults]) -> Measure:
    """Return success if the episodes of all policies report it, else the return."""
    reported = all(any(row["success"] is not None for row in one.rows) for one in results)
    return "success" if reported else "return"


def compare_pairs(first: EpisodeResults, second: EpisodeResults, measure: Measure) -> Comparison:
    """Compare two policies, without a correction for other comparisons.

    Raises:
        ValueError: If the episodes differ, or no pair has a value.
    """
    ours, theirs = ([(one.environment, one.seed, one.row) for one in them.starts] for them in (first, second))
    if ours != theirs:
        place = next((n for n, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
        raise ValueError(
            f"The policies played different episodes: {len(ours)} and {len(theirs)}, different from number {place} on. Play "
            "both with the same environment, seed, rows, episodes and attempts."
        )
    values = [(_value(a, measure), _value(b, measure)) for a, b in zip(first.rows, second.rows)]
    kept = [index for index, (a, b) in enumerate(values) if a is not None and b is not None]
    if not kept:
        raise ValueError(f"No pair of episodes has a {measure}; did every environment fail?")
    pairs = [(float(values[index][0] or 0.0), float(values[index][1] or 0.0)) for index in kept]
    # Where one policy plays greedily, its repeats of a starting state are no news, whatever the other does.
    greedy = first.greedy or second.greedy
    units = [first.starts[index].unit(greedy) for index in kept]
    differences = [a - b for a, b in pairs]
    p_value = sign_flip_p_value(differences, units)
    return Comparison(
        measure,
        fmean(a for a, _ in pairs),
        fmean(b for _, b in pairs),
        *bootstrap_interval(differences, units),
        p_value=p_value,
        adjusted_p_value=p_value,
        episodes=len(kept),
        units=len(set(units)),
        left_out=len(values) - len(kept),
    )


def corrected(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Adjust the p-values of comparisons that are made together, by Holm's method."""
    adjusted = holm([one.p_value for one in comparisons])
    return [
        replace(one, adjusted_p_value=value, comparisons=len(comparisons)) for one, value in zip(comparisons, adjusted)
    ]


def p_text(value: float) -> str:
    """Format a p-value with two digits."""
    return f"{value:.2g}" if value >= 1e-300 else "0 (below 1e-300)"


def _value(row: dict[str, Any], measure: Measure) -> float | None:
    failed = StopReason(row["stop_reason"]).failed
    value = row[measure]
    return None if failed or value is None else float(value)
