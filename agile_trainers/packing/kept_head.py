"""The LM head of tokens whose policy is renormalised over a kept set."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from agile_trainers.objectives.kept_sets import KeptSets, truncated_log_probs

LOGITS = 2**24
"""Logits of a piece, at most, but for those of a single token."""
COPIES = 6
"""Copies of a piece's logits, in float32, that its backward pass needs."""


@dataclass(frozen=True)
class KeptHead:
    """Computes log-probabilities and entropies over kept sets, in pieces whose logits are computed again for the gradient.

    Logits are those of TRL's fused head: scaled and capped as the model's configuration says.
    """

    temperature: float = 1.0
    in_fp32: bool = False
    """True computes the logits in float32, as ``cast_lm_head_to_fp32`` says."""

    def __call__(
        self, model: PreTrainedModel, hidden: torch.Tensor, tokens: torch.Tensor, kept: KeptSets, outputs: Any
    ) -> Any:
        """Replace log-probabilities, and entropies if there are any.

        Args:
            model: The model below the adapters.
            hidden: (R, H), the hidden state before each token.
            tokens: (R,) int64.
            kept: Their sets.
            outputs: Of TRL's fused head.

        Returns:
            ``outputs``, with (1, R) each.
        """
        head: Any = model.get_output_embeddings()
        device = head.weight.device
        hidden, tokens, kept = hidden.to(device), tokens.to(device), KeptSets(*(part.to(device) for part in kept))
        compute = partial(self._of_piece, head, model.config.get_text_config())
        size = max(1, LOGITS // model.config.get_text_config().vocab_size)
        found = []
        # Of no token there is one piece too, which keeps the outputs connected to the model.
        for start in range(0, max(len(tokens), 1), size):
            part = slice(start, start + size)
            pieces = hidden[part], tokens[part], kept.at(part)
            found.append(
                checkpoint(compute, *pieces, use_reentrant=False, preserve_rng_state=False)
                if torch.is_grad_enabled()
                else compute(*pieces)
            )
        log_probs, entropies = (torch.cat(parts)[None] for parts in zip(*found, strict=True))
        outputs.log_probs = log_probs
        if outputs.entropy is not None:
            outputs.entropy = entropies
        return outputs

    def _of_piece(
        self, head: Any, config: Any, hidden: torch.Tensor, tokens: torch.Tensor, kept: KeptSets
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # TRL has cast the weights to float32 then. The module is called, so that engines gather a sharded weight.
        with torch.autocast(hidden.device.type, enabled=False) if self.in_fp32 else nullcontext():
            logits = head(hidden.float() if self.in_fp32 else hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale(config)
        cap = getattr(config, "final_logit_softcapping", None)
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        return truncated_log_probs(logits / self.temperature, tokens, kept.mask(logits.size(1)))


def logit_scale(config: Any) -> float:
    """Return the factor of a model's logits, by the name that its configuration has for it.

    Args:
        config: Of the text model.
    """
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(config, name, None) is not None:
            return float(getattr(config, name))
    scaling = getattr(config, "logits_scaling", None)
    if scaling is None:
        return 1.0
    return float(scaling) if config.model_type == "hyperclovax" else 1 / scaling
