"""Trains the critic: an adapter with a value head, read in the policy's own forward passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from peft import PeftModel
from transformers.utils import logging
from trl.models.utils import disable_gradient_checkpointing

from agile_trainers.adapters.loading import SavedAdapters, restore_adapter, start_critic
from agile_trainers.adapters.roles import CRITIC, POLICY, belongs_to, unfreeze
from agile_trainers.adapters.sharding import is_zero3
from agile_trainers.objectives.advantages import whiten
from agile_trainers.objectives.returns import token_gae, value_errors
from agile_trainers.objectives.segments import first_tokens, pool_to_turns, spread_to_tokens, turn_lengths
from agile_trainers.packing.forward import ValueReading
from agile_trainers.packing.packer import Packer
from agile_trainers.step.credit import TARGETS, Credit, CreditInputs, TurnWeights, own_turns
from agile_trainers.step.dropout import is_noisy
from agile_trainers.step.token_batches import TokenBatches
from agile_trainers.train_batch import Batch, TrainBatch, gather_rows, length_sorted_batches, own_rows, paths_of
from agile_trainers.types import TurnBatch

logger = logging.get_logger(__name__)

TargetsOf = Callable[[CreditInputs], torch.Tensor]
"""The targets (R, K) of some rows, from their values before the update."""


@dataclass
class CriticValues:
    """The critic's values of the local episodes of a generation batch. U is K; T where tokens have values."""

    offsets: torch.Tensor
    """(B, U), positions of the values, in completion coordinates, -1 being the last prompt token; or columns of
    ``path_ids``."""
    values: torch.Tensor
    """(B, U), values of the critic before the update."""
    turn_values: torch.Tensor
    """(B, K), V(s_k)."""
    final_values: torch.Tensor
    """(B,), V of the final state of an episode cut short, with ``bootstrap_at_limits``; 0 of the others."""
    by_token: bool
    """True if tokens have values and advantages of their own."""


@dataclass
class _FusedUpdate:
    """Holds what a reading of the critic needs to train it too."""

    trained: torch.Tensor
    """(B, T) bool, the tokens that enter the loss."""
    targets_of: TargetsOf
    turns: torch.Tensor
    """Turns of the optimizer step."""
    weights: TurnWeights | None
    """Weights of episodes that an earlier policy played."""


def _origin(batch: TurnBatch | TrainBatch) -> int:
    """Return the position at which completion coordinates begin; columns of ``path_ids`` are positions."""
    return batch.prompt_ids.size(1) if batch.path_ids is None else 0


def attach_critic(model: Any, args: Any, saved: SavedAdapters | None, *, name: str) -> None:
    """Add the critic's adapter to the policy's base model.

    Args:
        model: The policy.
        args: The configuration of an algorithm with a critic.
        saved: The adapters that the policy was loaded from, if any.
        name: The trainer's, for errors.

    Raises:
        ValueError: Without LoRA.
    """
    if not isinstance(model, PeftModel):
        raise ValueError(
            f"{name} trains policy and critic as two adapters on one base: pass `peft_config=LoraConfig(...)`."
        )
    # As TRL does for the policy: ZeRO-3 gathers parameters of one dtype only.
    zero3 = is_zero3(args.deepspeed_plugin)
    start_critic(
        model, saved, args.critic_start, layers=args.critic_layers, seed=args.seed, autocast_adapter_dtype=not zero3
    )


