"""Trains on the divergence from a teacher: its forward passes, beside those of the loss, and its part of the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from accelerate import Accelerator
from transformers import TrainerState
from trl.models.utils import disable_gradient_checkpointing

from agile_trainers.adapters.roles import running
from agile_trainers.objectives.distillation import (
    FORWARD,
    SAMPLED,
    clipped_objective,
    fading_coefficient,
    teacher_credit,
)
from agile_trainers.packing.kept_head import Teaching
from agile_trainers.packing.packer import Packer, kept_of
from agile_trainers.step.credit import TurnMeans
from agile_trainers.step.log_probs import TokenLogProbs
from agile_trainers.step.loss import LossPass, denominator_of, divisor
from agile_trainers.train_batch import TrainBatch, paths_of, read_inputs, with_hints
from agile_trainers.types import Trajectory

WEIGHTS = "teacher_weights"
"""Column (B, T) of a batch: the weight of each token's divergence."""
NO_HINT = -1
"""Padding of ``TrainBatch.hint_ids``."""


def hint_of(trajectory: Trajectory, name: str) -> str | None:
    """Return the hint of an episode: an entry of the last ``info`` that has it, that of ``reset`` at last; None without.

    Args:
        trajectory: The episode.
        name: Name of the entry.

    Raises:
        TypeError: If it is no text.
    """
    infos = [trajectory.reset_info, *(turn.info for turn in trajectory.turns)]
    hint = next((info[name] for info in reversed(infos) if info.get(name) is not None), None)
    if hint is not None and not isinstance(hint, str):
        raise TypeError(
            f"teacher_hint={name!r}: the environment's info[{name!r}] must be a text, got a {type(hint).__name__}."
        )
    return hint


