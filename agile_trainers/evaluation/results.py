"""The episodes of an evaluation: which are played, and their metrics."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from statistics import fmean
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object
from transformers.utils import logging

from agile_trainers.evaluation.statistics import failed_value, mean_interval, pass_at_k, refusal, standard_error, within
from agile_trainers.records.plain import content_digest
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.generators.base import Generator
from agile_trainers.rollout.metrics import environments_with_success, episode_metrics, summarize, with_success
from agile_trainers.rollout.seeds import EVALUATION, Mixture, environment_seed
from agile_trainers.rollout.spec import EpisodeSpec
from agile_trainers.types import StopReason, Trajectory, keyed

logger = logging.get_logger(__name__)

Range = tuple[float, float]
"""The lowest and highest return of an episode."""


@dataclass(frozen=True)
class EpisodeStart:
    """The start of an episode, by which episodes of several policies are paired and repeats are found."""

    environment: str | None
    """The environment's name in a run of several."""
    seed: int
    row: str | None
    """Hash of the data set row; None without one."""
    prompt: str
    """Hash of the first prompt."""
    information: str
    """Hash of the environment's information at reset."""
    played: str
    """Hash of the prompt and everything that followed, in tokens."""
    outcome: str
    """Hash of the rewards of the turns and of the reason of the end."""

    @property
    def key(self) -> tuple[str | None, int, str | None]:
        """Environment, seed and row, by which episodes are paired."""
        return self.environment, self.seed, self.row

    @property
    def unit(self) -> Hashable:
        """The unit of sampled episodes: those of one row, or of one seed, depend on each other."""
        return self.environment, self.seed if self.row is None else self.row


def units_of(starts: Sequence[EpisodeStart], greedy: bool) -> list[Hashable]:
    """Return the unit of each episode, of episodes that depend on each other.

    Episodes of one row, or of one seed, are one unit. In greedy play so are those in which the same was said from the prompt
    to the end, since each is the same game again, whatever the seed. If the same words had different rewards, chance that
    the conversation does not show decided, and each seed or row is a unit.
    """
    if not greedy:
        return [start.unit for start in starts]
    outcomes: dict[Hashable, set[str]] = defaultdict(set)
    for start in starts:
        outcomes[start.environment, start.played].add(start.outcome)
    games = [(start.environment, start.played) for start in starts]
    return [game if len(outcomes[game]) == 1 else start.unit for game, start in zip(games, starts)]


def paired_units(first: EpisodeResults, second: EpisodeResults) -> list[Hashable]:
    """Return the unit of each pair of episodes of two policies.

    Where one policy plays greedily, its repetitions are no news, whatever the other does. Where both do, pairs are the same
    again if both play the same game.
    """
    if first.greedy and second.greedy:
        return list(zip(first.units, second.units, strict=True))
    return first.units if first.greedy else second.units


