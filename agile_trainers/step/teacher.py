"""Trains on the divergence from a teacher: its forward passes, beside those of the loss, and its part of the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from accelerate import Accelerator
from transformers import TrainerState
from transformers.utils import logging
from trl.models.utils import disable_gradient_checkpointing

from agile_trainers.adapters.roles import running
from agile_trainers.config.rules import ITSELF, THE_REFERENCE, teachers_of
from agile_trainers.objectives.distillation import (
    FORWARD,
    SAMPLED,
    clipped_objective,
    fading_coefficient,
    teacher_credit,
)
from agile_trainers.packing.kept_head import Teaching
from agile_trainers.packing.packer import Packer
from agile_trainers.sampling.teacher_server import TeacherServer
from agile_trainers.step.credit import TurnMeans
from agile_trainers.step.log_probs import TokenLogProbs
from agile_trainers.step.loss import FirstPass, LossPass, denominator_of, divisor
from agile_trainers.train_batch import TrainBatch, read_inputs, with_hints
from agile_trainers.types import Trajectory

logger = logging.get_logger(__name__)

WEIGHTS = "teacher_weights"
"""Column (B, T) of a batch: the weight of each token's divergence."""
SERVED, KEPT = "teacher_served", "teacher_log_probs"
"""Columns (B, T): log-probs that servers gave, NaN elsewhere; and those that frozen teachers gave in a first update."""
NO_HINT = -1
"""Padding of ``TrainBatch.hint_ids``."""
PPO_EPSILON = 0.2
"""Clipping range of the ratio of a token (Schulman et al., 2017)."""


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


@dataclass(frozen=True)
class LoadedTeacher:
    """A teacher: a model, an adapter of the policy, a server, or else the policy itself."""

    model: Any = None
    """A frozen model, if it is one."""
    adapter: str | None = None
    """Name of the policy's adapter, if it is one."""
    server: TeacherServer | None = None


