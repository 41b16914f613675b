"""The LM head of tokens whose policy is renormalised over a kept set."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from agile_trainers.adapters.sharding import is_sharded
from agile_trainers.objectives.kept_sets import KeptSets, truncated_log_probs

LOGITS = 2**24
"""Logits of a piece, at most, but for those of a single token."""
FEW = 1 / 128
"""Part of the vocabulary up to which the logits of kept tokens alone are computed."""
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
        config = model.config.get_text_config()
        compute, size, listed = partial(self._of_piece, head, config), LOGITS // config.vocab_size, None
        if type(head) is nn.Linear and not (head.weight.requires_grad or is_sharded(head.weight)):
            listed = kept.ids(int(FEW * config.vocab_size))
        if listed is not None:
            compute = partial(self._of_kept, head, config)
            size = LOGITS // (listed[0].size(1) * hidden.size(1))
        size, found = max(1, size), []
        # Of no token there is one piece too, which keeps the outputs connected to the model.
        for start in range(0, max(len(tokens), 1), size):
            part = slice(start, start + size)
            pieces = hidden[part], tokens[part], *([one[part] for one in listed] if listed else [kept.at(part)])
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

    def _of_kept(
        self,
        head: nn.Linear,
        config: Any,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        ids: torch.Tensor,
        there: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute them from the logits of the kept ``ids`` (R, S), where ``there``, alone."""
        with torch.autocast(hidden.device.type, enabled=False) if self.in_fp32 else nullcontext():
            hidden = hidden.float() if self.in_fp32 else hidden
            logits = torch.bmm(head.weight[ids], hidden[..., None])[..., 0]
        logits = self._scaled(config, logits if head.bias is None else logits + head.bias[ids])
        own = there & (ids == tokens[:, None])
        log_probs, entropies = truncated_log_probs(logits, own.int().argmax(dim=1), there)
        return log_probs.masked_fill(~own.any(dim=1), -torch.inf), entropies

    def _of_piece(
        self, head: Any, config: Any, hidden: torch.Tensor, tokens: torch.Tensor, kept: KeptSets
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # TRL has cast the weights to float32 then. The module is called, so that engines gather a sharded weight.
        with torch.autocast(hidden.device.type, enabled=False) if self.in_fp32 else nullcontext():
            logits = head(hidden.float() if self.in_fp32 else hidden)
        return truncated_log_probs(self._scaled(config, logits), tokens, kept.mask(logits.size(1)))

    def _scaled(self, config: Any, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale(config)
        cap = getattr(config, "final_logit_softcapping", None)
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        return logits / self.temperature


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
