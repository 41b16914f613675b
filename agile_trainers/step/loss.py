"""Hands one forward pass over to TRL's loss or to the algorithm's own, whose values it sums and divides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from accelerate import Accelerator

from agile_trainers.objectives.demonstrations import demonstration_credit, demonstration_loss
from agile_trainers.objectives.ratios import pool_log_probs
from agile_trainers.packing.forward import Taught
from agile_trainers.packing.kept_head import Teaching
from agile_trainers.step.credit import TurnMeans
from agile_trainers.step.token_batches import TokenBatch
from agile_trainers.train_batch import DEMONSTRATED, Batch, TrainBatch
from agile_trainers.types import TurnBatch


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
    token_log_probs: torch.Tensor | None = None
    """(B, T), the same before ratios are pooled, with gradient."""
    scored_log_probs: torch.Tensor | None = None
    """(B, T), the same of an expert's tokens too."""
    teacher: torch.Tensor | Teaching | None = None
    """The teacher's side of the rows; see :meth:`~agile_trainers.step.teacher.Teacher.read`."""
    divergence: torch.Tensor | None = None
    """(B, T), of the policy's distributions from the teacher's, with gradient."""
    log_ratio: torch.Tensor | None = None
    """(B, T), of the policy over the one that the update started from, pooled over turns where the loss's is."""

    @property
    def taught(self) -> Taught | None:
        """The teacher whose distributions the forward pass is compared with, if any."""
        if not isinstance(self.teacher, Teaching):
            return None
        length = self.batch.completion_ids.size(1)
        return Taught(self.teacher, lambda values: setattr(self, "divergence", values[:, -length:]))

    def take(self, log_probs: torch.Tensor, pooling: Literal["mean", "sum"] | None) -> torch.Tensor:
        """Take the log-probabilities of the forward pass.

        Args:
            log_probs: (B, T), of the tokens that enter the loss.
            pooling: How ratios are pooled over a turn, ``"mean"`` or ``"sum"``; None for one ratio a token or episode.

        Returns:
            The log-probabilities (B, T) that TRL's loss reads: their difference to the old ones is the pooled log-ratio.
        """
        batch, self.scored_log_probs = self.batch, log_probs
        if DEMONSTRATED in batch.token_columns:
            # Their own loss is added later; other terms may not see how unlikely they are.
            log_probs = torch.where(batch.counted, log_probs, 0.0)
        if batch.old_per_token_logps is not None:
            # The ratio of a token that is not scored is 1.
            log_probs = torch.where(batch.counted, log_probs, batch.old_per_token_logps)
        old = log_probs.detach() if batch.old_per_token_logps is None else batch.old_per_token_logps
        self.token_log_probs, self.log_probs, self.log_ratio = log_probs, log_probs.detach(), log_probs.detach() - old
        if pooling is None:
            return log_probs
        num_turns = int(batch.turn_ids.max()) + 1
        pooled = pool_log_probs(log_probs, old, batch.turn_ids, max(num_turns, 1), pooling)
        self.log_ratio = pooled.detach() - old
        if batch.ref_per_token_logps is not None:
            # The KL term must still see the policy's own distance to the reference.
            self.inputs["ref_per_token_logps"] = batch.ref_per_token_logps + (pooled - log_probs)
        return pooled


class FirstPass:
    """Collects the log-probs of a micro-batch from the forward passes of its first update: those of the old policy.

    Args:
        whole: The micro-batch.
    """

    def __init__(self, whole: TrainBatch) -> None:
        self._whole = whole
        self.log_probs = torch.zeros_like(whole.completion_ids, dtype=torch.float32)
        """(B, T), at least float32; 0 outside of the tokens that entered the loss."""

    def add(self, batch: TrainBatch, log_probs: torch.Tensor) -> None:
        """Take the log-probs (R, S) of a forward pass of some rows, cut to their own columns."""
        assert batch.episodes is not None and self._whole.episodes is not None
        rows = (batch.episodes[:, None] == self._whole.episodes).int().argmax(dim=1)
        log_probs = log_probs.to(torch.promote_types(log_probs.dtype, self.log_probs.dtype))
        self.log_probs, length = self.log_probs.to(log_probs.dtype), log_probs.size(1)
        # An episode of several paths may be read in several passes.
        self.log_probs[rows, :length] = torch.where(batch.counted, log_probs, self.log_probs[rows, :length])


