"""Makes the generation batch of the loss, from episodes, credit and log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator

from agile_trainers.adapters.copies import Snapshots
from agile_trainers.objectives.advantages import with_advantage
from agile_trainers.objectives.drift import DECISION
from agile_trainers.objectives.ratios import token_kl_penalty, turn_log_ratio
from agile_trainers.objectives.segments import spread_to_tokens, turn_lengths
from agile_trainers.step.credit import Credit, CreditAssignment, Judged, TurnWeights
from agile_trainers.step.critic import Critic, CriticValues, NoCritic
from agile_trainers.step.dropout import is_noisy
from agile_trainers.step.log_probs import (
    BatchLogProbs,
    LogProbPasses,
    Models,
    corrected_drift,
    mismatch_weights,
    weights_of_turns,
)
from agile_trainers.step.loss import DemonstrationLoss
from agile_trainers.step.play import PlayedGroups
from agile_trainers.step.teacher import Teacher
from agile_trainers.train_batch import TrainBatch, own_rows, read_of
from agile_trainers.types import TurnBatch


def scores_old_policy(args: Any) -> bool:
    """Return True if a generation batch needs the log-probs of the old policy before its first update."""
    return args.batches_ahead > 0 or bool(args.vllm_importance_sampling_correction)


def updates_again(args: Any) -> bool:
    """Return True if weights change between two forward passes of a generation batch: TRL's own condition.

    The old policy's log-probs are then needed; see :func:`first_pass_is_old_policy`.
    """
    return args.gradient_accumulation_steps % (args.steps_per_generation * args.num_iterations) != 0


def first_pass_is_old_policy(model: Any, first_is_one: bool) -> bool:
    """Return True if the first pass of a batch with gradient computes the log-probs that a pass before it would.

    Noise of training, as dropout, is drawn anew in each pass: the policy is then scored before.

    Args:
        model: The policy.
        first_is_one: True if the first pass over the generation batch is one optimizer step of training.
    """
    return first_is_one and not is_noisy(model)


def trained_tokens(batch: TurnBatch, args: Any) -> torch.Tensor:
    """Return (B, T) bool, True on the tokens that enter the loss."""
    return batch.valid_mask & ~batch.cut[:, None] if args.mask_truncated_completions else batch.valid_mask


def penalize(batch: TurnBatch, log_probs: BatchLogProbs, args: Any, accelerator: Accelerator) -> dict[str, float]:
    """Subtract the divergence from the reference from the turns' rewards, with ``kl_placement="reward"``.

    Args:
        batch: The episodes of this process, changed in place.
        log_probs: Their log-probabilities.
        args: A ``MultiTurnConfig``.
        accelerator: The trainer's.

    Returns:
        ``kl``, the mean over all tokens of all processes of the log-ratio of the policy over the reference.
    """
    assert log_probs.old is not None and log_probs.reference is not None
    trained = batch.valid_mask
    totals = torch.stack([((log_probs.old - log_probs.reference) * trained).sum(), trained.sum().float()])
    total, tokens = accelerator.reduce(totals, reduction="sum")
    if args.kl_placement == "reward":
        turns = turn_log_ratio(log_probs.old, log_probs.reference, batch.turn_ids, batch.turn_mask.size(1))
        batch.turn_rewards -= args.beta * turns * batch.turn_mask
    return {"kl": (total / tokens.clamp(min=1.0)).item()}


def train_batch(
    batch: TurnBatch,
    credit: Credit,
    spread: torch.Tensor,
    log_probs: BatchLogProbs,
    args: Any,
    accelerator: Accelerator,
) -> tuple[TrainBatch, dict[str, float]]:
    """Make the generation batch of the loss, with TRL's columns and those of the credit rule.

    Args:
        batch: The episodes of this process.
        credit: Their credit.
        spread: (B, T), the advantage of each token.
        log_probs: Their log-probabilities.
        args: A ``MultiTurnConfig`` for episodes.
        accelerator: The trainer's.

    Returns:
        The batch, and the metrics of what is corrected: drift, or the mismatch between sampler and trainer.
    """
    live = with_advantage(credit.advantages, batch.turn_mask, args.zero_advantage_eps)
    if args.kl_placement == "advantage":
        assert log_probs.old is not None and log_probs.reference is not None
        unit = args.importance_sampling_level
        penalty = args.beta * token_kl_penalty(log_probs.old, log_probs.reference, batch.turn_ids, unit)
        spread, live = spread - penalty, live | penalty.any(dim=1)
    if args.importance_sampling_level == "turn" and args.turn_ratio_pooling == "sum":
        # Each of a turn's L tokens holds the turn's ratio, whose gradient is that of them all: it would count L times.
        lengths = turn_lengths(batch.turn_ids, batch.turn_mask.size(1)).clamp(min=1)
        spread = spread / spread_to_tokens(lengths, batch.turn_ids).clamp(min=1)
    trained = trained_tokens(batch, args)
    read: dict[str, Any] = {**read_of(batch)}
    output = TrainBatch(
        **read,
        tool_mask=trained.long(),
        turn_ids=batch.turn_ids,
        sampling_per_token_logps=batch.sampling_logprobs,
        advantages=spread,
        num_items_in_batch=accelerator.gather(trained.sum()).sum(),
        old_per_token_logps=log_probs.old if scores_old_policy(args) or updates_again(args) else None,
        ref_per_token_logps=log_probs.reference if args.kl_placement == "loss" else None,
        episodes=torch.arange(len(batch.turn_ids), device=trained.device),
        has_advantage=live,
        recorded_reference=log_probs.reference,
        turn_columns=dict(credit.columns),
    )
    if log_probs.snapshot is None and not args.vllm_importance_sampling_correction:
        return output, {}
    scored = trained & log_probs.scored[:, None]
    if log_probs.snapshot is None:
        output.importance_sampling_ratio, metrics = mismatch_weights(args, batch, log_probs, scored, accelerator)
    else:  # Drift is in place of the mismatch: both sides are the trainer's own log-probs.
        output.importance_sampling_ratio, metrics = corrected_drift(args, batch, log_probs, scored, accelerator)
    return output, metrics


@dataclass
class MadeBatch:
    """The generation batch of the loss, and what was computed on the way to it."""

    output: TrainBatch
    log_probs: BatchLogProbs
    judged: Judged
    credit: Credit
    """Credit of the rows of all processes."""
    advantages: torch.Tensor
    """(B, K), of this process."""
    values: torch.Tensor | None
    """(B, K), of the critic; None without one."""


class BatchMaker:
    """Makes generation batches of the loss: log-probs, values, credit and weights, in the order in which they run.

    Args:
        args: A ``MultiTurnConfig``.
        accelerator: The trainer's.
        passes: Computes log-probabilities.
        credit: Assigns credit.
        critic: The critic, or a :class:`NoCritic`.
        snapshots: The adapters of earlier policies, with ``batches_ahead``.
        teacher: The teacher, if there is one.
        demonstrated: Trains on an expert's episodes, if there are any.
        add_metrics: Takes metrics to log.
        skips_zero_advantage: True if episodes without advantage are left out of the forward passes.
    """

    def __init__(
        self,
        args: Any,
        accelerator: Accelerator,
        passes: LogProbPasses,
        credit: CreditAssignment,
        critic: Critic | NoCritic,
        snapshots: Snapshots | None,
        teacher: Teacher | None,
        demonstrated: DemonstrationLoss | None,
        add_metrics: Callable[[Mapping[str, float]], None],
        *,
        skips_zero_advantage: bool,
    ) -> None:
        self._args, self._accelerator, self._passes = args, accelerator, passes
        self._credit, self.critic, self.snapshots, self._teacher = credit, critic, snapshots, teacher
        self._demonstrated = demonstrated
        self._add_metrics, self.skips_zero_advantage = add_metrics, skips_zero_advantage

    def make(self, models: Models, played: PlayedGroups, step: int, *, first_is_one: bool) -> MadeBatch:
        """Make the batch of this process.

        Args:
            models: The policy and its reference.
            played: The episodes.
            step: Micro-steps that were trained before.
            first_is_one: True if the first pass over the generation batch is one optimizer step of training.
        """
        args, batch = self._args, played.batch
        self._passes.prepare_packing(models, batch)
        # Every row is scored before credit where it may depend on log-probs: by a penalty, or by weights of drift.
        weighs = args.drift_correction == DECISION and played.version is not None
        log_probs = self.log_probs(models, batch, played.version, first_is_one) if args.beta != 0.0 or weighs else None
        if log_probs is not None and args.kl_placement != "loss":
            self._add_metrics(penalize(batch, log_probs, args, self._accelerator))
        weights, trained = weights_of_turns(args, batch, log_probs), trained_tokens(batch, args)
        read = self.critic.read(models.policy, batch, trained, step, first_is_one=first_is_one, weights=weights)
        judged, credit = self.assign(played, read, weights)
        own = credit.local(own_rows(self._accelerator, len(batch.turn_mask)), batch.turn_mask.size(1))
        log_probs = log_probs or self.log_probs(models, batch, played.version, first_is_one, own.advantages)
        output = self.finish(batch, own, log_probs, read)
        if self._teacher is not None:
            self._teacher.add_columns(output, played.trajectories)
        return MadeBatch(output, log_probs, judged, credit, own.advantages, None if read is None else read.turn_values)

    def log_probs(
        self,
        models: Models,
        batch: TurnBatch,
        version: int | None,
        first_is_one: bool,
        advantages: torch.Tensor | None = None,
    ) -> BatchLogProbs:
        """Score policy, reference and the version that played, where the step needs them.

        With ``advantages`` (B, K), maybe only rows with one.
        """
        args, rows, live = self._args, None, None
        if advantages is not None and self.skips_zero_advantage:
            live = with_advantage(advantages, batch.turn_mask, args.zero_advantage_eps)
            rows = self._passes.even_rows(live)
        old = scores_old_policy(args) or args.kl_placement != "loss"
        old = old or (updates_again(args) and not first_pass_is_old_policy(models.policy, first_is_one))
        log_probs = self._passes.compute(models, batch, old=old, reference=args.beta != 0.0, rows=rows)
        log_probs.live = live
        if version is not None:
            self.score_snapshot(models, batch, log_probs, version)
        return log_probs

    def score_snapshot(self, models: Models, batch: TurnBatch, log_probs: BatchLogProbs, version: int) -> None:
        """Score the rows that were scored under the version of the policy that played them."""
        rows = log_probs.scored.nonzero()[:, 0]
        assert self.snapshots is not None
        log_probs.version = version
        with self.snapshots.holding(version):
            log_probs.snapshot = self._passes.compute(models, batch, old=True, reference=False, rows=rows).old

    def delivered(
        self, models: Models, batch: TurnBatch, log_probs: BatchLogProbs, trained: torch.Tensor
    ) -> tuple[Callable[[], tuple[torch.Tensor, torch.Tensor]], Callable[[], AbstractContextManager[None]]]:
        """Return what scores some tokens of a batch again, and what lets the model compute with the policy that played it.

        Args:
            models: The policy and its reference.
            batch: The episodes of this process.
            log_probs: Their log-probabilities.
            trained: (B, T) bool, the tokens that enter the loss.
        """
        counted, version, snapshots = trained & log_probs.scored[:, None], log_probs.version, self.snapshots
        playing = nullcontext if version is None or snapshots is None else partial(snapshots.holding, version)
        return lambda: self._passes.of_some(models, batch, counted), playing

    def assign(
        self, played: PlayedGroups, read: CriticValues | None, weights: TurnWeights | None = None
    ) -> tuple[Judged, Credit]:
        """Assign the credit of all processes, before TRL shuffles rows."""
        judged = played.judged  # unless values, a penalty or weights changed what it was computed from
        if judged is None or read is not None or weights is not None or self._args.kl_placement == "reward":
            values, final_values = (None, None) if read is None else (read.turn_values, read.final_values)
            judged = self._credit.judge(played.batch, values, final_values, weights)
        credit = self._credit.finish(judged)
        self._add_metrics(credit.metrics)
        return judged, credit

    def finish(
        self, batch: TurnBatch, credit: Credit, log_probs: BatchLogProbs, read: CriticValues | None
    ) -> TrainBatch:
        """Make the generation batch of the loss, from the credit of this process."""
        spread = self.critic.spread(credit, read, batch)
        output, metrics = train_batch(batch, credit, spread, log_probs, self._args, self._accelerator)
        self._add_metrics(metrics)
        if self._demonstrated is not None:
            self._demonstrated.add_column(output, batch, spread)
        self.critic.add_columns(output, read, credit, batch)
        return output