@dataclass(frozen=True)
class EpisodeResults:
    """The episodes of an evaluation and their metrics."""

    specs: list[EpisodeSpec]
    """The episodes of this process: seed, sampling stream and data set row of each."""
    trajectories: list[Trajectory]
    """The same episodes, played."""
    places: list[int]
    """Their places among the episodes of all processes."""
    rows: list[dict[str, Any]]
    """One :func:`~agile_trainers.rollout.metrics.episode_metrics` per episode of all processes, in order of their places:
    ``return``, ``success``, ``turns``, ``action_tokens``, ``stop_reason``, ``environment`` and others."""
    starts: list[EpisodeStart]
    """The start of each episode of all processes, in the order of ``rows``."""
    greedy: bool = False
    """True if the likeliest token was taken instead of sampling."""
    ranges: Mapping[str | None, Range] = field(default_factory=dict)
    """Name of an environment (None for one without) to the lowest and highest return that it declares."""

    @property
    def units(self) -> list[Hashable]:
        """The unit of each of ``rows``, of episodes that depend on each other; see :func:`units_of`."""
        return units_of(self.starts, self.greedy)

    @property
    def metrics(self) -> dict[str, float]:
        """Return the metrics of :func:`evaluation_metrics` over all episodes."""
        return evaluation_metrics(self.rows, self.ranges, self.units)

    @property
    def by_environment(self) -> dict[str, dict[str, float]]:
        """The metrics of each of several environments, by its name; empty for one."""
        by_name: dict[str, list[int]] = defaultdict(list)
        for place, row in enumerate(self.rows):
            if row["environment"] is not None:
                by_name[row["environment"]].append(place)
        units = self.units
        return {
            name: evaluation_metrics([self.rows[k] for k in own], self.ranges, [units[k] for k in own])
            for name, own in sorted(by_name.items())
        }

    def values(self, measure: str) -> list[float | None]:
        """Return the success or return of each episode; None where the environment failed, or reports no success."""
        return [
            None if StopReason(row["stop_reason"]).failed or row[measure] is None else float(row[measure])
            for row in self.rows
        ]

    def limits(self, measure: str, *others: EpisodeResults) -> Range | None:
        """Return the lowest and highest value of a measure, of all environments; None if one declares no range.

        Where none is declared, returns that equal the reported success in every episode are between 0 and 1. A range that a
        return contradicts is none.

        Args:
            measure: ``"success"`` or ``"return"``.
            others: Results of other policies, whose returns must be in the range too.
        """
        if measure == "success":
            return 0.0, 1.0
        sound: dict[str | None, list[dict[str, Any]]] = {}
        for row in (row for one in (self, *others) for row in one.rows):
            sound.setdefault(row["environment"], []).extend([] if _failed(row) else [row])
        known = set[Range]()
        for name, rows in sound.items():
            own = {found for one in (self, *others) if (found := one.ranges.get(name)) is not None}
            if not own and rows and all(row["success"] == row["return"] for row in rows):
                own = {(0.0, 1.0)}
            if not own:
                return None
            known |= own
        limits = min(low for low, _ in known), max(high for _, high in known)
        returns = [row["return"] for rows in sound.values() for row in rows]
        if returns and not within(returns, limits):
            logger.warning_once(
                f"The environment declares return_range={limits}, but episodes return {min(returns):g} to {max(returns):g}. "
                "The range is not used."
            )
            return None
        return limits


def reported_together(results: Sequence[EpisodeResults]) -> list[EpisodeResults]:
    """Count success alike for policies in the same environments: once one reports it, those that do not are unsuccessful.

    So are failed episodes.
    """
    known = set[str | None]().union(*(environments_with_success(one.rows) for one in results))

    def counted(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "success": False} if row["success"] is None and row["environment"] in known else row

    return [replace(one, rows=[counted(row) for row in with_success(one.rows, known)]) for one in results]


def evaluation_metrics(
    rows: Sequence[dict[str, Any]],
    ranges: Mapping[str | None, Range] | None = None,
    units: Sequence[Hashable] | None = None,
) -> dict[str, float]:
    """Metrics of evaluation episodes, in which failed ones count against the policy.

    Args:
        rows: One row per episode, of all processes.
        ranges: The lowest and highest return of each environment that declares them, by name.
        units: The unit of each, of episodes that depend on each other. Default: each is its own.

    Returns:
        Those of :func:`~agile_trainers.rollout.metrics.summarize`, but ``success``, of the environments that report it, with
        failed episodes as unsuccessful; ``return``, the mean return with failed episodes at the lowest return (see
        :func:`failed_value`), and ``return_sem``, its standard error, both NaN if all failed; ``episodes``, their number,
        and ``failed``, that of the failed ones.
    """
    metrics = summarize(rows)
    if "success" in metrics:
        reporting = environments_with_success(rows)
        metrics["success"] = fmean(
            bool(row["success"]) and not _failed(row) for row in rows if row["environment"] in reporting
        )
    returns = [None if _failed(row) else row["return"] for row in rows]
    metrics["return"], metrics["return_sem"] = counted_mean(returns, rows, ranges or {}, units)
    metrics["episodes"], metrics["failed"] = float(len(rows)), float(sum(map(_failed, rows)))
    return metrics


def counted_mean(
    values: Sequence[float | None],
    rows: Sequence[dict[str, Any]],
    ranges: Mapping[str | None, Range],
    units: Sequence[Hashable] | None = None,
) -> tuple[float, float]:
    """Compute a mean and its standard error with failed episodes at the lowest value of their environment.

    Args:
        values: One per episode; None or NaN without a value. Of an episode that did not fail it is left out.
        rows: The episodes.
        ranges: The lowest and highest value of each environment, by name, as far as known.
        units: The unit of each, of episodes that depend on each other, such as repetitions. Default: each is its own.

    Returns:
        Both NaN if every episode failed; the error, with fewer than two units.
    """
    numbers, own = counted_values(values, rows, ranges, units)
    return (fmean(numbers), standard_error(numbers, own)) if numbers else (math.nan, math.nan)


def counted_values(
    values: Sequence[float | None],
    rows: Sequence[dict[str, Any]],
    ranges: Mapping[str | None, Range],
    units: Sequence[Hashable] | None = None,
) -> tuple[list[float], list[Hashable]]:
    """Return the values that count and the unit of each, with the arguments of :func:`counted_mean`.

    Returns:
        Failed episodes have the lowest value of their environment. Both are empty if every episode failed.
    """
    found: dict[str | None, list[float]] = defaultdict(list)
    counted, failed = list[tuple[float, Hashable]](), list[tuple[str | None, Hashable]]()
    for value, row, unit in zip(values, rows, range(len(rows)) if units is None else units, strict=True):
        if _failed(row):
            failed.append((row["environment"], unit))
        elif value is not None and not math.isnan(value):
            found[row["environment"]].append(value)
            counted.append((value, unit))
    every = [value for value, _ in counted]
    if every:
        lowest = {name: failed_value(found[name] or every, ranges.get(name)) for name in {one for one, _ in failed}}
        counted += [(lowest[name], unit) for name, unit in failed]
    return [value for value, _ in counted], [unit for _, unit in counted]


def _failed(row: Mapping[str, Any]) -> bool:
    return StopReason(row["stop_reason"]).failed


def evaluation_episodes(
    seed: int,
    episodes: int,
    rows: Any = None,
    mixture: Mixture | None = None,
    *,
    attempts: int = 1,
    sampling_seed: int | None = None,
    domain: int = EVALUATION,
) -> list[EpisodeSpec]:
    """The episodes of an evaluation, of all processes.

    Args:
        seed: The same seed gives the same episodes.
        episodes: Their number, of different seeds.
        rows: Handed to ``reset`` in order, again and again. None: the environment gets seeds only.
        mixture: Of several environments. Without rows, each plays the same episodes as in a run of its own.
        attempts: Times that each is played, with sampling noise of its own.
        sampling_seed: Seed of the sampling noise, besides ``seed``, which the environments get. Policies with different ones
            play the same episodes with independent noise. Default: the noise of ``trainer.evaluate()``.
        domain: What the evaluation is for, which has episodes of its own: ``EVALUATION``, ``SELECTION`` or ``HELD_OUT`` of
            :mod:`~agile_trainers.rollout.seeds`.

    Raises:
        ValueError: If there are no episodes or attempts, ``rows`` is empty, or a row names no environment.
    """
    options = None if rows is None else [dict(row) for row in islice(rows, episodes)]
    if options == [] or min(episodes, attempts) < 1:
        raise ValueError(
            f"An evaluation needs a row, an episode and an attempt at least, got {episodes=}, {attempts=}."
        )
    places: list[tuple[str | None, int]] = [(None, number) for number in range(episodes)]
    if mixture is not None and options is None:
        places = [*mixture.evaluated(episodes)]
    specs, own = list[EpisodeSpec](), () if sampling_seed is None else (sampling_seed,)
    for index, (name, number) in enumerate(places):
        row = None if options is None else dict(options[index % len(options)])
        if mixture is not None and row is not None:
            name, row = mixture.of_row(row, "eval_dataset")
        start = environment_seed(seed, domain, 0, number)
        specs += [EpisodeSpec(start, (seed, domain, 0, number, n, *own), row, name) for n in range(attempts)]
    return specs


def play_evaluation(
    engine: RolloutEngine,
    generator: AbstractContextManager[Generator],
    specs: Sequence[EpisodeSpec],
    on_finish: Callable[[Trajectory], None] | None = None,
) -> EpisodeResults:
    """Play this process's share of an evaluation, and gather the rows of all.

    Args:
        engine: Plays the episodes.
        generator: Samples their actions.
        specs: The episodes of all processes.
        on_finish: Called with each of this process's episodes when it ends.
    """
    with generator as made:
        trajectories = engine.run([specs[place] for place in _own_places(specs)], made, on_finish)
    return gather_evaluation(engine, trajectories, specs)