Denominator = Literal["tokens", "episodes", "constant"]
_DENOMINATORS: dict[str, Denominator] = {"grpo": "episodes", "sapo": "episodes", "dr_grpo": "constant"}


def denominator_of(args: Any, *, own_loss: bool) -> Denominator:
    """Return what is divided by in a part that is added to the loss, as TRL's does by its type, or one's own by tokens."""
    return "tokens" if own_loss else _DENOMINATORS.get(args.loss_type, "tokens")


@dataclass
class LossInputs:
    """The input of an algorithm's own loss: the episodes of one forward pass.

    Where ``top_k``, ``top_p``, ``min_p`` or ``min_new_tokens`` removed tokens, log-probabilities and entropies are those of
    policies renormalised over the tokens that were kept.
    """

    log_probs: torch.Tensor
    """(B, T) float32, log-probabilities of the tokens under the policy, with gradient."""
    old_log_probs: torch.Tensor
    """(B, T), under the policy that the update started from; without gradient."""
    reference_log_probs: torch.Tensor | None
    """(B, T), under the reference; None unless ``beta`` is set with ``kl_placement="loss"``."""
    advantages: torch.Tensor
    """(B, T) float32."""
    mask: torch.Tensor
    """(B, T) bool, the tokens that enter the loss. What the loss computes of the others is left out."""
    turn_ids: torch.Tensor
    """(B, T) int64, the turn of each token; -1 outside of actions."""
    weights: torch.Tensor
    """(B, T) float32, the correction of the training-inference mismatch or of drift; 1 without one."""
    entropies: torch.Tensor
    """(B, T) float32, entropy in nats of the policy before each token, with gradient."""

    @classmethod
    def of(cls, batch: TrainBatch, log_probs: torch.Tensor, entropies: torch.Tensor) -> LossInputs:
        """Make the input from a batch and what its forward pass computed, (B, T) each."""
        old, weights = batch.old_per_token_logps, batch.importance_sampling_ratio
        return cls(
            log_probs=log_probs,
            old_log_probs=log_probs.detach() if old is None else old,
            reference_log_probs=batch.ref_per_token_logps,
            advantages=batch.advantages,
            mask=batch.counted,
            turn_ids=batch.turn_ids,
            weights=torch.ones_like(batch.advantages) if weights is None else weights.expand_as(log_probs),
            entropies=entropies,
        )


@dataclass
class LossOutput:
    """The output of an algorithm's own loss: what is summed, and by what the sum is divided.

    The loss is no scalar, since the rows of a micro-batch may be in several forward passes: these are sums, and only the
    trainer knows what to divide them by.
    """

    numerator: torch.Tensor
    """(B, T), a value for each token, or (B,), a value for each episode."""
    denominator: Denominator = "tokens"
    """``"tokens"``: all tokens of the update, over all processes (TRL's ``dapo``). ``"episodes"``: the number of episodes,
    values of tokens being averaged over each episode first (``grpo``). ``"constant"``: the number of episodes times
    ``max_completion_length`` (``dr_grpo``)."""
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    """Values to log by name, (B, T) or (B,) each, averaged over the tokens or the episodes of a micro-batch, of all
    processes, that enter the loss. The log has the mean of these averages, as of TRL's metrics: micro-batches count alike,
    however many tokens they have. The names must be the same on every call."""

    def total(self, mask: torch.Tensor) -> torch.Tensor:
        """Sum the numerator over what enters the loss.

        Args:
            mask: (B, T) bool.
        """
        if self.numerator.ndim == 2 and self.denominator == "episodes":
            return (_summed(self.numerator, mask) / mask.sum(dim=1).clamp(min=1)).sum()
        return _summed(self.numerator, mask).sum()


