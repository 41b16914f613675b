"""Computes log-probabilities of generation batches without gradient, and weighs what another policy played (drift)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from agile_trainers.adapters.roles import REFERENCE
from agile_trainers.objectives.drift import DECISION, decision_weights, drift_metrics, drift_weights, turn_ratios
from agile_trainers.objectives.mismatch import importance_weights, mismatch_metrics
from agile_trainers.packing.packer import Packer
from agile_trainers.step.credit import TurnWeights
from agile_trainers.step.token_batches import TokenBatches
from agile_trainers.train_batch import gather_rows, length_sorted_batches, read_inputs
from agile_trainers.types import TurnBatch

TOKENS = 1000
"""Tokens of which a few rows have as many, if there are."""
TokenLogProbs = Callable[..., tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]]
"""Type of TRL's ``_get_per_token_logps_and_entropies``."""


@dataclass
class BatchLogProbs:
    """Log-probabilities of a generation batch; 0 in rows that were not scored, outside actions and in failed episodes."""

    scored: torch.Tensor
    """(B,) bool, the rows that were scored."""
    old: torch.Tensor | None = None
    """(B, T) float32, or float64 if the model is, under the policy that the update starts from."""
    reference: torch.Tensor | None = None
    """(B, T), the same under the reference."""
    snapshot: torch.Tensor | None = None
    """(B, T), the same under an older policy that played the episodes; None if ``old`` did."""
    version: int | None = None
    """The version of that policy."""
    live: torch.Tensor | None = None
    """(B,) bool, the rows that metrics count: others were scored only so that all ranks score as many. None: all."""

    def metric_mask(self, mask: torch.Tensor) -> torch.Tensor:
        """Return the tokens (B, T) of ``mask`` that metrics count."""
        return mask if self.live is None else mask & self.live[:, None]


class Models(NamedTuple):
    """The models of a step, as the trainer has them now: distributed training may wrap and replace them."""

    policy: Any
    """The model whose ``default`` adapter, or all of whose weights, are trained."""
    reference: Any
    """A frozen model; None where the reference is an adapter of the policy, its base model, or missing."""