class Teacher:
    """The teachers of a run. They read the rows of each forward pass of the loss, right before the policy does.

    Log-probabilities of frozen ones are kept for further updates on a batch, and a server gives its own for a whole batch.

    Args:
        args: A ``MultiTurnConfig``.
        accelerator: The trainer's.
        log_probs: TRL's ``_get_per_token_logps_and_entropies``.
        packer: Runs the forward passes.
        loaded: Those that ``args.teacher`` names, in this order.
        state: Returns the state of the run.
        render: Tokenizes a hint, which stands before an episode.
        own_loss: True if the algorithm brings its own loss.
    """

    def __init__(
        self,
        args: Any,
        accelerator: Accelerator,
        log_probs: TokenLogProbs,
        packer: Packer,
        loaded: Sequence[LoadedTeacher],
        *,
        state: Callable[[], TrainerState],
        render: Callable[[str], list[int]],
        own_loss: bool,
    ) -> None:
        self._args, self._accelerator, self._log_probs, self._packer = args, accelerator, log_probs, packer
        self.loaded, self._state, self._render = list(loaded), state, render
        names = teachers_of(args)
        self._frozen = not {ITSELF, THE_REFERENCE} & set(names)
        given = args.teacher if isinstance(args.teacher, dict) else {}
        self._of = {environment: names.index(name) for environment, name in given.items()}
        self._own_loss = own_loss
        self._denominator = denominator_of(args, own_loss=own_loss)
        self._looked = False
        self.means = TurnMeans("teacher_kl", "teacher/kl")
        """Divergence of each turn index, over the micro-batches of an optimizer step."""

    @property
    def _sampled(self) -> bool:
        return self._args.teacher_gradient in SAMPLED

    def add_columns(self, output: TrainBatch, trajectories: Sequence[Trajectory]) -> None:
        """Add what the teachers read to a generation batch: hints, the weight of each token, and what servers answer.

        A turn has ``teacher_turn_decay`` to the power of its index, or 0 without a teacher. The weights are scaled so that
        the teacher's part is divided by their sum where the reward's is divided by the number of tokens, of the batch or of
        the episode.

        Args:
            output: The batch of this process.
            trajectories: Its episodes.

        Raises:
            ConnectionError: If a server does not answer.
        """
        if self._args.teacher_hint is not None:
            hints = [hint_of(trajectory, self._args.teacher_hint) for trajectory in trajectories]
            if not self._looked and not any(hint is not None for hint in hints):
                logger.warning(
                    "teacher_hint=%r: no episode of the first batch has such an entry in its info, and without one the "
                    "teacher reads what the policy reads. Check the name.",
                    self._args.teacher_hint,
                )
            self._looked = True
            ids = [[] if hint is None else self._render(hint) for hint in hints]
            shape, device = (len(ids), max(map(len, ids))), output.prompt_ids.device
            output.hint_ids = torch.full(shape, NO_HINT, device=device)
            for row, own in enumerate(ids):
                output.hint_ids[row, : len(own)] = torch.tensor(own, dtype=torch.long, device=device)
        weights = torch.pow(float(self._args.teacher_turn_decay), output.turn_ids.clamp(min=0)) * output.counted
        if self._of:
            places = [self._of.get(trajectory.environment_name or "", -1) for trajectory in trajectories]
            output.teachers = torch.tensor(places, device=weights.device)
            weights = weights * (output.teachers >= 0)[:, None]
        if self.coefficient:
            self._ask_servers(output)
        if self._denominator == "episodes":
            weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=1e-9)
            if output.teachers is not None:
                taught = self._accelerator.reduce((output.teachers >= 0).float().mean(), reduction="mean")
                weights = weights / taught.clamp(min=1e-9)
        elif self._denominator == "tokens":
            total = self._accelerator.reduce(weights.sum(), reduction="sum")
            weights = weights * output.num_items_in_batch / total.clamp(min=1e-9)
        output.token_columns[WEIGHTS] = weights

    def _ask_servers(self, output: TrainBatch) -> None:
        for index, teacher in enumerate(self.loaded):
            if teacher.server is None:
                continue
            if SERVED not in output.token_columns:
                output.token_columns[SERVED] = torch.full_like(output.advantages, torch.nan, dtype=torch.float32)
            rows = _rows_of(output, index)
            if len(rows):
                output.token_columns[SERVED][rows] = teacher.server.log_probs(output.rows(rows))

    @contextmanager
    def _playing(self, model: Any, teacher: LoadedTeacher) -> Iterator[Any]:
        """Make ``model``, the wrapped policy, compute as a teacher inside the block; yields what computes."""
        policy = self._accelerator.unwrap_model(model)
        with running(policy, teacher.adapter) if teacher.adapter else nullcontext():
            yield model if teacher.model is None else teacher.model

    def first_pass(self, whole: TrainBatch) -> FirstPass | None:
        """Return what collects the log-probs of a micro-batch's first update; None where they are known, or will change."""
        keeps = self._frozen and self._sampled and self.coefficient
        return FirstPass(whole) if keeps and KEPT not in whole.token_columns else None

    def read(self, model: Any, batch: TrainBatch) -> torch.Tensor | Teaching | None:
        """Read the rows of a forward pass, without gradient.

        Args:
            model: The policy, wrapped for distributed training.
            batch: The rows.

        Returns:
            The log-probabilities (B, T) of the tokens that enter the loss, NaN in episodes without a teacher; or what their
            whole distributions are made of; None once the coefficient is 0.
        """
        if not self.coefficient:
            return None
        if KEPT in batch.token_columns:
            return batch.column(KEPT)
        policy = self._accelerator.unwrap_model(model)
        with torch.no_grad(), disable_gradient_checkpointing(policy, self._args.gradient_checkpointing_kwargs):
            return self._log_probs_of(model, batch) if self._sampled else self._distributions(model, batch)

    def _log_probs_of(self, model: Any, batch: TrainBatch) -> torch.Tensor:
        found = batch.token_columns.get(SERVED)
        if found is None:
            found = torch.full_like(batch.advantages, torch.nan, dtype=torch.float32)
        every = torch.arange(len(found), device=found.device)
        for index, teacher in enumerate(self.loaded):
            own = _rows_of(batch, index)
            # Processes that share the policy's forward passes run equally many.
            rows = own if self._accelerator.num_processes == 1 else every
            if teacher.server is not None or not len(rows):
                continue
            part = batch if len(rows) == len(every) else batch.rows(rows)
            fields = with_hints(part.to_trl())
            with self._playing(model, teacher) as playing:
                read, *_ = self._log_probs(
                    playing, **read_inputs(fields), logits_to_keep=found.size(1), scored=part.counted, part=fields
                )
            found = found.to(read.dtype).index_copy(0, own, read if len(rows) == len(own) else read[own])
        return found

    def _distributions(self, model: Any, batch: TrainBatch) -> Teaching:
        (teacher,), forward = self.loaded, self._args.teacher_gradient == FORWARD
        with self._playing(model, teacher) as playing, self._accelerator.autocast():
            read = self._packer.teaching(playing, with_hints(batch.to_trl()), batch.counted, forward=forward)

        @torch.no_grad()
        def logits(hidden: torch.Tensor) -> torch.Tensor:
            with self._playing(model, teacher):
                return read.logits(hidden)

        return replace(read, logits=logits)

    @property
    def coefficient(self) -> float:
        """Weight of the teacher's part in the update that comes next."""
        state = self._state()
        return fading_coefficient(self._args.teacher_coef, self._args.teacher_steps, state.global_step, state.max_steps)

    def add(
        self, loss: torch.Tensor, handed: LossPass, whole: TrainBatch, accumulation: int
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Add the teacher's part to the loss of a pass.

        Args:
            loss: Of the reward, divided by the accumulation steps.
            handed: The pass.
            whole: The micro-batch that its rows are from.
            accumulation: Micro-batches of the optimizer step.

        Returns:
            The loss, and the metrics of the pass.
        """
        coefficient = self.coefficient
        metrics = {"teacher/coef": coefficient}
        if not coefficient:
            return loss, metrics
        args, batch, mask = self._args, handed.batch, handed.batch.counted
        if batch.teachers is not None:
            mask = mask & (batch.teachers >= 0)[:, None]
        weights, policy = batch.column(WEIGHTS), handed.token_log_probs
        assert policy is not None
        if self._sampled:
            teacher = cast(torch.Tensor, handed.teacher)
            old = policy.detach() if batch.old_per_token_logps is None else batch.old_per_token_logps
            credit = teacher_credit(old, teacher, mask, weights, args.teacher_gradient)
            if batch.importance_sampling_ratio is not None:
                credit = credit * batch.importance_sampling_ratio
            values = -clipped_objective(policy - old, credit, *_bounds(args, self._own_loss))
            measured = policy.detach() - teacher
        else:
            assert handed.divergence is not None
            measured, values = handed.divergence.detach(), weights * handed.divergence
        self.means.add(measured, batch.turn_ids, mask)
        total = torch.where(mask, values, 0.0).sum()
        by = divisor(self._denominator, whole, args, self._accelerator, accumulation)
        return loss + coefficient * total / by, metrics


def _bounds(args: Any, own_loss: bool) -> tuple[float, float]:
    """Return how far the ratio of a token may move: PPO's bounds, where the algorithm's are not for ratios of tokens."""
    if own_loss or args.importance_sampling_level != "token" or args.loss_type == "cispo":
        return PPO_EPSILON, PPO_EPSILON
    return args.epsilon, args.epsilon if args.epsilon_high is None else args.epsilon_high


def _rows_of(batch: TrainBatch, teacher: int) -> torch.Tensor:
    """Return the rows (R,) that are read by one of several teachers; all if there is one."""
    if batch.teachers is None:
        return torch.arange(len(batch.prompt_ids), device=batch.prompt_ids.device)
    return (batch.teachers == teacher).nonzero()[:, 0]
