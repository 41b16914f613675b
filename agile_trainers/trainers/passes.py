"""Deals the rows of a micro-batch to forward passes by tokens, and combines their losses and metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import nan
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather
from peft import PeftModel
from transformers.utils import logging
from trl import GRPOTrainer

from agile_trainers.train_batch import Batch, TrainBatch

logger = logging.get_logger(__name__)

CPU_TOKENS = 2000
"""Tokens of a forward pass on CPU: longer ones leave the cache, and the memory that they take is fresh each time."""
_PACKED_GAIN = 0.9
"""Part of the tokens of padded passes that packed ones may have, so that the rows that share a prefix stay together."""
_GPU_SHARE = 0.6
"""Part of the free memory that activations may take."""


@dataclass
class Pass:
    """The rows of one forward and backward pass."""

    batch: TrainBatch
    share: float
    """Factor from TRL's loss of these rows to their part of the micro-batch's loss."""
    entropy_share: float
    """The same for the entropy bonus, a mean over tokens."""
    tokens: float
    """Tokens that are trained on, over all processes: the weight in metrics."""


LossOf = Callable[[Pass], torch.Tensor]
_T = TypeVar("_T")
_Gradients = list[tuple[torch.nn.Parameter, torch.Tensor | None]]


def deal(lengths: torch.Tensor, budget: int, shared: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Deal ordered rows to passes of neighbours.

    A pass of padded rows costs its rows times the longest; a packed one its distinct tokens. A row whose start is longer in
    common with its neighbour than the rest of it joins the neighbour's pass in any case, since a new pass would read that
    start again.

    Args:
        lengths: (B,) int64, in the order of the passes; ascending without ``shared``.
        budget: Tokens of a pass. A longer row has a pass of its own.
        shared: (B,) int64, tokens in common with the row before, if rows are packed.

    Returns:
        Positions in the order, pass by pass.
    """
    passes: list[list[int]] = []
    used = 0
    for place, length in enumerate(lengths.tolist()):
        common = 0 if shared is None or not passes else int(shared[place])
        fits = bool(passes) and (
            (len(passes[-1]) + 1) * length <= budget
            if shared is None
            else used + length - common <= budget or common > length - common
        )
        if fits:
            passes[-1].append(place)
            used += length - common
        else:
            passes.append([place])
            used = length
    return [torch.tensor(rows) for rows in passes]