class Teacher:
    """The teacher of a run. It reads the rows of each forward pass of the loss, right before the policy does.

    Args:
        args: A ``MultiTurnConfig``.
        accelerator: The trainer's.
        log_probs: TRL's ``_get_per_token_logps_and_entropies``.
        packer: Runs the forward passes.
        model: A frozen model; None where the teacher is an adapter of the policy, or the policy itself.
        adapter: Name of the adapter that it is, if it is one.
        render: Tokenizes a hint, which stands before an episode.
        own_loss: True if the algorithm brings its own loss.
    """

    def __init__(
        self,
        args: Any,
        accelerator: Accelerator,
        log_probs: TokenLogProbs,
        packer: Packer,
        model: Any,
        *,
        adapter: str | None,
        render: Callable[[str], list[int]],
        own_loss: bool,
    ) -> None:
        self._args, self._accelerator, self._log_probs, self._packer = args, accelerator, log_probs, packer
        self.model, self._adapter, self._render = model, adapter, render
        self._denominator = denominator_of(args, own_loss=own_loss)
        self.divergences = TurnMeans("teacher_kl", "teacher/kl")
        """Divergence of each turn index, over the micro-batches of an optimizer step."""

    @property
    def _sampled(self) -> bool:
        return self._args.teacher_gradient in SAMPLED

    def add_columns(self, output: TrainBatch, trajectories: Sequence[Trajectory]) -> None:
        """Add what the teacher reads to a generation batch: hints, and the weight of each token.

        A turn has ``teacher_turn_decay`` to the power of its index. The weights are scaled so that the teacher's part is
        divided by their sum where the reward's is divided by the number of tokens, of the batch or of the episode.

        Args:
            output: The batch of this process.
            trajectories: Its episodes.
        """
        if self._args.teacher_hint is not None:
            hints = [hint_of(trajectory, self._args.teacher_hint) for trajectory in trajectories]
            ids = [[] if hint is None else self._render(hint) for hint in hints]
            shape, device = (len(ids), max(map(len, ids))), output.prompt_ids.device
            output.hint_ids = torch.full(shape, NO_HINT, device=device)
            for row, own in enumerate(ids):
                output.hint_ids[row, : len(own)] = torch.tensor(own, dtype=torch.long, device=device)
        weights = torch.pow(float(self._args.teacher_turn_decay), output.turn_ids.clamp(min=0)) * output.counted
        if self._denominator == "episodes":
            weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=1e-9)
        elif self._denominator == "tokens":
            total = self._accelerator.reduce(weights.sum(), reduction="sum")
            weights = weights * output.num_items_in_batch / total.clamp(min=1e-9)
        output.token_columns[WEIGHTS] = weights

    @contextmanager
    def _playing(self, model: Any) -> Iterator[Any]:
        """Make ``model``, the wrapped policy, compute as the teacher inside the block; yields what computes."""
        policy = self._accelerator.unwrap_model(model)
        with running(policy, self._adapter) if self._adapter else nullcontext():
            yield model if self.model is None else self.model

    def read(self, model: Any, batch: TrainBatch) -> torch.Tensor | Teaching:
        """Read the rows of a forward pass, without gradient.

        Args:
            model: The policy, wrapped for distributed training.
            batch: The rows.

        Returns:
            The log-probabilities (B, T) of the tokens that enter the loss; or what their whole distributions are made of.
        """
        part, scored, policy = with_hints(batch.to_trl()), batch.counted, self._accelerator.unwrap_model(model)
        plain = disable_gradient_checkpointing(policy, self._args.gradient_checkpointing_kwargs)
        with torch.no_grad(), plain, self._playing(model) as teacher:
            if self._sampled:
                length, paths, kept = batch.completion_ids.size(1), paths_of(part), kept_of(part)
                inputs: dict[str, Any] = {"logits_to_keep": length, "scored": scored, "paths": paths, "kept": kept}
                return self._log_probs(teacher, **read_inputs(part), **inputs)[0]
            with self._accelerator.autocast():
                read = self._packer.teaching(teacher, part, scored, forward=self._args.teacher_gradient == FORWARD)

        @torch.no_grad()
        def logits(hidden: torch.Tensor) -> torch.Tensor:
            with self._playing(model):
                return read.logits(hidden)

        return replace(read, logits=logits)

    def coefficient(self, state: TrainerState) -> float:
        """Return the weight of the teacher's part in the update that comes next."""
        return fading_coefficient(self._args.teacher_coef, self._args.teacher_steps, state.global_step, state.max_steps)

    def add_loss(
        self, loss: torch.Tensor, handed: LossPass, whole: TrainBatch, coefficient: float, accumulation: int
    ) -> torch.Tensor:
        """Add the teacher's part to the loss of a pass.

        Args:
            loss: Of the reward, divided by the accumulation steps.
            handed: The pass.
            whole: The micro-batch that its rows are from.
            coefficient: Weight of the teacher's part.
            accumulation: Micro-batches of the optimizer step.

        Returns:
            The loss.
        """
        args, batch, mask = self._args, handed.batch, handed.batch.counted
        weights, policy = batch.column(WEIGHTS), handed.token_log_probs
        assert policy is not None
        if self._sampled:
            teacher = cast(torch.Tensor, handed.teacher)
            old = policy.detach() if batch.old_per_token_logps is None else batch.old_per_token_logps
            credit = teacher_credit(old, teacher, mask, weights, args.teacher_gradient)
            if batch.importance_sampling_ratio is not None:
                credit = credit * batch.importance_sampling_ratio
            high = args.epsilon if args.epsilon_high is None else args.epsilon_high
            values = -clipped_objective(policy - old, credit, args.epsilon, high)
            measured = policy.detach() - teacher
        else:
            assert handed.divergence is not None
            measured, values = handed.divergence.detach(), weights * handed.divergence
        self.divergences.add(measured, batch.turn_ids, mask)
        total = torch.where(mask, values, 0.0).sum()
        processes = self._accelerator.num_processes
        by = divisor(self._denominator, whole, args, accumulation=accumulation, processes=processes)
        return loss + coefficient * total / by
