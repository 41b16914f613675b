"""Computes log-probabilities of generation batches under the old policy and the reference, without gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from agile_trainers.adapters import REFERENCE
from agile_trainers.packing.packer import Packer
from agile_trainers.train_batch import length_sorted_batches, read_inputs
from agile_trainers.types import TurnBatch

LogProbs = Callable[..., tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]]
"""Type of TRL's ``_get_per_token_logps_and_entropies``."""


@dataclass
class Scores:
    """Log-probabilities of a generation batch; 0 in rows that were not scored, outside actions and in failed episodes."""

    scored: torch.Tensor
    """(B,) bool, the rows that were scored."""
    old: torch.Tensor | None = None
    """(B, T) float32, under the policy that the update starts from."""
    reference: torch.Tensor | None = None
    """(B, T) float32, under the reference."""


class Scorer:
    """Scores the episodes of a generation batch.

    Args:
        trainer: The trainer whose policy and reference are scored.
        packer: Runs the forward passes.
        log_probs: TRL's ``_get_per_token_logps_and_entropies``, with its arguments.
    """

    def __init__(self, trainer: GRPOTrainer, packer: Packer, log_probs: LogProbs) -> None:
        self._trainer, self._packer, self._log_probs = trainer, packer, log_probs

    def score(self, batch: TurnBatch, *, old: bool, reference: bool, rows: torch.Tensor | None = None) -> Scores:
        """Score some rows.

        Args:
            batch: The episodes of this process.
            old: Score the policy.
            reference: Score the reference.
            rows: (R,) int64. Default: all.
        """
        trainer = self._trainer
        if rows is None:
            rows = torch.arange(batch.turn_ids.size(0), device=batch.turn_ids.device)
        scores = Scores(torch.zeros_like(batch.failed).index_fill(0, rows, True))
        with torch.no_grad(), disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs):
            if old:
                scores.old = self._of(trainer.model, batch, rows)
            if reference:
                scores.reference = self.score_reference(batch, rows)
        return scores

    @property
    def pad_to_multiple_of(self) -> int | None:
        """Multiple of which the width of every padded forward pass is."""
        return self._trainer.pad_to_multiple_of

    def prepare_packing(self, batch: TurnBatch) -> None:
        """Let the packer compare packed with padded rows, on as many rows of this process as a micro-batch has."""
        trainer = self._trainer
        if not self._packer.needs_check:
            return
        rows = torch.arange(min(len(batch.turn_ids), trainer.args.per_device_train_batch_size))
        (_, part), *_ = length_sorted_batches(
            batch, len(rows), trainer.pad_to_multiple_of, rows.to(batch.turn_ids.device)
        )
        with disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs):
            self._packer.prepare(trainer.model, part)

    def even_rows(self, live: torch.Tensor) -> torch.Tensor:
        """Return the rows (R,) where ``live`` (B,) is True, padded with others to the same number on every rank.

        Where weights are sharded, every rank must run equally many forward passes.
        """
        most = int(self._trainer.accelerator.gather(live.sum()).max())
        return live.int().argsort(descending=True, stable=True)[:most]

    def score_reference(self, batch: TurnBatch, rows: torch.Tensor) -> torch.Tensor:
        """Compute the log-probabilities (B, T) of the reference: a separate model, an adapter, or the base model."""
        trainer: Any = self._trainer
        if trainer.ref_model is not None:
            return self._of(trainer.ref_model, batch, rows)
        policy = trainer.accelerator.unwrap_model(trainer.model)
        with use_adapter(policy, adapter_name=REFERENCE if REFERENCE in policy.peft_config else None):
            return self._of(trainer.model, batch, rows)

    def _of(self, model: Any, batch: TurnBatch, rows: torch.Tensor) -> torch.Tensor:
        trainer = self._trainer
        scores = torch.zeros_like(batch.completion_ids, dtype=torch.float32)
        size, multiple = trainer.args.per_device_train_batch_size, trainer.pad_to_multiple_of
        for chosen, part in length_sorted_batches(batch, size, multiple, rows, trainer.passes.split):
            length = part["completion_ids"].size(1)
            scored = batch.valid_mask[chosen, :length]
            log_probs, _, _ = self._log_probs(model, **read_inputs(part), logits_to_keep=length, scored=scored)
            scores[chosen, :length] = log_probs.float()
        return scores
