"""The share of successful episodes, with its interval, as a module of the package `evaluate`."""

from typing import Any

import datasets
import evaluate

from agile_trainers.evaluation.statistics import mean_interval


class Success(evaluate.Metric):
    """Computes ``success``, ``success_low`` and ``success_high`` from ``successes`` and their ``units``."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Share of successful episodes, with its 95 % interval.",
            citation="",
            inputs_description="successes: whether each episode succeeded. units: key of the independent unit that each "
            "belongs to; episodes that depend on each other, such as attempts at one question, share it.",
            features=datasets.Features({"successes": datasets.Value("bool"), "units": datasets.Value("string")}),
        )

    def _compute(self, successes: list[bool], units: list[str]) -> dict[str, Any]:
        low, high = mean_interval(successes, units, (0, 1)) or (None, None)
        return {"success": sum(successes) / len(successes), "success_low": low, "success_high": high}