class LogProbPasses:
    """Computes the log-probabilities of generation batches, in forward passes.

    Args:
        log_probs: TRL's ``_get_per_token_logps_and_entropies``, with its arguments.
        packer: Runs the forward passes.
        token_batches: Splits rows into forward passes.
        args: A ``MultiTurnConfig``.
        accelerator: The trainer's.
    """

    def __init__(
        self, log_probs: TokenLogProbs, packer: Packer, token_batches: TokenBatches, args: Any, accelerator: Accelerator
    ) -> None:
        self._log_probs, self._packer = log_probs, packer
        self._token_batches, self._accelerator = token_batches, accelerator
        self._size, self._checkpointing = args.per_device_train_batch_size, args.gradient_checkpointing_kwargs
        self.pad_to_multiple_of: int | None = args.pad_to_multiple_of
        """Multiple of which the width of every padded forward pass is."""

    def compute(
        self, models: Models, batch: TurnBatch, *, old: bool, reference: bool, rows: torch.Tensor | None = None
    ) -> BatchLogProbs:
        """Compute those of some rows.

        Args:
            models: The policy and its reference.
            batch: The episodes of this process.
            old: Of the policy.
            reference: Of the reference: a separate model, an adapter, or the base model.
            rows: (R,) int64. Default: all.
        """
        if rows is None:
            rows = torch.arange(batch.turn_ids.size(0), device=batch.turn_ids.device)
        found = BatchLogProbs(torch.zeros_like(batch.failed).index_fill(0, rows, True))
        with torch.no_grad(), disable_gradient_checkpointing(models.policy, self._checkpointing):
            if old:
                found.old = self._of(models.policy, batch, rows)
            if reference and models.reference is not None:
                found.reference = self._of(models.reference, batch, rows)
            elif reference:
                policy = self._accelerator.unwrap_model(models.policy)
                with use_adapter(policy, adapter_name=REFERENCE if REFERENCE in policy.peft_config else None):
                    found.reference = self._of(models.policy, batch, rows)
        return found

    def of_some(self, models: Models, batch: TurnBatch, counted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute those of the policy, as it is now, in a few rows.

        Args:
            models: The policy and its reference.
            batch: The episodes of this process.
            counted: (B, T) bool, the tokens that are asked for.

        Returns:
            (N,) each: log-probabilities of the sampler, and of the policy, of about a thousand tokens.
        """
        sizes = counted.sum(dim=1)
        rows = sizes.nonzero()[: self._size, 0]
        rows = rows[: 1 + int((sizes[rows].cumsum(0) < TOKENS).sum())]
        scored = self.compute(models, batch, old=True, reference=False, rows=rows).old
        assert scored is not None
        return batch.sampling_logprobs[rows][counted[rows]], scored[rows][counted[rows]]

    def prepare_packing(self, models: Models, batch: TurnBatch) -> None:
        """Let the packer compare packed with padded rows, on as many rows of this process as a micro-batch has."""
        if not self._packer.needs_check:
            return
        rows = torch.arange(min(len(batch.turn_ids), self._size))
        (_, part), *_ = length_sorted_batches(batch, len(rows), self.pad_to_multiple_of, rows.to(batch.turn_ids.device))
        with disable_gradient_checkpointing(models.policy, self._checkpointing):
            self._packer.prepare(models.policy, part)

    def even_rows(self, live: torch.Tensor) -> torch.Tensor:
        """Return the rows (R,) where ``live`` (B,) is True, padded with others to the same number on every rank.

        Where weights are sharded, every rank must run equally many forward passes.
        """
        most = int(self._accelerator.gather(live.sum()).max())
        # Stable: which rows fill up must not depend on how a device sorts.
        return live.int().argsort(descending=True, stable=True)[:most]

    def _of(self, model: Any, batch: TurnBatch, rows: torch.Tensor) -> torch.Tensor:
        return self._token_batches.fitting(lambda: self._in_passes(model, batch, rows))

    def _in_passes(self, model: Any, batch: TurnBatch, rows: torch.Tensor) -> torch.Tensor:
        computed = torch.zeros_like(batch.completion_ids, dtype=torch.float32)
        batches = length_sorted_batches(batch, self._size, self.pad_to_multiple_of, rows, self._token_batches.each)
        for chosen, part in batches:
            length = part["completion_ids"].size(1)
            scored = batch.valid_mask[chosen, :length]
            log_probs, _, _ = self._log_probs(
                model, **read_inputs(part), logits_to_keep=length, scored=scored, part=part
            )
            # At least float32; float64 if the model computes in it.
            log_probs = log_probs.to(torch.promote_types(log_probs.dtype, computed.dtype))
            computed = computed.to(log_probs.dtype)
            if "places" in part:  # an episode may be read in several passes
                log_probs = torch.where(part["places"] >= 0, log_probs, computed[chosen, :length])
            computed[chosen, :length] = log_probs
        return computed


# ---------------------------------------------------------------------------------------------------------------- drift


def weights_of_turns(args: Any, batch: TurnBatch, log_probs: BatchLogProbs | None) -> TurnWeights | None:
    """Weigh the rewards of a batch that an earlier policy played, per decision.

    The products run over every token that was sampled, also of episodes that ``mask_truncated_completions`` leaves out: what
    a reward depends on does not change with what is trained.

    Args:
        args: A ``MultiTurnConfig``.
        batch: The episodes of this process.
        log_probs: Their log-probabilities, of all rows.

    Returns:
        None without this correction, and where the policy itself played.
    """
    if args.drift_correction != DECISION or log_probs is None or log_probs.snapshot is None:
        return None
    assert log_probs.old is not None
    log_ratio, turns = log_probs.old - log_probs.snapshot, batch.turn_mask.size(1)
    sampled = (log_ratio, batch.valid_mask, batch.turn_ids, turns, args.drift_clip_max)
    return TurnWeights(decision_weights(*sampled), turn_ratios(*sampled))


def corrected_drift(
    args: Any, batch: TurnBatch, log_probs: BatchLogProbs, mask: torch.Tensor, accelerator: Accelerator
) -> tuple[torch.Tensor | None, dict[str, float]]:
    """Weigh the tokens of a batch by ``drift_correction``, and measure the drift.

    Both log-probabilities are the trainer's own: the sampler's depend in their last bits on the batch that it computed.

    Args:
        args: A ``MultiTurnConfig``.
        batch: The episodes of this process.
        log_probs: Under the policy that the update starts from, and under the one that played the episodes.
        mask: (B, T) bool, the tokens that were scored and are trained on.
        accelerator: Gathers for the metrics.

    Returns:
        The weights (B, T), None without a correction or with one of :func:`weights_of_turns`; and metrics under ``drift/``,
        over all processes.
    """
    assert log_probs.old is not None and log_probs.snapshot is not None
    log_ratio, mode = torch.where(mask, log_probs.old - log_probs.snapshot, 0.0), args.drift_correction
    ours, counted = gather_rows(accelerator, log_ratio, log_probs.metric_mask(mask).long())
    metrics = drift_metrics(ours, counted.bool())
    if mode is None or mode == DECISION:
        return None, metrics
    return drift_weights(log_ratio, mask, batch.turn_ids, mode, args.drift_clip_max), metrics


def mismatch_weights(
    args: Any, batch: TurnBatch, log_probs: BatchLogProbs, mask: torch.Tensor, accelerator: Accelerator
) -> tuple[torch.Tensor, dict[str, float]]:
    """Compute the importance weight of each token by ``vllm_importance_sampling_mode``.

    Args:
        args: A ``MultiTurnConfig``.
        batch: The episodes of this process.
        log_probs: Under the trainer's policy.
        mask: (B, T) bool, the tokens that were scored and are trained on.
        accelerator: Gathers the columns for the metrics.

    Returns:
        The weights (B, T), and metrics of the mismatch and of the weights over all processes.
    """
    assert log_probs.old is not None
    correction = importance_weights(
        log_probs.old,
        batch.sampling_logprobs,
        batch.turn_ids,
        mask,
        mode=args.vllm_importance_sampling_mode,
        lowest=args.vllm_importance_sampling_clip_min,
        highest=args.vllm_importance_sampling_clip_max,
    )
    ours, theirs, weights, clipped, counted = gather_rows(
        accelerator, log_probs.old, batch.sampling_logprobs, correction.weights, correction.clipped.long(),
        log_probs.metric_mask(mask).long(),
    )  # fmt: skip
    return correction.weights, mismatch_metrics(ours, theirs, weights, clipped.bool(), counted.bool())
