"""The mean return of episodes, with an interval, as a module of the package `evaluate`."""

from typing import Any

import datasets
import evaluate

from agile_trainers.evaluation.statistics import mean_interval


class EpisodeReturn(evaluate.Metric):
    """Computes ``return``, ``return_low`` and ``return_high`` from ``returns`` and their ``units``.

    The bounds are None where nothing can be claimed of values without a known range.
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Mean return of the episodes, with its 95 % interval over independent units.",
            citation="",
            inputs_description="returns: of each episode. units: key of the independent unit that each belongs to.",
            features=datasets.Features({"returns": datasets.Value("float64"), "units": datasets.Value("string")}),
        )

    def _compute(self, returns: list[float], units: list[str]) -> dict[str, Any]:
        low, high = mean_interval(returns, units) or (None, None)
        return {"return": sum(returns) / len(returns), "return_low": low, "return_high": high}
