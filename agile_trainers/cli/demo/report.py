"""Writes the results of the demo: a table, some games and ``summary.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.table import Table

from agile_trainers.records.reader import open_records, read_records

LIBRARIES = ("agile-trainers", "trl", "transformers", "peft", "torch")


@dataclass(frozen=True)
class DemoScore:
    """Result of the model or a scripted policy."""

    name: str
    success: float
    """Share of games won."""
    episode_return: float
    """Mean return."""


def results_table(scores: Mapping[str, DemoScore], episodes: int) -> Table:
    """Make the table of scores, one row each."""
    table = Table("", "games won", "return", title=f"{episodes:,} sampled games each")
    for score in scores.values():
        table.add_row(score.name, f"{score.success:.1%}", f"{score.episode_return:+.3f}")
    return table


def some_games(rollouts: Path, count: int = 3) -> str:
    """Format games of the last evaluation as plain text, those with the most turns first; each secret once.

    Args:
        rollouts: The folder of the trainer's rollout log.
        count: Number of games.
    """
    files = [path for run in open_records(rollouts) for path in run.files if path.name.startswith("eval-")]
    episodes = read_records(max(files, key=lambda path: path.name))  # the name begins with the step
    by_secret = {episode["reset_info"]["secret"]: episode for episode in episodes}
    longest = sorted(by_secret.values(), key=lambda episode: -len(episode["turns"]))
    return "\n\n".join(_game(episode) for episode in longest[:count])


def _game(episode: dict[str, Any]) -> str:
    lines = [f"environment: {episode['prompt'][-1]['content']}"]
    for turn in episode["turns"]:
        lines += [f"      model: {turn['text']}", f"environment: {turn['observation']}"]
    return "\n".join([*lines, f"(the number was {episode['reset_info']['secret']}; return {episode['return']:+.1f})"])


def write_summary(
    output: Path, scores: Mapping[str, DemoScore], *, seed: int, seconds: float, adapter: Path, base: Path, budget: Any
) -> dict[str, object]:
    """Write ``summary.json`` with success and return of every row of the table, and the run's settings."""
    summary = {
        **{f"{key}_success": score.success for key, score in scores.items()},
        **{f"{key}_return": score.episode_return for key, score in scores.items()},
        "seconds": round(seconds, 1),
        "adapter_path": str(adapter),
        "base_path": str(base),
        "seed": seed,
        "budget": asdict(budget),
        "versions": {name: version(name) for name in LIBRARIES},
    }
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary
