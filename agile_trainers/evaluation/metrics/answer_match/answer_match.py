"""The share of answers that equal their reference, as the library grades them, as a module of the package `evaluate`."""

from typing import Any

import datasets
import evaluate

from agile_trainers.envs.questions.answers import exact_match


class AnswerMatch(evaluate.Metric):
    """Computes ``answer_match`` from ``predictions`` and ``references``."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Share of predictions whose final answer equals the reference: numbers by value, other text after "
            "marks such as $...$ and **...** are removed.",
            citation="",
            inputs_description="predictions: the answers. references: the right ones.",
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
            ),
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, Any]:
        right = [exact_match(prediction, reference) for prediction, reference in zip(predictions, references)]
        return {"answer_match": sum(right) / len(right)}
