"""Loss of an expert's tokens: weighed by the policy's probability over the expert's, or supervised."""

from __future__ import annotations

import torch

WEIGHTED, ADVANTAGE_SFT, SFT = "weighted", "advantage_sft", "sft"
TREATMENTS = (WEIGHTED, ADVANTAGE_SFT, SFT)
"""The treatments of demonstrations. With A+ = max(A, 0) of the token's advantage among the whole group, the policy p and the
expert's probability q of the token, or 1 where it is unknown, a token's gradient is that of ``log p`` times

- ``weighted``: ``min(p / q, 1) * A+`` (where the bound does not act: the gradient of ``p / q`` times ``A+``);
- ``advantage_sft``: ``A+``: the old policy is the present one, which is advantage-weighted supervised fine-tuning;
- ``sft``: 1 where ``A+`` is above 0.
"""


def demonstration_credit(advantages: torch.Tensor, treatment: str) -> torch.Tensor:
    """Return what the gradient of each token of an expert is multiplied by, before probabilities weigh it.

    Args:
        advantages: Of the tokens, any shape, at least 0: 0 of a demonstration that is not better than the others.
        treatment: Of :data:`TREATMENTS`.
    """
    return (advantages > 0).to(advantages.dtype) if treatment == SFT else advantages


def demonstration_loss(
    log_probs: torch.Tensor, expert: torch.Tensor, credit: torch.Tensor, treatment: str
) -> torch.Tensor:
    """Compute the loss of each token of an expert.

    Args:
        log_probs: (B, T), under the policy, with gradient.
        expert: (B, T), under the expert; 0 where its probability is set to 1.
        credit: (B, T), of :func:`demonstration_credit`.
        treatment: Of :data:`TREATMENTS`.
    """
    if treatment == WEIGHTED:
        credit = credit * (log_probs.detach() - expert).clamp(max=0.0).exp()
    return -credit * log_probs
