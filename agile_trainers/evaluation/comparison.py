"""Compares policies that played the same episodes, and says in a sentence whether the difference is real."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, Literal

from agile_trainers.evaluation.results import EpisodeResults, paired_units, reported_together
from agile_trainers.evaluation.statistics import (
    FEWEST_UNITS,
    LEVEL,
    Interval,
    are_independent_successes,
    difference_bounds,
    difference_test,
    failure_refusal,
    holm,
    refusal,
    smallest_p_value,
)
from agile_trainers.types import StopReason

Measure = Literal["success", "return"]
Verdict = Literal["better", "worse", "no difference shown", "no verdict"]


@dataclass(frozen=True)
class Comparison:
    """The paired difference between two policies in one measure."""

    measure: Measure
    first: float
    """The first policy's mean over the compared episodes."""
    second: float
    """The second policy's mean over the same episodes."""
    low: float | None
    """Lower bound of the 95 % interval of ``difference``, see
    :func:`~agile_trainers.evaluation.statistics.difference_test`; None without a verdict."""
    high: float | None
    """Upper bound."""
    p_value: float | None
    """Two-sided: of the exact McNemar test if each pair is a unit of its own and its values are successes, otherwise of a
    test of the mean over units. None without a verdict."""
    adjusted_p_value: float | None
    """Value after Holm's correction for ``comparisons``, in which those without a verdict count too."""
    episodes: int
    """Number of pairs."""
    units: int
    """Number of independent units that the pairs form."""
    left_out: int
    """Pairs without a value, since an environment failed."""
    exact: bool = False
    """True if the test is McNemar's."""
    comparisons: int = 1
    """Number of comparisons that were made together."""
    refusal: str | None = None
    """Reason why the episodes allow no verdict, as a sentence; None if they do."""
    bounds: Interval | None = None
    """Lowest and highest difference over all pairs, whatever the failed episodes would have given; None if none failed, or
    if the environment declares no ``return_range``."""
    other: Comparison | None = None
    """The comparison by the other measure, where success is reported."""

    @property
    def difference(self) -> float:
        """The first policy's mean minus the second's."""
        return self.first - self.second

    @property
    def verdict(self) -> Verdict:
        """The first policy against the second: better or worse if the difference is shown at ``LEVEL``."""
        if self.adjusted_p_value is None:
            return "no verdict"
        if self.adjusted_p_value > LEVEL:
            return "no difference shown"
        return "better" if self.difference > 0 else "worse"

    @property
    def test(self) -> str:
        """The name of the test."""
        return "exact McNemar test" if self.exact else "paired test of the mean"

    def sentence(self, first: str, second: str) -> str:
        """Say whether the difference is real, how large it is, and how it was tested.

        Args:
            first: The first policy's name.
            second: The second policy's name.
        """
        if self.low is None or self.high is None or self.adjusted_p_value is None:
            return f"No verdict on {first} and {second}: {self.refusal} {self._left()}"
        named = f"{first} is {self.verdict} than {second}"
        if self.verdict == "no difference shown":
            named = f"No difference shown between {first} and {second}"
        if self.measure == "success":
            values = f"success {self.first:.1%} against {self.second:.1%}"
            size = f"{100 * self.difference:+.1f} points (95% interval {100 * self.low:+.1f} to {100 * self.high:+.1f})"
        else:
            values = f"return {self.first:.3f} against {self.second:.3f}"
            size = f"{self.difference:+.3f} (95% interval {self.low:+.3f} to {self.high:+.3f})"
        corrected = f", Holm's correction for {self.comparisons} comparisons" if self.comparisons > 1 else ""
        text = (
            f"{named}: {values}, {size}, p = {p_text(self.adjusted_p_value)} ({self.test}, {self._pairs()}{corrected})."
        )
        if smallest_p_value(self.units) * self.comparisons > LEVEL:
            text += (
                f" With {self.units} different starts and {self.comparisons} comparisons no difference can be shown."
            )
        if self.left_out:
            text += f" {self.left_out} pairs have no value and are left out."
        if self.other is not None and self.other.refusal is None and self.other.verdict != self.verdict:
            text += f" By the {self.other.measure} it is not the same: {self.other.sentence(first, second)}"
        return text

    def _pairs(self) -> str:
        pairs = f"{self.episodes:,} pairs of episodes"
        return pairs if self.units == self.episodes else f"{pairs} of {self.units:,} different starts"

    def _left(self) -> str:
        """Say what the pairs that are left show, and what all pairs may."""
        rates = self.measure == "success"
        text = "No pair is left."
        if self.episodes:
            first, second = (f"{one:.1%}" if rates else f"{one:.3f}" for one in (self.first, self.second))
            text = f"In the {self._pairs()} that are left, {self.measure} is {first} against {second}."
            if not self.left_out:
                return f"In {self._pairs()}, {self.measure} is {first} against {second}."
        if self.bounds is None:
            return (
                f"{text} The environment declares no return_range, so that the difference over all pairs has no bounds."
            )
        low, high = (f"{100 * one:+.1f} points" if rates else f"{one:+.3f}" for one in self.bounds)
        return (
            f"{text} Over all pairs the difference is between {low} (failed episodes of the first policy lost, those of the "
            f"second won) and {high} (the reverse)."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON-ready data. Means of no episode are None."""
        found = {**asdict(self), "difference": self.difference, "verdict": self.verdict, "test": self.test}
        found["other"] = None if self.other is None else self.other.to_dict()
        return {name: None if isinstance(one, float) and math.isnan(one) else one for name, one in found.items()}


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
        One comparison with each of the others, in their order. Their p-values are adjusted by Holm's method. ``other`` of
        each is the comparison by the other measure.

    Raises:
        ValueError: If the episodes differ, or no pair has a value.
    """
    pairs = [(policy, other) for other in others]
    return corrected([compare_measures(*pair, measure or common_measure(pair)) for pair in pairs])


def common_measure(results: Sequence[EpisodeResults]) -> Measure:
    """Return success if an episode of any policy reports it, else the return."""
    reported = any(row["success"] is not None for one in results for row in one.rows)
    return "success" if reported else "return"


def compare_measures(first: EpisodeResults, second: EpisodeResults, measure: Measure) -> Comparison:
    """Compare two policies by a measure, and by the other one too where success is reported; see :func:`compare_pairs`."""
    found = compare_pairs(first, second, measure)
    if common_measure([first, second]) == "return":
        return found
    return replace(found, other=compare_pairs(first, second, "return" if measure == "success" else "success"))


def compare_pairs(first: EpisodeResults, second: EpisodeResults, measure: Measure) -> Comparison:
    """Compare two policies, without a correction for other comparisons.

    Raises:
        ValueError: If the episodes differ, or an episode without a failure has no value.
    """
    first, second = reported_together([first, second])
    begun, others = ([one.key for one in them.starts] for them in (first, second))
    if begun != others:
        place = next((n for n, (a, b) in enumerate(zip(begun, others)) if a != b), min(len(begun), len(others)))
        raise ValueError(
            f"The policies played different episodes: {len(begun)} and {len(others)}, different from number {place} on. "
            "Play both with the same environment, seed, rows, episodes and attempts."
        )
    if any(row[measure] is None and not StopReason(row["stop_reason"]).failed for row in [*first.rows, *second.rows]):
        raise ValueError(f"measure={measure!r}: the environment does not report it. Compare the return.")
    ours, theirs = first.values(measure), second.values(measure)
    limits = first.limits(measure, second)
    all_units = paired_units(first, second)
    pairs, units = [], []
    for a, b, unit in zip(ours, theirs, all_units):
        if a is not None and b is not None:
            pairs.append((a, b))
            units.append(unit)
    reason = failure_refusal(ours, theirs) or _too_little([a - b for a, b in pairs], units, limits)
    low = high = p_value = None
    if reason is None:
        (low, high), p_value = difference_test([a for a, _ in pairs], [b for _, b in pairs], units, limits)
    return Comparison(
        measure,
        fmean(a for a, _ in pairs) if pairs else math.nan,
        fmean(b for _, b in pairs) if pairs else math.nan,
        low,
        high,
        p_value=p_value,
        adjusted_p_value=p_value,
        episodes=len(pairs),
        units=len(set(units)),
        left_out=len(ours) - len(pairs),
        exact=are_independent_successes([value for pair in pairs for value in pair], units, limits),
        refusal=reason,
        bounds=difference_bounds(ours, theirs, limits) if len(pairs) < len(ours) else None,
    )


def _too_little(
    differences: Sequence[float], units: Sequence[Hashable], limits: tuple[float, float] | None
) -> str | None:
    """Say why the pairs are too few, or one of them decides; None if they allow a verdict."""
    number = len(set(units))
    if number < FEWEST_UNITS:
        return f"{number} independent pairs of episodes cannot show any difference; at least {FEWEST_UNITS} are needed."
    return refusal(differences, units, limits)


def corrected(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Adjust the p-values of comparisons that are made together by Holm's method, those of each measure by themselves."""
    adjusted = holm([1.0 if one.p_value is None else one.p_value for one in comparisons])
    found = [
        replace(one, adjusted_p_value=None if one.p_value is None else value, comparisons=len(comparisons))
        for one, value in zip(comparisons, adjusted)
    ]
    others = [one.other for one in comparisons if one.other is not None]
    if others:
        again = iter(corrected(others))
        found = [one if one.other is None else replace(one, other=next(again)) for one in found]
    return found


def p_text(value: float) -> str:
    """Format a p-value with two digits."""
    return f"{value:.2g}" if value >= 1e-300 else "0 (below 1e-300)"
