"""Shows the results of ``agile-trainers eval``: a table, sentences, JSON and rows of a model card."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agile_trainers.checkpoints.disclosure import masked
from agile_trainers.checkpoints.model_card import result
from agile_trainers.envs.registry import describe_environment
from agile_trainers.evaluation import (
    Comparison,
    EpisodeResults,
    Estimate,
    PolicySummary,
    compare_policies,
    summarize_policy,
)
from agile_trainers.evaluation.comparison import Measure
from agile_trainers.evaluation.panels import check_comparable, outcomes, read_results
from agile_trainers.evaluation.results import reported_together


@dataclass(frozen=True)
class Played:
    """A policy's results in one environment."""

    policy: str
    """The policy's name in the report."""
    results: EpisodeResults
    metrics: dict[str, Any]
    """Metrics of modules of the package ``evaluate``."""
    records: str | None
    """Folder of the episodes."""

    @cached_property
    def summary(self) -> PolicySummary:
        """The summary of the results."""
        return summarize_policy(self.results)


@dataclass(frozen=True)
class EnvironmentReport:
    """The results of all policies in one environment; the first policy is compared with each of the others."""

    environment: str
    played: list[Played]
    comparisons: list[Comparison]

    def sentences(self) -> list[str]:
        """Say of each comparison whether the difference is real."""
        first, *others = self.played
        return [one.sentence(first.policy, other.policy) for one, other in zip(self.comparisons, others)]

    def notes(self) -> list[str]:
        """Say what was counted in a way that the table does not show."""
        said = []
        for one in self.played:
            summary, failed = one.summary, one.summary.failed
            if failed:
                said.append(
                    f"{one.policy}: the environment failed in {failed} of {summary.episodes} episodes, which count as "
                    f"unsuccessful and with the lowest return. {_first_error(one.results)}"
                )
            if summary.unreported:
                said.append(
                    f"{one.policy}: {summary.unreported} of {summary.episodes} episodes report no success, unlike others, "
                    "and count as unsuccessful. Report info['success'] on every step."
                )
            if summary.information_differs:
                said.append(
                    f"{one.policy}: the information of reset differs under equal prompts. It makes no other game: by what "
                    f"was played, {summary.episodes} episodes are {summary.units} independent ones."
                )
        means = [one.summary.episode_return for one in self.played]
        refusals = dict.fromkeys(one.refusal for one in means if one is not None and one.refusal)
        return said + [f"No interval of the return: {reason}" for reason in refusals]

    def to_dict(self, with_outcomes: bool = False) -> dict[str, Any]:
        """Return the report as JSON-ready data.

        Args:
            with_outcomes: Whether it holds the outcome of each episode.
        """
        policies: list[dict[str, Any]] = [
            {"policy": one.policy, **one.summary.to_dict(), "metrics": one.metrics, "records": one.records}
            | ({"outcomes": outcomes(one.results)} if with_outcomes else {})
            for one in self.played
        ]
        pairs = zip(self.comparisons, self.played[1:], self.sentences())
        compared = [{"against": other.policy, **one.to_dict(), "sentence": said} for one, other, said in pairs]
        report = {"environment": self.environment, "policies": policies, "comparisons": compared}
        return report | {"notes": self.notes()}


def _first_error(results: EpisodeResults) -> str:
    error = next((one.error for one in results.trajectories if one.error is not None), None)
    return "" if error is None else f"The first error: {error}"


def compare_files(files: Sequence[Path], allowed: Sequence[str], measure: Measure | None, as_json: bool) -> None:
    """Compare the first policy of a file with those of other files, and print the report.

    Args:
        files: ``results.json`` of ``eval --panel``.
        allowed: Names of settings that may differ.
        measure: Of the comparison; None: success where it is reported.
        as_json: Whether to print JSON.

    Raises:
        ValueError: If there is one file only, or two results are not comparable.
    """
    if len(files) < 2:
        raise ValueError(f"--compare needs at least two files of results, got {len(files)}.")
    first, *others = read = [read_results(path) for path in files]
    notes = [note for other in others for note in check_comparable(first, other, allowed)]
    names = [one.policy for one in read]
    counted = reported_together([one.results for one in read])
    played = [
        Played(name if names.count(name) == 1 else f"{name} ({path})", results, {}, None)
        for name, path, results in zip(names, files, counted)
    ]
    report = EnvironmentReport(first.panel.environment, played, compare_policies(*counted, measure=measure))
    if as_json:
        print(json.dumps({"panel": first.panel.hash, "differences": notes, **report.to_dict()}, indent=2))
        return
    console = Console()
    show(console, report)
    starts = first.panel.different_starts
    told = f"Panel {first.panel.hash}, of seed {first.panel.seed}" + (
        f" and {starts} different starts" if starts else ""
    )
    for note in [*notes, f"{told}."]:
        console.print(escape(note), highlight=False, soft_wrap=True)


