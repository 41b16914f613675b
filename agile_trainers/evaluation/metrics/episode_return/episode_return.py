"""The mean return of episodes, with a bootstrap interval, as a module of the package `evaluate`."""

from typing import Any

import datasets
import evaluate

from agile_trainers.evaluation.statistics import bootstrap_interval


class EpisodeReturn(evaluate.Metric):
    """Computes ``return``, ``return_low`` and ``return_high`` from ``returns`` and their ``units``."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Mean return of the episodes, with its 95 % bootstrap interval over independent units.",
            citation="",
            inputs_description="returns: of each episode. units: key of the independent unit that each belongs to.",
            features=datasets.Features({"returns": datasets.Value("float64"), "units": datasets.Value("string")}),
        )

    def _compute(self, returns: list[float], units: list[str]) -> dict[str, Any]:
        low, high = bootstrap_interval(returns, units)
        return {"return": sum(returns) / len(returns), "return_low": low, "return_high": high}