class NoCritic:
    """Takes the place of a critic in a run without one: there are no values, and nothing is added to the loss."""

    def nothing(self, *_: Any, **__: Any) -> None:
        """Leave everything as it is, and return None where a critic returns what it has read."""

    unfreeze = split_groups = restore = read = add_columns = nothing
    forget_step = count_turns_of_step = count_turns = reading = nothing

    def spread(self, credit: Credit, read: CriticValues | None, batch: TurnBatch) -> torch.Tensor:
        """Return the advantages (B, T): each token has that of its turn."""
        return spread_to_tokens(credit.advantages, batch.turn_ids)

    def remember(self) -> Callable[[], None]:
        """Return a function that does nothing: forward passes change nothing here."""
        return self.nothing

    def add_loss(self, policy_loss: torch.Tensor, *_: Any) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the policy loss."""
        return policy_loss, {}


class Critic:
    """Reads and trains the critic.

    Args:
        args: The configuration of an algorithm with a critic.
        accelerator: The trainer's.
        packer: Runs the forward passes of the model that :func:`attach_critic` has given a critic.
        token_batches: Splits rows into them.
        targets_of: Computes the targets of some rows from the credit rule's input; None if those of a row depend on other
            rows.
    """

    def __init__(
        self,
        args: Any,
        accelerator: Accelerator,
        packer: Packer,
        token_batches: TokenBatches,
        targets_of: TargetsOf | None,
    ) -> None:
        self._args, self._accelerator, self._packer, self._token_batches = args, accelerator, packer, token_batches
        self._targets_of = targets_of
        self._totals = torch.zeros(4, device=accelerator.device)
        self._step_ends = 0  # the micro-step at which the optimizer step ends that is being accumulated
        self.learned = False
        """True if the gradient of this optimizer step was accumulated when the values of its generation batch were read."""
        if args.turn_value_position != "state":
            logger.warning(
                "turn_value_position=%r reads the value after the action it is to be a baseline for: advantages are biased.",
                args.turn_value_position,
            )

    def unfreeze(self, model: Any) -> None:
        """Make policy and critic trainable; PEFT leaves only one of them trainable when it switches adapters."""
        unfreeze(model, (POLICY, CRITIC))

    def split_groups(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        """Move the critic's parameters into a group of their own if ``critic_learning_rate`` is set."""
        if self._args.critic_learning_rate is None:
            return
        critic = {id(p) for name, p in model.named_parameters() if belongs_to(name, CRITIC)}
        groups = []
        for group in optimizer.param_groups:
            for of_critic, rate in ((False, group["lr"]), (True, self._args.critic_learning_rate)):
                chosen = [p for p in group["params"] if (id(p) in critic) == of_critic]
                groups += [{**group, "params": chosen, "lr": rate}] if chosen else []
        optimizer.param_groups[:] = groups

    def restore(self, model: Any, folder: Path) -> None:
        """Load the critic of a checkpoint, if it has one."""
        if (folder / CRITIC).is_dir():
            restore_adapter(self._accelerator.unwrap_model(model), CRITIC, folder / CRITIC)

    # ------------------------------------------------------------------------------------------------------ credit

    def read(
        self,
        model: Any,
        batch: TurnBatch,
        trained: torch.Tensor,
        step: int,
        *,
        first_is_one: bool,
        weights: TurnWeights | None = None,
    ) -> CriticValues:
        """Compute the values of a generation batch, in micro-batches of similar length, like log-probabilities.

        If the update would compute the same values again, their gradient is accumulated right away, and the update is the
        policy's alone. See :attr:`learned`.

        Args:
            model: The policy, wrapped for distributed training, with its critic.
            batch: The episodes of this process.
            trained: (B, T) bool, the tokens that enter the loss.
            step: Number of micro-steps before.
            first_is_one: True if the first pass over the generation batch is one optimizer step, before which the critic
                does not change.
            weights: Of episodes of an earlier policy.
        """
        by_token = self._by_token(batch)
        # An episode of several paths may be read in several passes, and its targets need the values of all.
        fusable = first_is_one and self._targets_of is not None and batch.path_ids is None
        self.learned = fusable and self._learns_from(model, step)
        if self.learned:
            assert self._targets_of is not None
            lengths = turn_lengths(torch.where(trained, batch.turn_ids, -1), batch.turn_mask.size(1))
            fused = _FusedUpdate(trained, self._targets_of, (lengths > 0).sum(), weights)
            self.unfreeze(model)
            return self._token_batches.fitting(lambda: self._read(model, batch, by_token, fused))
        with torch.no_grad(), disable_gradient_checkpointing(model, self._args.gradient_checkpointing_kwargs):
            return self._token_batches.fitting(lambda: self._read(model, batch, by_token, None))

    def _learns_from(self, model: Any, step: int) -> bool:
        """Return True if the gradient of the values may be accumulated as they are read.

        Several processes, and engines, average gradients in the backward pass of the wrapped model.
        """
        return (
            self._accelerator.distributed_type == DistributedType.NO
            and self._args.n_gpu <= 1
            and self._args.critic_layers is None
            and step >= self._step_ends
            and not self._token_batches.steps_in_backward
            and not is_noisy(model)
        )

    def _read(self, model: Any, batch: TurnBatch, by_token: bool, fused: _FusedUpdate | None) -> CriticValues:
        final = batch.state_positions[:, -1:] - _origin(batch)
        offsets = torch.cat([self._offsets(batch, by_token), final], dim=1)
        read = torch.zeros(offsets.shape, device=offsets.device)
        size, multiple = self._args.per_device_train_batch_size, self._args.pad_to_multiple_of
        for rows, part in length_sorted_batches(batch, size, multiple, split=self._token_batches.each):
            positions = offsets[rows]
            if "path_ids" not in part:
                # No position that counts is past the last token of the longest row.
                positions = positions.clamp(max=part["completion_ids"].size(1) - 1) + part["prompt_ids"].size(1)
            with self._accelerator.autocast():
                values = self._packer.values(model, part, positions)
            read = read.to(values.dtype)
            if (paths := paths_of(part)) is None:
                read[rows] = values.detach()
            else:  # an episode may be read in several passes
                read[rows] = torch.where(paths.has(positions), values.detach(), read[rows])
            if fused is not None:
                self._learn(self._values(values, offsets[rows], batch.rows(rows), by_token), batch, rows, fused)
        return self._values(read, offsets, batch, by_token)

    def _values(self, read: torch.Tensor, offsets: torch.Tensor, batch: TurnBatch, by_token: bool) -> CriticValues:
        """Make the values of episodes from those read at their positions (B, U + 1), the final state's last."""
        values = self._pooled(read[:, :-1], batch.turn_ids, batch.turn_mask.size(1))
        turn_values = values
        if by_token:
            starts = first_tokens(batch.turn_ids, batch.turn_mask.size(1)).clamp(max=values.size(1) - 1)
            turn_values = values.gather(1, starts)
        final_values = torch.where(batch.unfinished & self._args.bootstrap_at_limits, read[:, -1], 0.0)
        return CriticValues(offsets[:, :-1], values, turn_values, final_values, by_token)

    def _learn(self, found: CriticValues, batch: TurnBatch, rows: torch.Tensor, fused: _FusedUpdate) -> None:
        """Accumulate the gradient of the value loss of some rows, as their micro-batch would in the update."""
        own = batch.rows(rows)
        drift = None if fused.weights is None else fused.weights.rows(rows)
        targets = fused.targets_of(own_turns(own, found.turn_values.detach(), found.final_values.detach(), drift))
        weights, targets = self._weigh(fused.trained[rows], targets, own, found.by_token)
        errors, _ = value_errors(found.values, found.values.detach(), targets, self._args.value_clip_range)
        total = torch.where(weights > 0, errors * weights, 0.0).sum()
        self._accelerator.backward(self._args.vf_coef * total / fused.turns.clamp(min=1.0))

    def _by_token(self, batch: TurnBatch) -> bool:
        """Return True, on all ranks alike, if this generation batch has advantages per token."""
        if self._args.advantage_granularity == "auto":
            turns = own_turns(batch).own().mask.sum(dim=1).max()
            return int(self._accelerator.gather(turns).max()) <= 1
        return self._args.advantage_granularity == "token"

    def _offsets(self, batch: TurnBatch, by_token: bool) -> torch.Tensor:
        """Compute the positions of the values; see :class:`CriticValues`."""
        tokens = batch.places
        if tokens is None:
            tokens = torch.arange(batch.turn_ids.size(1), device=batch.turn_ids.device).expand_as(batch.turn_ids)
        if by_token:
            return tokens - 1
        if self._args.turn_value_position == "mean":
            return tokens
        offsets = batch.state_positions[:, :-1] - _origin(batch)
        if self._args.turn_value_position == "final":
            offsets = offsets + turn_lengths(batch.turn_ids, batch.turn_mask.size(1))
        return offsets

    def _pooled(self, values: torch.Tensor, turn_ids: torch.Tensor, num_turns: int) -> torch.Tensor:
        if self._args.turn_value_position != "mean":
            return values
        return pool_to_turns(values, turn_ids, num_turns, "mean")

    def spread(self, credit: Credit, read: CriticValues | None, batch: TurnBatch) -> torch.Tensor:
        """Compute the advantages (B, T) of tokens.

        Each token has the advantage of its turn; where tokens have values, one of its own, whitened over all processes and
        clipped by the options.

        Args:
            credit: Of this process.
            read: The output of :meth:`read`.
            batch: The episodes of this process.
        """
        assert read is not None
        if not read.by_token:
            return spread_to_tokens(credit.advantages, batch.turn_ids)
        accelerator, mask = self._accelerator, batch.valid_mask
        advantages = token_gae(credit.columns[TARGETS], read.values, batch.turn_ids)
        if self._args.whiten_advantages:
            everyone, everywhere = gather_rows(accelerator, advantages, mask.long())
            own = own_rows(accelerator, mask.size(0))
            advantages = whiten(everyone, everywhere.bool())[own, : mask.size(1)]
        if self._args.advantage_clip_range is not None:
            advantages = advantages.clamp(-self._args.advantage_clip_range, self._args.advantage_clip_range)
        return advantages

    def add_columns(self, output: TrainBatch, read: CriticValues | None, credit: Credit, batch: TurnBatch) -> None:
        """Add what the value loss reads to a generation batch.

        Args:
            output: Gets the columns ``value_offsets``, ``old_values``, ``value_targets`` and ``value_weights``.
            read: Of :meth:`read`.
            credit: Of this process.
            batch: Its episodes.
        """
        assert read is not None
        weights, targets = self._weigh(output.tool_mask > 0, output.turn_columns.pop(TARGETS), batch, read.by_token)
        units = output.token_columns if read.by_token else output.turn_columns
        units |= {"old_values": read.values, TARGETS: targets, "value_weights": weights}
        every_token = read.by_token or self._args.turn_value_position == "mean"
        (output.token_columns if every_token else output.turn_columns)["value_offsets"] = read.offsets

    @staticmethod
    def _weigh(
        trained: torch.Tensor, targets: torch.Tensor, batch: TurnBatch, by_token: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights and targets of values (B, U), of targets (B, K) of turns and tokens (B, T) that are trained on."""
        lengths = turn_lengths(torch.where(trained, batch.turn_ids, -1), batch.turn_mask.size(1))
        weights = (lengths > 0).float()
        if not by_token:
            return weights, targets
        # A turn counts once at any length.
        lengths, weights, targets = (spread_to_tokens(x, batch.turn_ids) for x in (lengths, weights, targets))
        return weights / lengths.clamp(min=1), targets

    # -------------------------------------------------------------------------------------------------------- loss

    def forget_step(self) -> None:
        """Begin a new optimizer step, and drop an unfinished one."""
        self._step_ends = 0

    def count_turns_of_step(
        self, step: int, micro_batches: list[Batch], *, drawn: bool, every: int, length: int
    ) -> None:
        """Write the number of turns of an optimizer step into its micro-batches.

        It acts at the start of an optimizer step and of each generation batch in it.

        Args:
            step: Number of micro-steps before.
            micro_batches: Micro-batches of the generation batch.
            drawn: True if they are new.
            every: Micro-steps of a generation batch, over all its passes.
            length: Micro-steps of this optimizer step; the last of an epoch may be shorter.
        """
        begins = step >= self._step_ends
        if begins:
            self._step_ends = step + length
            self.learned &= drawn  # a further pass over the batch reads the critic anew
        if begins or drawn:
            generation_ends = (step // every + 1) * every
            micro_steps = range(step, min(self._step_ends, generation_ends))
            self.count_turns([micro_batches[i % len(micro_batches)] for i in micro_steps], length)

    def count_turns(self, micro_batches: list[Batch], in_step: int | None = None) -> None:
        """Write the number of turns of an optimizer step, over all ranks, into its micro-batches.

        Args:
            micro_batches: Micro-batches of the step that are drawn already.
            in_step: Number of micro-batches of the step; those of later generation batches count as the mean of these.
                Default: the given ones.
        """
        weights = [TrainBatch.from_trl(batch).column("value_weights").sum() for batch in micro_batches]
        turns = self._accelerator.reduce(sum(weights), reduction="sum")
        for batch in micro_batches:
            batch["turns_in_step"] = turns * (in_step or len(micro_batches)) / len(micro_batches)

    def reading(self, batch: TrainBatch, heard: Callable[[torch.Tensor], None]) -> ValueReading | None:
        """Return what the forward pass of the loss reads for the value loss, since DDP and DeepSpeed require a single call.

        None if the critic has learned already.

        Args:
            batch: The micro-batch.
            heard: Called with the values (B, U).
        """
        if self.learned:
            return None
        return ValueReading(batch.column("value_offsets") + _origin(batch), heard)

    def add_loss(
        self, policy_loss: torch.Tensor, values: torch.Tensor | None, batch: TrainBatch, step: int
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Add the value loss to the policy loss; return it, and the metrics with the last micro-batch of a step.

        Args:
            policy_loss: TRL's, divided by the accumulation steps.
            values: (B, U), of the same forward pass; None if the critic has learned, and only the number is missing.
            batch: The micro-batch.
            step: Number of optimizer steps before.
        """
        args = self._args
        targets, weights, old = (batch.column(name) for name in (TARGETS, "value_weights", "old_values"))
        values = old if values is None else self._pooled(values, batch.turn_ids, targets.size(1))
        errors, clipped = value_errors(values, old, targets, args.value_clip_range)
        # A padded entry has weight 0, but its value is arbitrary.
        total = torch.where(weights > 0, errors * weights, 0.0).sum()
        metrics = self._metrics(policy_loss.detach(), total.detach(), (clipped * weights).sum(), weights.sum())
        assert batch.turns_in_step is not None
        # DDP averages over ranks. Like TRL's loss, this one is divided by the accumulation steps.
        value_loss = total * self._accelerator.num_processes / batch.turns_in_step.clamp(min=1.0)
        # Multiplied by 0 instead of frozen: ZeRO-3 requires a gradient of every parameter in every step.
        policy_weight = 0.0 if step < args.critic_warmup_steps else 1.0
        return policy_weight * policy_loss + args.vf_coef * value_loss, metrics

    def remember(self) -> Callable[[], None]:
        """Return a function that drops what :meth:`add_loss` sums after this call."""
        return partial(setattr, self, "_totals", self._totals)

    def _metrics(
        self, policy: torch.Tensor, total: torch.Tensor, clipped: torch.Tensor, weight: torch.Tensor
    ) -> dict[str, float]:
        """Return the metrics of the optimizer step with its last micro-batch; those of the critic are means over turns."""
        accelerator = self._accelerator
        self._totals = self._totals + torch.stack([policy, total, clipped, weight])
        if not accelerator.sync_gradients:
            return {}
        policy, total, clipped, weight = accelerator.reduce(self._totals, reduction="sum")
        self._totals = torch.zeros_like(self._totals)
        metrics = {
            "policy/loss": (policy / accelerator.num_processes).item(),
            "value/loss": (total / weight.clamp(min=1.0)).item(),
        }
        if self._args.value_clip_range is not None:
            metrics["value/clip_ratio"] = (clipped / weight.clamp(min=1.0)).item()
        return metrics