def in_number(passes: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    """Split the largest passes until there are ``number``, as long as one has two rows; then add empty ones."""
    passes = list(passes)
    while len(passes) < number:
        largest = max(range(len(passes)), key=lambda i: len(passes[i]))
        rows = passes[largest]
        if len(rows) < 2:
            return passes + [rows[:0]] * (number - len(passes))
        half = len(rows) // 2
        passes[largest : largest + 1] = [rows[:half], rows[half:]]
    return passes


class Passes:
    """Decides the tokens of a forward pass once, and deals the rows of micro-batches to passes.

    Args:
        trainer: The trainer, otherwise set up.

    Raises:
        ValueError: If the option is set with a router's auxiliary loss.
    """

    def __init__(self, trainer: GRPOTrainer):
        self._trainer = trainer
        self._args: Any = trainer.args
        self.budget: int | None = self._args.max_tokens_per_micro_batch
        """Tokens of a pass, equal on all processes; None until the first micro-batch decides it."""
        if self.budget is not None and trainer.aux_loss_enabled:
            raise ValueError(
                f"max_tokens_per_micro_batch={self.budget} cannot be combined with the router's auxiliary loss, an average "
                "over the micro-batch. Set router_aux_loss_coef=0.0 in model_init_kwargs, or leave it unset."
            )
        # Terms that are no sum over rows or tokens need the whole micro-batch at once.
        self._whole = (
            trainer.aux_loss_enabled
            or self._args.use_adaptive_entropy
            or self._args.top_entropy_quantile < 1.0
            or self.steps_in_backward
        )

    @property
    def steps_in_backward(self) -> bool:
        """True if the optimizer moves weights in the backward pass, so that no gradient can be accumulated."""
        return str(self._args.optim).split(".")[-1].lower() in ("lomo", "adalomo")

    def restore(self, budget: int | None) -> None:
        """Take the budget of a checkpoint, unless the option says another."""
        if self._args.max_tokens_per_micro_batch is None:
            self.budget = budget

    def of(self, batch: TrainBatch, whole: TrainBatch) -> list[Pass]:
        """Deal the rows of a micro-batch; every process gets equally many passes.

        Args:
            batch: The rows to read.
            whole: The micro-batch that they are from, whose averages the loss takes.
        """
        dealt = [torch.arange(len(batch.prompt_ids))] if self._whole else self.split(batch.to_trl())
        if len(dealt) == 1:
            parts = [batch]
        else:
            parts = [batch.rows(rows) if len(rows) else batch.rows(torch.tensor([0])).silenced() for rows in dealt]
        tokens = torch.stack([part.counted.sum() for part in parts])
        if self._trainer.accelerator.num_processes > 1:
            tokens = self._trainer.accelerator.reduce(tokens, reduction="sum")
        multiple, loss_type = self._trainer.pad_to_multiple_of, self._trainer.loss_type
        return [
            Pass(
                part.trimmed(multiple),
                share=part.share_of(whole, loss_type) if len(rows) else 0.0,
                entropy_share=part.share_of(whole, "bnpo") if len(rows) else 0.0,
                tokens=float(count),
            )
            for part, rows, count in zip(parts, dealt, tokens.tolist(), strict=True)
        ]

    def split(self, part: Batch) -> list[torch.Tensor]:
        """Deal rows to passes; every process gets equally many, of which some may be empty.

        Args:
            part: See :func:`~agile_trainers.train_batch.read_inputs`.

        Returns:
            The rows of each pass.
        """
        trainer: Any = self._trainer
        accelerator: Accelerator = trainer.accelerator
        if self.budget is None:
            self.budget = self._fitting()
        lengths = part["prompt_mask"].sum(dim=1) + part["completion_mask"].sum(dim=1)
        order = lengths.argsort(stable=True)
        # The largest first: where it fits, the others do.
        dealt = deal(lengths[order], self.budget)[::-1]
        packed = trainer.packer.sharing(part)
        if packed is not None:
            padded_tokens = sum(len(rows) * int(lengths[order][rows].max()) for rows in dealt)
            new = deal(packed[1], self.budget, packed[2])
            # The first row of a pass shares nothing with the pass before.
            tokens = int(packed[1].sum()) - sum(int(packed[2][rows[1:]].sum()) for rows in new)
            if tokens <= _PACKED_GAIN * padded_tokens:
                order, dealt = packed[0], new
        order = order.to(part["prompt_ids"].device)
        passes = [order[places.to(order.device)] for places in dealt]
        if accelerator.num_processes > 1:
            number = torch.tensor([len(passes)], device=accelerator.device)
            passes = in_number(passes, int(accelerator.gather(number).max()))
        return passes

    def _fitting(self) -> int:
        """Return the tokens of a pass that fit, the smallest number of all processes."""
        accelerator = self._trainer.accelerator
        if accelerator.device.type != "cuda":
            return CPU_TOKENS
        free = torch.cuda.mem_get_info(accelerator.device)[0]
        free += torch.cuda.memory_reserved(accelerator.device) - torch.cuda.memory_allocated(accelerator.device)
        config = accelerator.unwrap_model(self._trainer.model).config.get_text_config()
        needed = bytes_per_token(config, checkpointing=self._args.gradient_checkpointing)
        fitting = torch.tensor([max(1024, int(_GPU_SHARE * free / needed))], device=accelerator.device)
        return int(accelerator.gather(fitting).min())

    def loss(self, model: Any, batch: TrainBatch, whole: TrainBatch, loss_of: LossOf) -> torch.Tensor:
        """Run the passes of a micro-batch, and the backward pass of each but the last.

        Args:
            model: The wrapped model.
            batch: The rows to read.
            whole: The micro-batch that they are from.
            loss_of: Computes the loss of a pass.

        Returns:
            The loss of the micro-batch. Its gradient is that of the last pass; the others' is in the parameters.
        """
        pending, done = self.of(batch, whole), list[Pass]()
        metrics = self._trainer._metrics["train"]
        before = {name: len(values) for name, values in metrics.items()}
        total: torch.Tensor | float = 0.0
        while True:
            part = pending.pop(0)
            gradients = self._gradients() if self._recovers else None
            lengths = {name: len(values) for name, values in metrics.items()}
            try:
                loss = loss_of(part) if not pending else self._backward(model, part, loss_of)
            except torch.OutOfMemoryError as error:
                if gradients is None:
                    error.add_note("Lower max_tokens_per_micro_batch or per_device_train_batch_size.")
                    raise
                self._halve(alone=len(part.batch.prompt_ids) == 1)
                for name, values in metrics.items():
                    del values[lengths.get(name, 0) :]
                _put_back(gradients)
                pending = [again for old in (part, *pending) for again in self.of(old.batch, whole)]
                continue
            done.append(part)
            if not pending:
                break
            total = total + loss
        self._merge(done, metrics, before)
        return loss if len(done) == 1 else loss + total

    def fitting(self, run: Callable[[], _T], longest: int) -> _T:
        """Call a function that accumulates gradients, again from its start with smaller passes if memory runs out.

        Args:
            run: Runs forward and backward passes of the rows that :meth:`split` deals.
            longest: Tokens of the longest row.
        """
        while True:
            gradients = self._gradients() if self._recovers else None
            try:
                return run()
            except torch.OutOfMemoryError:
                if gradients is None or self.budget is None:
                    raise
                self._halve(alone=self.budget < longest)
                _put_back(gradients)

    def _backward(self, model: Any, part: Pass, loss_of: LossOf) -> torch.Tensor:
        """Run a pass whose gradient is accumulated, as in an earlier micro-batch of the optimizer step."""
        accelerator = self._trainer.accelerator
        state, device = accelerator.gradient_state, accelerator.device.type
        synchronizes = state.sync_gradients
        state._set_sync_gradients(False)
        try:
            with accelerator.no_sync(model):
                loss = loss_of(part)
                deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
                with torch.autocast(device, enabled=False):  # the caller computes the loss under it
                    accelerator.backward(loss, **({"scale_wrt_gas": False} if deepspeed else {}))
        finally:
            state._set_sync_gradients(synchronizes)
        return loss.detach()

    @property
    def _recovers(self) -> bool:
        """True if a pass that runs out of memory can be undone: on one process, with gradients small enough to copy."""
        return self._trainer.accelerator.num_processes == 1 and isinstance(self._trainer.model, PeftModel)

    def _gradients(self) -> _Gradients:
        trained = (p for p in self._trainer.model.parameters() if p.requires_grad)
        return [(p, None if p.grad is None else p.grad.clone()) for p in trained]

    def _halve(self, *, alone: bool) -> None:
        """Halve the budget after a pass that did not fit into memory.

        Raises:
            RuntimeError: If the pass had a single row.
        """
        if alone:
            raise RuntimeError(
                "An episode does not fit into memory with its gradient. Lower max_model_length, or set "
                "gradient_checkpointing=True."
            )
        assert self.budget is not None
        self.budget = max(1, self.budget // 2)
        logger.warning(
            "A forward pass did not fit into memory. From now on a pass has at most %d tokens; set "
            "max_tokens_per_micro_batch=%d to start with that.",
            self.budget, self.budget,
        )  # fmt: skip

    @staticmethod
    def _merge(passes: Sequence[Pass], metrics: dict[str, list[float]], before: dict[str, int]) -> None:
        """Replace the metrics that each pass appended by those of the micro-batch: extremes, or means over tokens."""
        weights = [part.tokens for part in passes]
        for name, values in metrics.items():
            new = values[before.get(name, 0) :]
            if len(new) == len(passes) > 1:
                summed = sum(value * part.share for value, part in zip(new, passes, strict=True))
                values[before.get(name, 0) :] = [summed if name == "policy_loss" else _merged(name, new, weights)]


def _put_back(gradients: _Gradients) -> None:
    for parameter, gradient in gradients:
        parameter.grad = gradient


def _merged(name: str, values: Sequence[float], weights: Sequence[float]) -> float:
    there = [(value, weight) for value, weight in zip(values, weights, strict=True) if value == value and weight]
    if not there:
        return values[-1]
    if name.endswith("_min"):
        return min(value for value, _ in there)
    if name.endswith("_max"):
        return max(value for value, _ in there)
    return sum(value * weight for value, weight in there) / sum(weight for _, weight in there)


@contextmanager
def gathering_ragged(accelerator: Accelerator) -> Iterator[None]:
    """Let ``accelerator.gather`` take another number of values from each process, inside the ``with`` block.

    TRL's loss gathers a value of each row. A process with fewer rows than another adds NaN, which TRL leaves out.
    """
    if accelerator.num_processes == 1:
        yield
        return

    def gather_padded(values: torch.Tensor) -> Any:
        return gather(accelerator.pad_across_processes(values, dim=0, pad_index=nan))

    accelerator.gather = gather_padded
    try:
        yield
    finally:
        del accelerator.gather


def bytes_per_token(config: Any, *, checkpointing: bool) -> int:
    """Estimate the bytes that the backward pass keeps for each token, in 16 bits.

    A layer keeps about 34 bytes per hidden unit with attention that is linear in memory
    (https://huggingface.co/papers/2205.05198), here for a feed-forward part of four times the width, and one input with
    gradient checkpointing.
    """
    hidden, layers = config.hidden_size, config.num_hidden_layers
    layer = 34 * hidden * max(1.0, getattr(config, "intermediate_size", 4 * hidden) / (4 * hidden))
    return int(layers * 2 * hidden + 2 * layer if checkpointing else layers * layer)
