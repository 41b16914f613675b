"""Computes metrics that are modules of the package ``evaluate``: ours, a user's own and those of the Hub."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object

from agile_trainers.envs.questions.answers import final_answer
from agile_trainers.evaluation.results import EpisodeResults
from agile_trainers.types import StopReason, Trajectory

METRICS_FOLDER = Path(__file__).parent / "metrics"
"""Folder of our metrics: ``evaluate.load(str(METRICS_FOLDER / "success"))``."""
REFERENCE = "answer"
"""Default name of the right answer in a data set row or an environment's information."""


def metric_names() -> list[str]:
    """Return the names of our metrics."""
    return sorted(path.parent.name for path in METRICS_FOLDER.glob("*/*.py"))


def load_metrics(metrics: Sequence[str], *, trust_remote_code: bool = False) -> list[Any]:
    """Load metrics as modules of the package ``evaluate``, which runs their code.

    Args:
        metrics: Names of ours (``success``, ``episode_return``, ``pass_at_k``, ``answer_match``), files or folders of a
            module, or names on the Hub.
        trust_remote_code: Allow names on the Hub, whose repositories' code then runs on this machine.

    Raises:
        ImportError: If the package is not installed, or one that a metric needs.
        ValueError: If there is no such metric, or it is one of the Hub's without ``trust_remote_code``.
    """
    if importlib.util.find_spec("evaluate") is None:
        raise ImportError(
            "Metrics are modules of the package evaluate, which is not installed: pip install 'agile-trainers[eval]'."
        )
    return [_load(name, trust_remote_code) for name in metrics]


def compute_metrics(
    metrics: Sequence[str | Any],
    results: EpisodeResults,
    *,
    reference: str = REFERENCE,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Compute metrics over the episodes of a policy whose environment did not fail.

    A module gets the columns that its features name:

    - ``predictions``: the final answer of the last turn (in ``<answer>`` or ``\\boxed{}``, else the text after
      ``</think>``);
    - ``references``: ``reference`` of the data set row, else of the environment's information at reset or in the last step;
    - ``successes``, ``returns``, ``turns``, ``stop_reasons``;
    - ``starts`` and ``units``: keys that are equal for attempts at one start, and for dependent episodes.

    Args:
        metrics: Modules, or what :func:`load_metrics` loads.
        results: The episodes.
        reference: Name of the right answer.
        trust_remote_code: As for :func:`load_metrics`.

    Returns:
        The values that the modules return, as :func:`evaluate.combine` merges them.

    Raises:
        ImportError: See :func:`load_metrics`.
        ValueError: If there is no such metric, one needs a column that the episodes do not have, or it cannot take the
            values.
    """
    modules = load_metrics([one for one in metrics if isinstance(one, str)], trust_remote_code=trust_remote_code)
    modules = [modules.pop(0) if isinstance(one, str) else one for one in metrics]
    import evaluate

    columns = metric_columns(results, reference)
    for module in modules:
        for name in module._feature_names():
            _check_column(name, columns, module.name, reference)
    combined = evaluate.combine(modules)
    for module in combined.evaluation_modules:
        try:
            module.add_batch(**{name: _cast(columns[name], module.features, name) for name in module._feature_names()})
        except (ValueError, TypeError) as error:
            raise ValueError(f"The metric {module.name} cannot take the episodes: {error}") from error
    return combined.compute()


def _cast(values: list[Any], features: Any, name: str) -> list[Any]:
    """Convert values to the type that a module asks for, since a model's answer is text and a reference may be a number."""
    kind = getattr(features[name], "dtype", "") if isinstance(features, dict) else ""
    convert = next(
        (to for begin, to in (("int", int), ("float", float), ("string", str)) if kind.startswith(begin)), None
    )
    return values if convert is None else [convert(value) for value in values]


def metric_columns(results: EpisodeResults, reference: str = REFERENCE) -> dict[str, list[Any]]:
    """Return the columns of :func:`compute_metrics`, over all processes. A value that an episode lacks is None."""
    answers = [(place, *_answer(one, reference)) for place, one in zip(results.places, results.trajectories)]
    by_place = {place: values for place, *values in gather_object(answers)}
    kept = [n for n, row in enumerate(results.rows) if not StopReason(row["stop_reason"]).failed]
    rows, starts, units = [results.rows[n] for n in kept], [results.starts[n] for n in kept], results.units
    return {
        "predictions": [by_place[n][0] for n in kept],
        "references": [by_place[n][1] for n in kept],
        "successes": [row["success"] for row in rows],
        "returns": [row["return"] for row in rows],
        "turns": [row["turns"] for row in rows],
        "stop_reasons": [row["stop_reason"] for row in rows],
        "starts": [f"{one.environment} {one.seed} {one.row}" for one in starts],
        "units": [str(units[n]) for n in kept],
    }


def _answer(trajectory: Trajectory, reference: str) -> tuple[str, Any]:
    infos = [trajectory.options or {}, trajectory.reset_info, *(turn.info for turn in trajectory.turns[-1:])]
    right = next((info[reference] for info in infos if info.get(reference) is not None), None)
    return final_answer(trajectory.turns[trajectory.last].text) if trajectory.turns else "", right


def lacks_reference(modules: Sequence[Any], trajectory: Trajectory, reference: str = REFERENCE) -> bool:
    """Return whether an episode lacks the right answer that a module needs, which then cannot be computed.

    Args:
        modules: Of :func:`load_metrics`.
        trajectory: An episode.
        reference: Name of the right answer.
    """
    needs = any("references" in module._feature_names() for module in modules)
    return needs and not trajectory.stop_reason.failed and _answer(trajectory, reference)[1] is None


def _check_column(name: str, columns: dict[str, list[Any]], metric: str, reference: str) -> None:
    if name not in columns:
        raise ValueError(f"The metric {metric} needs {name!r}; episodes have {', '.join(columns)}.")
    missing = columns[name].count(None)
    if not columns[name] or missing:
        advice = {
            "references": f" Neither the data set row nor the environment's information has {reference!r}; name the right "
            "answer with `reference`.",
            "successes": " The environment reports no success.",
        }.get(name, "")
        raise ValueError(f"The metric {metric} needs {name}, but {missing or 'all'} episodes have none.{advice}")


def _load(name: str, trust_remote_code: bool) -> Any:
    import evaluate

    path, ours = Path(name).expanduser(), METRICS_FOLDER / name
    here = path if path.exists() else ours if "/" not in name and ours.is_dir() else None
    expected = f"expected one of {', '.join(metric_names())}, the file or folder of a module of the package evaluate"
    if here is None and not trust_remote_code:
        raise ValueError(
            f"There is no metric {name!r} on this machine: {expected}. A metric of the Hub runs code of its repository "
            "here: read that code, and allow it with trust_remote_code=True (--trust_remote_code)."
        )
    try:
        return evaluate.load(name if here is None else str(here.resolve()))
    except (FileNotFoundError, ConnectionError) as error:
        raise ValueError(f"There is no metric {name!r}: {expected}, or a name on the Hub. {error}") from error