def show(console: Console, report: EnvironmentReport) -> None:
    """Print a table of one environment and the sentences below it."""
    console.print(table(report))
    for one, sentence in zip(report.comparisons, report.sentences()):
        style = {"better": "green", "worse": "red"}.get(one.verdict, "yellow")
        console.print(escape(sentence), style=style, highlight=False, soft_wrap=True)
    for note in report.notes():
        console.print(escape(note), style="yellow", highlight=False, soft_wrap=True)


def table(report: EnvironmentReport) -> Table:
    """Make the table of one environment: a column for each policy, a row for each measure."""
    first = report.played[0].summary
    how = "greedy play" if first.greedy else "sampled"
    title = f"{report.environment}, {first.episodes:,} episodes each, {how}"
    made = Table("", *(escape(one.policy) for one in report.played), title=escape(title), min_width=len(title))
    summaries = [one.summary for one in report.played]
    rows: list[tuple[str, list[str]]] = [
        ("success", [_shown(one.success, percent=True) for one in summaries]),
        ("return", [_shown(one.episode_return, percent=False) for one in summaries]),
    ]
    for k in sorted({k for one in summaries for k in one.pass_at_k}):
        rows.append((f"pass@{k}", [_shown(one.pass_at_k.get(k), percent=True) for one in summaries]))
    rows.append(("turns", ["" if one.turns is None else f"{one.turns:.2f}" for one in summaries]))
    rows.append(("tokens", ["" if one.action_tokens is None else f"{one.action_tokens:.1f}" for one in summaries]))
    for name in dict.fromkeys(name for one in summaries for name in one.stop_reasons):
        rows.append((f"stop: {name}", [f"{one.stop_reasons.get(name, 0) / one.episodes:.1%}" for one in summaries]))
    for name in dict.fromkeys(name for one in report.played for name in one.metrics):
        rows.append((escape(name), [_value(one.metrics.get(name)) for one in report.played]))
    for name, cells in rows:
        if any(cells):
            made.add_row(name, *cells)
    return made


def _shown(estimate: Estimate | None, *, percent: bool) -> str:
    if estimate is None:
        return ""
    value = f"{estimate.value:.1%}" if percent else f"{estimate.value:.3f}"
    if estimate.low is None or estimate.high is None:
        return f"{value} (no interval)"
    low, high = (f"{100 * one:.1f}" if percent else f"{one:.3f}" for one in (estimate.low, estimate.high))
    return f"{value} \\[{low}, {high}]"


def _value(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else escape(str(value))


def _interval(estimate: Estimate) -> dict[str, list[float]]:
    """Return the interval as an argument of a result; nothing where there is none."""
    if estimate.low is None or estimate.high is None:
        return {}
    return {"confidence_interval_95": [round(estimate.low, 4), round(estimate.high, 4)]}


def card_results(report: EnvironmentReport, settings: dict[str, Any]) -> list[EvalResult]:
    """Return the results of the first policy as rows of a model card.

    Args:
        report: The results.
        settings: What they were played with, as arguments of the rows.
    """
    one = report.played[0]
    environment = masked(describe_environment(report.environment)["environment"])
    mode = " (greedy)" if one.summary.greedy else ""
    found: list[tuple[str, str, Estimate]] = []
    if one.summary.success is not None:
        found.append(("success_rate", "success", one.summary.success))
    if one.summary.episode_return is not None:
        found.append(("mean_reward", "mean episode return", one.summary.episode_return))
    found += [(f"pass@{k}", f"pass@{k}", estimate) for k, estimate in one.summary.pass_at_k.items()]
    failed = {"failed_episodes": one.summary.failed} if one.summary.failed else {}
    rows = []
    for kind, name, estimate in found:
        error = {"standard_error": round(one.results.metrics["return_sem"], 4)} if kind == "mean_reward" else {}
        played = {**settings, "episodes": estimate.episodes, **failed, **error, **_interval(estimate)}
        rows.append(result(environment, kind, name + mode, estimate.value, played))
    return rows