def _own_places(specs: Sequence[EpisodeSpec]) -> range:
    """Return the places of this process's episodes among those of all processes."""
    state = PartialState()
    return range(state.process_index, len(specs), state.num_processes)


def gather_evaluation(
    engine: RolloutEngine, trajectories: list[Trajectory], specs: Sequence[EpisodeSpec]
) -> EpisodeResults:
    """Gather the rows of all processes, each of which has left its generator: processes may share an engine.

    Args:
        engine: Has played the episodes.
        trajectories: Those of this process.
        specs: The episodes of all processes.
    """
    places, is_main = list(_own_places(specs)), PartialState().is_main_process
    played = in_order(places, [(episode_metrics(one), start_of_episode(one), one.error) for one in trajectories])
    rows = [row for row, *_ in played]
    engine.reports_success |= environments_with_success(rows)
    if is_main:
        _warn_of_failures([error for *_, error in played])
    if is_main and any(_is_training_question(one) for one in trajectories):
        logger.warning(
            "The evaluation plays questions of the split 'train', which training plays too: the environment has no "
            "other rows by default. Pass eval_dataset=environment.dataset('test') to the trainer, or split='test' to the "
            "environment."
        )
    ranges = {name: found for name in engine.pool.factories if (found := engine.pool.return_range(name)) is not None}
    own, starts = [specs[place] for place in places], [start for _, start, _ in played]
    rows = with_success(rows, engine.reports_success)
    return EpisodeResults(own, trajectories, places, rows, starts, ranges=ranges)


def _warn_of_failures(errors: Sequence[str | None]) -> None:
    """Say how many episodes failed, and the most frequent error."""
    failed = Counter(error for error in errors if error is not None)
    if failed:
        share = "All" if failed.total() == len(errors) else f"{failed.total()} of"
        (error, count), *_ = failed.most_common()
        logger.warning(
            f"{share} {len(errors)} evaluation episodes failed in the environment, which counts against the policy. "
            f"{count} of them with: {error}"
        )


def _is_training_question(trajectory: Trajectory) -> bool:
    """Return True if the seed chose a row of a finite split for training; see ``ReasoningEnvironment``."""
    info, seed = trajectory.reset_info, trajectory.seed
    # Of generated rows, each seed has its own, so that none is met twice.
    return trajectory.options is None and info.get("split") == "train" and info.get("row", seed) != seed


def start_of_episode(trajectory: Trajectory) -> EpisodeStart:
    """Return the start of an episode, and what tells whether it was the same game as another."""
    seed, pictures = trajectory.seed, trajectory.pictures or [[]]
    shown = [[one.key for one in of_path] for of_path in pictures if of_path]
    return EpisodeStart(
        environment=trajectory.environment_name,
        seed=seed,
        row=None if trajectory.options is None else content_digest(trajectory.options, seed),
        prompt=content_digest(keyed(trajectory.prompt_ids, pictures[0]), seed),
        information=content_digest(trajectory.reset_info, seed),
        played=content_digest(
            [trajectory.prompt_ids, trajectory.completion_ids, *(trajectory.paths or ()), *shown], seed
        ),
        outcome=content_digest([trajectory.rewards, trajectory.stop_reason.value], seed),
    )


def in_order(places: Sequence[int], values: Any) -> list[Any]:
    """The values of all processes' episodes, in order of their places.

    Args:
        places: Of this process's episodes.
        values: One for each of them.
    """
    return [value for _, value in sorted(gather_object(list(zip(places, values, strict=True))), key=lambda one: one[0])]


@dataclass(frozen=True)
class Estimate:
    """A mean over episodes, with its 95 % confidence interval."""

    value: float
    low: float | None
    """Lower bound; None if the episodes allow no interval."""
    high: float | None
    """Upper bound."""
    episodes: int
    """Number of episodes that it is the mean of."""
    refusal: str | None = None
    """Reason for which there is no interval, as a sentence."""