def checked_output(output: Any, inputs: LossInputs, name: str) -> LossOutput:
    """Check the form of what an algorithm's own loss returned.

    Args:
        output: What it returned.
        inputs: What it got.
        name: Its class.

    Raises:
        TypeError: If it is no :class:`LossOutput`, or the numerator or a metric is no tensor.
        ValueError: For another shape, an unknown denominator, or a numerator without gradient.
    """
    if not isinstance(output, LossOutput):
        raise TypeError(
            f"{name}.loss must return a LossOutput, got a {type(output).__name__}. Return the values of tokens or episodes "
            "as its numerator; the trainer sums and divides them."
        )
    shape = tuple(inputs.mask.shape)
    for part, value in {"numerator": output.numerator, **output.metrics}.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{part} of a LossOutput must be a tensor (B, T) or (B,), got a {type(value).__name__}.")
        if tuple(value.shape) not in (shape, shape[:1]):
            raise ValueError(
                f"{part} of a LossOutput has the shape {tuple(value.shape)}; expected {shape}, a value for each token, or "
                f"{shape[:1]}, one for each episode. Do not sum or average over episodes: the trainer does."
            )
    if output.denominator not in get_args(Denominator):
        raise ValueError(
            f"denominator must be one of {', '.join(map(repr, get_args(Denominator)))}, got {output.denominator!r}."
        )
    if torch.is_grad_enabled() and not output.numerator.requires_grad:
        raise ValueError(
            "numerator of a LossOutput has no gradient. Compute it from log_probs or entropies, without detach() or "
            "no_grad()."
        )
    return output


