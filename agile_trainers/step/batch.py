"""Makes the generation batch of the loss, from episodes, credit and log-probabilities."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator

from agile_trainers.objectives.advantages import with_advantage
from agile_trainers.objectives.kl import token_kl_penalty, turn_log_ratio
from agile_trainers.objectives.segments import spread_to_tokens, turn_lengths
from agile_trainers.sampling.correction import mismatch_weights
from agile_trainers.step.credit import Credit
from agile_trainers.step.drift import corrected_drift
from agile_trainers.step.log_probs import BatchLogProbs
from agile_trainers.train_batch import TrainBatch
from agile_trainers.types import TurnBatch


def scores_old_policy(args: Any) -> bool:
    """Return True if an older policy or another engine samples the batch of an update: TRL's own condition, and ours."""
    micro_steps = args.steps_per_generation * args.num_iterations
    older = args.batches_ahead > 0 or args.gradient_accumulation_steps % micro_steps != 0
    return older or bool(args.vllm_importance_sampling_correction)


def trained_tokens(batch: TurnBatch, args: Any) -> torch.Tensor:
    """Return (B, T) bool, True on the tokens that enter the loss."""
    return batch.valid_mask & ~batch.truncated[:, None] if args.mask_truncated_completions else batch.valid_mask


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
    output = TrainBatch(
        prompt_ids=batch.prompt_ids,
        prompt_mask=batch.prompt_mask,
        completion_ids=batch.completion_ids,
        completion_mask=batch.completion_mask,
        tool_mask=trained.long(),
        turn_ids=batch.turn_ids,
        sampling_per_token_logps=batch.sampling_logprobs,
        advantages=spread,
        num_items_in_batch=accelerator.gather(trained.sum()).sum(),
        old_per_token_logps=log_probs.old if scores_old_policy(args) else None,
        ref_per_token_logps=log_probs.reference if args.kl_placement == "loss" else None,
        episodes=torch.arange(len(batch.turn_ids), device=trained.device),
        has_advantage=live,
        recorded_reference=log_probs.reference,
        path_ids=batch.path_ids,
        path_lengths=batch.path_lengths,
        places=batch.places,
        kept_words=batch.kept_words,
        kept_sizes=batch.kept_sizes,
        turn_columns=dict(credit.columns),
    )
    if log_probs.snapshot is not None:
        # Drift is in place of the mismatch: both sides are the trainer's own log-probs.
        assert log_probs.old is not None
        scored = trained & log_probs.scored[:, None]
        output.importance_sampling_ratio, metrics = corrected_drift(
            args, log_probs.old, log_probs.snapshot, spread, batch.turn_ids, scored, accelerator
        )
        return output, metrics
    if not args.vllm_importance_sampling_correction:
        return output, {}
    assert log_probs.old is not None
    scored = trained & log_probs.scored[:, None]
    output.importance_sampling_ratio, metrics = mismatch_weights(args, batch, log_probs.old, scored, accelerator)
    return output, metrics
