"""Hands one forward pass over to TRL's loss, with ratios pooled over turns where the options say so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from agile_trainers.objectives.ratios import pool_log_probs
from agile_trainers.train_batch import Batch, TrainBatch


@dataclass
class LossPass:
    """A forward pass on its way from ``_compute_loss`` to ``_get_per_token_logps_and_entropies``, past TRL's signatures."""

    batch: TrainBatch
    inputs: Batch
    """The same batch in TRL's form."""
    values: torch.Tensor | None = None
    """Values of the critic, from the forward pass of the loss."""
    log_probs: torch.Tensor | None = None
    """(B, T), from the forward pass of the loss."""
    log_ratio: torch.Tensor | None = None
    """(B, T), of the policy over the one that the update started from, pooled over turns where the loss's is."""

    def take(self, log_probs: torch.Tensor, pooling: Literal["mean", "sum"] | None) -> torch.Tensor:
        """Take the log-probabilities of the forward pass.

        Args:
            log_probs: (B, T), of the tokens that enter the loss.
            pooling: How ratios are pooled over a turn, ``"mean"`` or ``"sum"``; None for one ratio a token or episode.

        Returns:
            The log-probabilities (B, T) that TRL's loss reads: their difference to the old ones is the pooled log-ratio.
        """
        batch = self.batch
        if batch.old_per_token_logps is not None:
            # The ratio of a token that is not scored is 1.
            log_probs = torch.where(batch.counted, log_probs, batch.old_per_token_logps)
        old = log_probs.detach() if batch.old_per_token_logps is None else batch.old_per_token_logps
        self.log_probs, self.log_ratio = log_probs.detach(), log_probs.detach() - old
        if pooling is None:
            return log_probs
        num_turns = int(batch.turn_ids.max()) + 1
        pooled = pool_log_probs(log_probs, old, batch.turn_ids, max(num_turns, 1), pooling)
        self.log_ratio = pooled.detach() - old
        if batch.ref_per_token_logps is not None:
            # The KL term must still see the policy's own distance to the reference.
            self.inputs["ref_per_token_logps"] = batch.ref_per_token_logps + (pooled - log_probs)
        return pooled