def _summed(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum values of tokens (B, T) over each episode; keep those of episodes (B,) with a token in the loss."""
    if values.ndim == 2:
        return torch.where(mask, values, 0.0).sum(dim=1)
    return torch.where(mask.any(dim=1), values, 0.0)


def divisor(
    denominator: Denominator, whole: TrainBatch, args: Any, accelerator: Accelerator, accumulation: int
) -> torch.Tensor | float:
    """Return what the sum over a micro-batch is divided by; it is the same for each of its forward passes.

    The numbers are those of TRL's ``_compute_loss``: the gradient of an optimizer step is the mean over processes and the
    sum over micro-batches.

    Args:
        denominator: See :class:`LossOutput`.
        whole: The micro-batch of this process.
        args: A ``MultiTurnConfig`` for episodes.
        accelerator: The trainer's.
        accumulation: Micro-batches of the optimizer step.
    """
    if denominator == "tokens":
        # The count is of the generation batch, of which an optimizer step may be a part.
        per_process = whole.num_items_in_batch.clamp(min=1.0) / accelerator.num_processes
        return per_process * accumulation / args.steps_per_generation
    length = args.max_completion_length if denominator == "constant" else 1
    return float(len(whole.prompt_ids) * length * accumulation)


def averages(
    values: dict[str, torch.Tensor], mask: torch.Tensor, accelerator: Accelerator
) -> dict[str, tuple[float, float]]:
    """Average values over what enters the loss on all processes.

    Args:
        values: (B, T) or (B,) each, by name.
        mask: (B, T) bool.
        accelerator: The trainer's.

    Returns:
        The mean of each, and the number of tokens or episodes that it is over.
    """
    counts = {2: mask.sum(), 1: mask.any(dim=1).sum()}
    sums = [torch.stack([_summed(value.detach().float(), mask).sum(), counts[value.ndim]]) for value in values.values()]
    reduced = accelerator.reduce(torch.stack(sums), reduction="sum").tolist()
    return {name: (total / max(count, 1.0), count) for name, (total, count) in zip(values, reduced, strict=True)}


def own_loss(
    loss: Callable[[LossInputs], LossOutput],
    name: str,
    part: TokenBatch,
    whole: TrainBatch,
    log_probs: torch.Tensor,
    entropies: torch.Tensor,
    args: Any,
    accelerator: Accelerator,
    accumulation: int,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Compute the part of a micro-batch's loss that is due to one pass, by the algorithm's own loss.

    Args:
        loss: The algorithm's.
        name: Its class.
        part: The rows of the pass; gets the weights of the metrics.
        whole: The micro-batch of this process.
        log_probs: (B, T), of the forward pass.
        entropies: (B, T), of the forward pass.
        args: A ``MultiTurnConfig`` for episodes.
        accelerator: The trainer's.
        accumulation: Micro-batches of the optimizer step.

    Returns:
        The loss, and the metrics over all processes.
    """
    inputs = LossInputs.of(part.batch, log_probs, entropies)
    output = checked_output(loss(inputs), inputs, name)
    found = averages({"entropy": entropies} | output.metrics, inputs.mask, accelerator)
    part.weights |= {metric: weight for metric, (_, weight) in found.items()}
    total = output.total(inputs.mask) / divisor(output.denominator, whole, args, accelerator, accumulation)
    return total, {metric: mean for metric, (mean, _) in found.items()}


class DemonstrationLoss:
    """The part of the loss of an expert's episodes; see :mod:`agile_trainers.objectives.demonstrations`.

    Args:
        args: A ``MultiTurnConfig`` with ``demonstrations``.
        accelerator: The trainer's.
        own_loss: True if the algorithm brings its own loss.
    """

    def __init__(self, args: Any, accelerator: Accelerator, *, own_loss: bool) -> None:
        self._args, self._accelerator = args, accelerator
        self._denominator = denominator_of(args, own_loss=own_loss)
        self.means = TurnMeans("demonstration_log_prob", "demonstrations/log_prob")
        """The policy's of the tokens with credit, over the micro-batches of an optimizer step."""

    def add_column(self, output: TrainBatch, batch: TurnBatch, advantages: torch.Tensor) -> None:
        """Add the credit of an expert's tokens to a generation batch.

        Args:
            output: The batch of the loss.
            batch: The episodes of this process.
            advantages: (B, T), of all tokens.
        """
        credit = torch.zeros_like(advantages)
        if batch.demonstrations is not None:
            left_out = batch.failed | (batch.cut & bool(self._args.mask_truncated_completions))
            mask = batch.action_mask & (batch.demonstrations & ~left_out)[:, None]
            credit = demonstration_credit(advantages, self._args.demonstration_loss) * mask
            if self._denominator == "episodes":
                credit = credit / mask.sum(dim=1, keepdim=True).clamp(min=1)
        output.token_columns[DEMONSTRATED] = self._args.demonstration_coef * credit

    def add(
        self, loss: torch.Tensor, handed: LossPass, whole: TrainBatch, accumulation: int
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Add this part to the loss of a pass, and return metrics, of which there are none.

        Args:
            loss: Of the policy's own episodes, divided by the accumulation steps.
            handed: The pass.
            whole: The micro-batch that its rows are from.
            accumulation: Micro-batches of the optimizer step.
        """
        batch, log_probs = handed.batch, handed.scored_log_probs
        assert log_probs is not None
        credit = batch.column(DEMONSTRATED)
        mask = credit > 0
        self.means.add(log_probs, batch.turn_ids, mask)
        kept = torch.where(mask, log_probs, 0.0)
        total = demonstration_loss(kept, batch.sampling_per_token_logps, credit, self._args.demonstration_loss).sum()
        return loss + total / divisor(self._denominator, whole, self._args, self._accelerator, accumulation), {}
