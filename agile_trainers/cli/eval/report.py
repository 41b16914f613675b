"""Shows the results of ``agile-trainers eval``: a table, sentences, JSON and rows of a model card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from huggingface_hub import EvalResult
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agile_trainers.checkpoints.disclosure import masked
from agile_trainers.checkpoints.model_card import result
from agile_trainers.envs.registry import describe_environment
from agile_trainers.evaluation import Comparison, EpisodeResults, Estimate, PolicySummary


@dataclass(frozen=True)
class Played:
    """A policy's results in one environment."""

    policy: str
    """The policy's name in the report."""
    summary: PolicySummary
    results: EpisodeResults
    metrics: dict[str, Any]
    """Metrics of modules of the package ``evaluate``."""
    records: str | None
    """Folder of the episodes."""


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

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-ready data."""
        policies = [
            {"policy": one.policy, **one.summary.to_dict(), "metrics": one.metrics, "records": one.records}
            for one in self.played
        ]
        pairs = zip(self.comparisons, self.played[1:], self.sentences())
        compared = [{"against": other.policy, **one.to_dict(), "sentence": said} for one, other, said in pairs]
        report = {"environment": self.environment, "policies": policies, "comparisons": compared}
        return report | {"notes": self.notes()}


def _first_error(results: EpisodeResults) -> str:
    error = next((one.error for one in results.trajectories if one.error is not None), None)
    return "" if error is None else f"The first error: {error}"


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
        ("success", [_percent(one.success) for one in summaries]),
        ("return", [_number(one.episode_return) for one in summaries]),
    ]
    for k in sorted({k for one in summaries for k in one.pass_at_k}):
        rows.append((f"pass@{k}", [_percent(one.pass_at_k.get(k)) for one in summaries]))
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


def _percent(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.1%} (no interval)"
    return f"{estimate.value:.1%} \\[{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def _number(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.3f} (no interval)"
    return f"{estimate.value:.3f} \\[{estimate.low:.3f}, {estimate.high:.3f}]"


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
