"""Estimates the mutual information between prompts and answers from the answers' log-probabilities under every prompt."""

from __future__ import annotations

import math

import torch


def prompt_information(log_probs: torch.Tensor) -> float:
    """Estimate the share of what answers could tell about their prompts that they do tell.

    For N prompts and an answer sampled under each, the estimate of the mutual information is the mean of
    ``log p(y_i | x_i) - log mean_j p(y_i | x_j)`` (RAGEN-2, https://huggingface.co/papers/2604.06268). It is at most
    ``log N``, by which it is divided.

    Args:
        log_probs: (N, N), row i column j: log-probability of answer i under prompt j; at least two.

    Returns:
        1 if each answer is likely under its own prompt alone, about 0 if the answers do not depend on the prompt; below 0
        by chance.

    Raises:
        ValueError: If the matrix is not square, or has a single row.
    """
    count = log_probs.size(0)
    if log_probs.dim() != 2 or log_probs.size(1) != count or count < 2:
        raise ValueError(f"log_probs must be (N, N) with N at least 2, got {tuple(log_probs.shape)}.")
    scores = log_probs.double()
    gains = scores.diagonal() - (scores.logsumexp(dim=1) - math.log(count))
    return gains.mean().item() / math.log(count)
