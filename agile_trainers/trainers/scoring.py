"""Log-probabilities of whole generation batches: of the policy that an update starts from, and of the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from agile_trainers.adapters import REFERENCE
from agile_trainers.objectives.kl import turn_log_ratio
from agile_trainers.rollout.generators.architecture import positions, takes_position_ids
from agile_trainers.sampling.sampler import Generation
from agile_trainers.sampling.vllm_checks import base_model
from agile_trainers.train_batch import Batch, like_length, read_inputs
from agile_trainers.types import TurnBatch


class Scoring(Generation):
    """What the multi-turn trainers score between a rollout and its updates, without a gradient."""

    beta: float
    pad_to_multiple_of: int | None

    @property
    def _scores_old_policy(self) -> bool:
        """Whether an update sees a batch that an older policy, or another engine, sampled; TRL's own condition."""
        return self._corrects_mismatch or self.args.gradient_accumulation_steps % self._generate_every != 0

    def _with_positions(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """``model``, told each token's position as the sampler is: left padding must not count."""
        if not takes_position_ids(base_model(self.accelerator.unwrap_model(self.model))):
            return model

        def forward(*, attention_mask: torch.Tensor, **inputs: Any) -> Any:
            return model(attention_mask=attention_mask, position_ids=positions(attention_mask), **inputs)

        return forward

    def _policy_scores(self, batch: TurnBatch, advantages: torch.Tensor | None = None) -> Batch:
        """Log-probabilities (B, T) of policy and reference, where the step needs them.

        With ``advantages`` (B, K) and ``skip_zero_advantage``, only of rows with signal; the others are 0, and not read.
        """
        rows = torch.arange(batch.turn_ids.size(0), device=batch.turn_ids.device)
        if advantages is not None and self.args.skip_zero_advantage:
            live = (advantages.abs() > self.args.zero_advantage_eps).any(dim=1)
            # As many on every rank: where weights are sharded, forward passes must match.
            rows = live.int().argsort(descending=True, stable=True)[: int(self.accelerator.gather(live.sum()).max())]
        scores: Batch = {"scored": torch.zeros_like(batch.failed).index_fill(0, rows, True)}
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            if self._scores_old_policy or self.args.kl_placement != "loss":
                scores["old_per_token_logps"] = self._score(self.model, batch, rows)
            if self.beta != 0.0:
                scores["ref_per_token_logps"] = self._score_reference(batch, rows)
        return scores

    def _score_reference(self, batch: TurnBatch, rows: torch.Tensor) -> torch.Tensor:
        if self.ref_model is not None:
            return self._score(self.ref_model, batch, rows)
        policy = self.accelerator.unwrap_model(self.model)
        with use_adapter(policy, adapter_name=REFERENCE if REFERENCE in policy.peft_config else None):
            return self._score(self.model, batch, rows)

    def _score(self, model: Any, batch: TurnBatch, rows: torch.Tensor) -> torch.Tensor:
        """Log-probabilities (B, T) of some rows."""
        scores = torch.zeros_like(batch.completion_ids, dtype=torch.float32)
        for chosen, part in like_length(batch, self.args.per_device_train_batch_size, self.pad_to_multiple_of, rows):
            length = part["completion_ids"].size(1)
            log_probs, _, _ = self._get_per_token_logps_and_entropies(model, **read_inputs(part), logits_to_keep=length)
            scores[chosen, :length] = log_probs.float()
        return scores

    def _penalize(self, batch: TurnBatch, scores: Batch) -> None:
        """Log the divergence from the reference, and take it from the rewards if that is its place."""
        log_probs, reference = scores["old_per_token_logps"], scores["ref_per_token_logps"]
        trained = batch.valid_mask
        totals = torch.stack([((log_probs - reference) * trained).sum(), trained.sum().float()])
        total, tokens = self.accelerator.reduce(totals, reduction="sum")
        self._metrics["train"]["kl"].append((total / tokens.clamp(min=1.0)).item())
        if self.args.kl_placement == "reward":
            turns = turn_log_ratio(log_probs, reference, batch.turn_ids, batch.turn_mask.size(1))
            batch.turn_rewards -= self.beta * turns * batch.turn_mask
