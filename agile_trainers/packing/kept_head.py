"""The LM head of tokens whose policy is renormalised over a kept set, or compared with a teacher's distribution."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from agile_trainers.adapters.critic import TaughtOutput
from agile_trainers.adapters.sharding import is_sharded
from agile_trainers.objectives.distillation import divergence
from agile_trainers.objectives.kept_sets import KeptSets, truncated_log_probs

LOGITS = 2**24
"""Logits of a piece, at most, but for those of a single token."""
FEW = 1 / 128
"""Part of the vocabulary up to which the logits of kept tokens alone are computed."""
COPIES = 6
"""Copies of a piece's logits, in float32, that its backward pass needs."""


@dataclass(frozen=True)
class Teaching:
    """The teacher's side of a forward pass whose distributions are compared with it."""

    hidden: torch.Tensor
    """(R, H), the teacher's hidden state before each token."""
    logits: Callable[[torch.Tensor], torch.Tensor]
    """The teacher's head: (P, H) to (P, V) at the temperature, without gradient."""
    forward: bool
    """True for KL(teacher || policy)."""


@dataclass(frozen=True)
class KeptHead:
    """Computes log-probabilities and entropies over kept sets, in pieces whose logits are computed again for the gradient.

    Logits are those of TRL's fused head: scaled and capped as the model's configuration says.
    """

    temperature: float = 1.0
    in_fp32: bool = False
    """True computes the logits in float32, as ``cast_lm_head_to_fp32`` says."""

    def __call__(
        self,
        model: PreTrainedModel,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        kept: KeptSets | None,
        outputs: Any,
        teaching: Teaching | None = None,
    ) -> Any:
        """Replace log-probabilities, and entropies if there are any; add the divergence from a teacher.

        Args:
            model: The model below the adapters.
            hidden: (R, H), the hidden state before each token.
            tokens: (R,) int64.
            kept: Their sets. None: all tokens.
            outputs: Of TRL's fused head.
            teaching: The teacher's side.

        Returns:
            ``outputs``, with (1, R) each.
        """
        head: Any = model.get_output_embeddings()
        device = head.weight.device
        hidden, tokens = hidden.to(device), tokens.to(device)
        kept = None if kept is None else KeptSets(*(part.to(device) for part in kept))
        config = model.config.get_text_config()
        compute, size, listed = partial(self._of_piece, model, teaching), LOGITS // config.vocab_size, None
        plain = type(head) is nn.Linear and not (head.weight.requires_grad or is_sharded(head.weight))
        if kept is not None and teaching is None and plain:
            listed = kept.ids(int(FEW * config.vocab_size))
        if listed is not None:
            compute = partial(self._of_kept, head, config)
            size = LOGITS // (listed[0].size(1) * hidden.size(1))
        size, found = max(1, size), []
        # Of no token there is one piece too, which keeps the outputs connected to the model.
        for start in range(0, max(len(tokens), 1), size):
            part = slice(start, start + size)
            sets = None if kept is None else kept.at(part)
            theirs = None if teaching is None else teaching.hidden[part]
            pieces = hidden[part], tokens[part], *([one[part] for one in listed] if listed else [sets, theirs])
            found.append(
                checkpoint(compute, *pieces, use_reentrant=False, preserve_rng_state=False)
                if torch.is_grad_enabled()
                else compute(*pieces)
            )
        log_probs, entropies, *divergences = (torch.cat(parts)[None] for parts in zip(*found, strict=True))
        outputs.log_probs = log_probs
        if outputs.entropy is not None:
            outputs.entropy = entropies
        return outputs if teaching is None else TaughtOutput(**outputs, divergence=divergences[0])

    def _of_kept(
        self,
        head: nn.Linear,
        config: Any,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        ids: torch.Tensor,
        there: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Compute them from the logits of the kept ``ids`` (R, S), where ``there``, alone."""
        with torch.autocast(hidden.device.type, enabled=False) if self.in_fp32 else nullcontext():
            hidden = hidden.float() if self.in_fp32 else hidden
            logits = torch.bmm(head.weight[ids], hidden[..., None])[..., 0]
        logits = self._scaled(config, logits if head.bias is None else logits + head.bias[ids])
        own = there & (ids == tokens[:, None])
        log_probs, entropies = truncated_log_probs(logits, own.int().argmax(dim=1), there)
        return log_probs.masked_fill(~own.any(dim=1), -torch.inf), entropies

    def _of_piece(
        self,
        model: PreTrainedModel,
        teaching: Teaching | None,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        kept: KeptSets | None,
        theirs: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        logits = self.logits(model, hidden)
        sets = None if kept is None else kept.mask(logits.size(1))
        log_probs, entropies = truncated_log_probs(logits, tokens, sets)
        if teaching is None:
            return log_probs, entropies
        assert theirs is not None
        other = teaching.logits(theirs)
        width = min(logits.size(1), other.size(1))  # a model may pad its vocabulary
        if sets is not None:
            sets = sets[:, :width]
        return log_probs, entropies, divergence(logits[:, :width], other[:, :width], sets, forward=teaching.forward)

    def logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the logits (R, V), at least float32 and at the temperature, of hidden states (R, H) of a model."""
        head, config = model.get_output_embeddings(), model.config.get_text_config()
        # TRL has cast the weights to float32 then. The module is called, so that engines gather a sharded weight.
        with torch.autocast(hidden.device.type, enabled=False) if self.in_fp32 else nullcontext():
            logits = head(hidden.float() if self.in_fp32 else hidden)
        return self._scaled(config, logits)

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