@dataclass(frozen=True)
class PolicySummary:
    """The results of one policy.

    Episodes whose environment failed count against it: as unsuccessful, and with the lowest return (see
    :func:`~agile_trainers.evaluation.statistics.failed_value`). Turns and tokens are means over the others.
    """

    episodes: int
    """Number of episodes that were played."""
    failed: int
    """Number of those whose environment failed."""
    unreported: int
    """Number of episodes that report no success although others do; they count as unsuccessful."""
    units: int
    """Number of independent units that the episodes form; see :func:`~agile_trainers.evaluation.results.units_of`."""
    information_differs: bool
    """True in greedy play if equal games began with different information of ``reset`` (a seed, an id or the time in it)."""
    greedy: bool
    success: Estimate | None
    """Share of successes, with Wilson's interval if each episode is a unit; None if no episode reports it."""
    episode_return: Estimate | None
    """Mean return; None if every environment failed."""
    turns: float | None
    """Mean number of turns."""
    action_tokens: float | None
    """Mean number of sampled tokens of an episode."""
    stop_reasons: dict[str, int]
    """Number of episodes, failed ones included, by the reason why they ended; the most frequent first."""
    pass_at_k: dict[int, Estimate]
    """Unbiased pass@k for k = 1, 2, 4, ... and the number of attempts; empty with one attempt."""

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as JSON-ready data."""
        values = asdict(self)
        values["pass_at_k"] = {str(k): value for k, value in values["pass_at_k"].items()}
        return values


def summarize_policy(results: EpisodeResults) -> PolicySummary:
    """Summarize the episodes of one policy."""
    (results,) = reported_together([results])
    rows = [row for row in results.rows if not StopReason(row["stop_reason"]).failed]
    units, limits, played = results.units, results.limits("return"), results.values("success")
    returns = counted_values(results.values("return"), results.rows, results.ranges, units)
    # Of several environments, one may report success and another not.
    reporting = environments_with_success(results.rows)
    counted = [index for index, row in enumerate(results.rows) if row["environment"] in reporting]
    successes = [played[index] or 0.0 for index in counted]
    return PolicySummary(
        episodes=len(results.rows),
        failed=len(results.rows) - len(rows),
        unreported=sum(not row.get("success_reported", True) for row in rows),
        units=len(set(units)),
        information_differs=results.greedy and _differing(results),
        greedy=results.greedy,
        success=_mean(successes, [units[index] for index in counted]),
        episode_return=_mean(*returns, limits),
        turns=fmean(row["turns"] for row in rows) if rows else None,
        action_tokens=fmean(row["action_tokens"] for row in rows) if rows else None,
        stop_reasons=dict(Counter(row["stop_reason"] for row in results.rows).most_common()),
        pass_at_k=_pass_at_k(results),
    )


def _differing(results: EpisodeResults) -> bool:
    """Return True if equal prompts began with different information."""
    seen: dict[Hashable, set[str]] = defaultdict(set)
    for start in results.starts:
        seen[start.environment, start.prompt].add(start.information)
    return any(len(found) > 1 for found in seen.values())


def _mean(
    values: Sequence[float], units: Sequence[Hashable], limits: tuple[float, float] | None = (0.0, 1.0)
) -> Estimate | None:
    if not values:
        return None
    low, high = mean_interval(values, units, limits) or (None, None)
    return Estimate(fmean(values), low, high, len(values), refusal(values, units, limits))


def _pass_at_k(results: EpisodeResults) -> dict[int, Estimate]:
    """Estimate pass@k over the starts; an attempt whose environment failed is no success."""
    reporting = environments_with_success(results.rows)
    attempts: dict[Hashable, list[bool]] = defaultdict(list)
    units: dict[Hashable, Hashable] = {}
    for start, row, unit in zip(results.starts, results.rows, results.units, strict=True):
        if start.environment in reporting:
            attempts[start.key].append(bool(row["success"]))
            units[start.key] = unit
    most = max(map(len, attempts.values()), default=1)
    if most == 1:
        return {}
    estimates = {}
    for k in sorted({1, most, *(2**power for power in range(most.bit_length()) if 2**power <= most)}):
        keys = [key for key, played in attempts.items() if len(played) >= k]
        values = [pass_at_k(len(attempts[key]), sum(attempts[key]), k) for key in keys]
        estimate = _mean(values, [units[key] for key in keys])
        assert estimate is not None
        estimates[k] = estimate
    return estimates
