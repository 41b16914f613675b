"""The unbiased pass@k of several attempts at each start, as a module of the package `evaluate`."""

from collections import defaultdict
from typing import Any

import datasets
import evaluate

from agile_trainers.evaluation.statistics import pass_at_k


class PassAtK(evaluate.Metric):
    """Computes ``pass@k`` for each ``k`` up to the number of attempts, from ``successes`` and their ``starts``."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Probability that at least one of k attempts succeeds, estimated without bias.",
            citation="Chen et al. (2021), Evaluating large language models trained on code.",
            inputs_description="successes: whether each attempt succeeded. starts: key of what it was an attempt at.",
            features=datasets.Features({"successes": datasets.Value("bool"), "starts": datasets.Value("string")}),
        )

    def _compute(self, successes: list[bool], starts: list[str]) -> dict[str, Any]:
        attempts = defaultdict[str, list[bool]](list)
        for success, start in zip(successes, starts):
            attempts[start].append(success)
        fewest = min(map(len, attempts.values()))
        return {
            f"pass@{k}": sum(pass_at_k(len(one), sum(one), k) for one in attempts.values()) / len(attempts)
            for k in range(1, fewest + 1)
        }
