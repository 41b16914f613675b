"""Samples tokens from logits, with transformers' processors, by inverting the cumulative distribution."""

from __future__ import annotations

import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from agile_trainers.rollout.generators.base import SamplingSettings


class Sampler:
    """Samples the next token of each row, with ``GenerationMixin``'s processors in ``GenerationMixin``'s order.

    Args:
        settings: Sampling options.
        eos_token_ids: Tokens that a row may not sample before its ``min_new_tokens``-th token.
    """

    def __init__(self, settings: SamplingSettings, eos_token_ids: list[int]) -> None:
        self.greedy = not settings.do_sample
        self.eos_token_ids = eos_token_ids
        self._end: torch.Tensor | None = None
        self.penalty = LogitsProcessorList()
        if settings.repetition_penalty != 1.0:
            self.penalty.append(RepetitionPenaltyLogitsProcessor(float(settings.repetition_penalty)))
        self.warpers = LogitsProcessorList()
        if self.greedy:
            return
        if settings.temperature != 1.0:
            self.warpers.append(TemperatureLogitsWarper(float(settings.temperature)))
        if settings.top_k:
            self.warpers.append(TopKLogitsWarper(settings.top_k))
        if settings.top_p < 1.0:
            self.warpers.append(TopPLogitsWarper(settings.top_p))
        if settings.min_p is not None:
            self.warpers.append(MinPLogitsWarper(settings.min_p))

    def __call__(
        self,
        logits: torch.Tensor,
        uniforms: torch.Tensor,
        history: torch.Tensor | None = None,
        hold_eos: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose one token per row.

        Args:
            logits: (R, V), any float type.
            uniforms: (R,) float64 in [0, 1); unused when greedy.
            history: (R, L) ids for the repetition penalty, padded with ids of the same row. Needed with a penalty.
            hold_eos: (R,) bool, True for rows that are still too short to end. Default: none.

        Returns:
            (R,) int64 tokens and their (R,) float64 log-probabilities under the sampling distribution: after every
            processor when sampling; after penalty and ``min_new_tokens``, at temperature 1, when greedy.
        """
        log_probs = self.distribution(logits, history, hold_eos)
        return self.draw(log_probs, uniforms)

    def distribution(
        self, logits: torch.Tensor, history: torch.Tensor | None = None, hold_eos: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the (R, V) float64 log-probabilities that tokens are drawn from; -inf for those that are removed."""
        scores = self.penalty(history, logits.float())
        if hold_eos is not None:
            scores = scores.masked_fill(hold_eos[:, None] & self._ends(scores), -torch.inf)
        return self.warpers(history, scores).double().log_softmax(-1)

    def draw(self, log_probs: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose one token per row of a distribution; see :meth:`__call__`."""
        tokens = log_probs.argmax(-1) if self.greedy else draw_tokens(log_probs.exp(), uniforms)
        return tokens, log_probs.gather(-1, tokens[:, None])[:, 0]

    def _ends(self, scores: torch.Tensor) -> torch.Tensor:
        """Return (V,) bool, True at ends, made once: indexing with a list copies the list to the device."""
        if self._end is None:
            end = torch.zeros(scores.shape[-1], dtype=torch.bool)
            end[self.eos_token_ids] = True
            self._end = end.to(scores.device)
        return self._end


def draw_tokens(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Invert the cumulative distribution: the first token whose cumulative probability exceeds the uniform.

    A token of probability zero is never drawn, for any uniform and any rounding.

    Args:
        probs: (R, V) float64, rows summing to 1.
        uniforms: (R,) float64 in [0, 1).

    Returns:
        (R,) int64 tokens.
    """
    # Zero at impossible tokens, so that rounding in a parallel cumsum cannot raise one above its neighbours.
    cumulative = probs.cumsum(-1) * (probs > 0)
    # A uniform is at most 1 - 2**-53, which keeps the product below the total after rounding.
    target = uniforms[:, None] * cumulative.amax(-1, keepdim=True)
    return (cumulative > target).to(torch.uint8).argmax(-1)
