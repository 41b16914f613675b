"""Splits the rows of a micro-batch into forward passes by tokens, and combines their losses and metrics."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from math import nan
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather
from peft import PeftModel
from transformers.utils import logging

from agile_trainers.objectives.distillation import RETURN_TO_GO
from agile_trainers.packing.packer import Packer
from agile_trainers.packing.trie import shared_prefixes
from agile_trainers.train_batch import READ, Batch, Pass, Paths, TrainBatch, paths_of, rows_read

logger = logging.get_logger(__name__)

CPU_TOKENS = 2000
"""Tokens of a forward pass that is fast on a CPU: longer ones leave the cache, and their memory is fresh each time."""
_CPU_LIMIT = 8 * CPU_TOKENS
"""Tokens of a forward pass on CPU, at most, where no other limit is set."""
_PACKED_GAIN = 0.9
"""Part of the tokens of padded passes that packed ones may have, so that the rows that share a prefix stay together."""
_GPU_SHARE = 0.6
"""Part of the free memory that activations may take."""


@dataclass
class TokenBatch:
    """The rows of one forward and backward pass."""

    batch: TrainBatch
    share: float
    """Factor from TRL's loss of these rows to their part of the micro-batch's loss."""
    entropy_share: float
    """The same for the entropy bonus, a mean over the tokens of an average update of the generation batch."""
    tokens: float
    """Tokens that are trained on, over all processes: the weight in metrics."""
    weights: dict[str, float] = field(default_factory=dict)
    """Weights in the metrics of an algorithm's own loss, by name: tokens, or episodes."""
    part_of: int | None = None
    """Row of the micro-batch of which the pass holds a part; None for whole episodes."""


_TOO_LONG = "An episode does not fit into memory. Lower max_model_length"

LossOf = Callable[[TokenBatch], torch.Tensor]
Remember = Callable[[], Callable[[], None]]
"""Remembers the state of an object; returns a function that puts it back."""
_T = TypeVar("_T")


def split_padded(
    prompts: torch.Tensor, completions: torch.Tensor, budget: int, multiple: int = 1, rows: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Split sorted episodes into padded forward passes of at most ``budget`` tokens: rows times columns.

    Args:
        prompts: (B,) int64, prompt tokens of each episode, which are padded on the left.
        completions: (B,) int64, completion tokens, which are padded on the right.
        budget: Tokens of a pass. Only a pass of a single episode may have more.
        multiple: Columns of prompts and of completions are padded to a multiple of it.
        rows: (B,) int64, rows of each episode. Default: one.

    Returns:
        Positions in the order, pass by pass.
    """
    passes: list[list[int]] = []
    width = length = count = 0
    numbers = [1] * len(prompts) if rows is None else rows.tolist()
    for place, own in enumerate(zip(prompts.tolist(), completions.tolist(), strict=True)):
        own_width, own_length = (-(-tokens // multiple) * multiple for tokens in own)
        columns = max(width, own_width) + max(length, own_length)
        if passes and (count + numbers[place]) * columns <= budget:
            passes[-1].append(place)
            width, length, count = max(width, own_width), max(length, own_length), count + numbers[place]
        else:
            passes.append([place])
            width, length, count = own_width, own_length, numbers[place]
    return [torch.tensor(rows) for rows in passes]


def split_packed(
    lengths: torch.Tensor, shared: torch.Tensor, budget: int, multiple: int = 1, fast: int | None = None
) -> list[torch.Tensor]:
    """Split sorted rows into packed forward passes of at most ``budget`` distinct tokens.

    A pass has at most ``fast`` tokens, unless the next row shares most of its own with it: another would read them again.

    Args:
        lengths: (B,) int64.
        shared: (B,) int64, tokens in common with the row before.
        budget: Tokens of a pass. Only a pass of a single row may have more.
        multiple: The tokens of a pass are padded to a multiple of it.
        fast: Tokens of a pass from which on it gets slower. Default: ``budget``.

    Returns:
        Positions in the order, pass by pass.
    """
    passes: list[list[int]] = []
    used = 0
    for place, (length, common) in enumerate(zip(lengths.tolist(), shared.tolist(), strict=True)):
        limit = budget if fast is None or 2 * common > length else min(fast, budget)
        if passes and -(-(used + length - common) // multiple) * multiple <= limit:
            passes[-1].append(place)
            used += length - common
        else:
            passes.append([place])
            used = length
    return [torch.tensor(rows) for rows in passes]


def in_number(passes: list[Pass], number: int) -> list[Pass]:
    """Split the largest passes until there are ``number``, as long as one has two rows; then add empty ones."""
    passes = list(passes)
    while len(passes) < number:
        largest = max(range(len(passes)), key=lambda i: len(passes[i].rows))
        rows = passes[largest].rows
        if len(rows) < 2:
            return passes + [Pass(rows[:0])] * (number - len(passes))
        half = len(rows) // 2
        passes[largest : largest + 1] = [Pass(rows[:half]), Pass(rows[half:])]
    return passes


@dataclass(frozen=True)
class _Sizes:
    """Sizes of the padded rows of B episodes, on the CPU."""

    prompts: torch.Tensor
    """(B,) int64, tokens that are padded on the left; 0 for paths."""
    completions: torch.Tensor
    """(B,) int64, tokens that are padded on the right: for several paths, those of the longest."""
    rows: torch.Tensor
    """(B,) int64, rows that the model reads."""

    @classmethod
    def of(cls, part: Batch) -> _Sizes:
        """Measure the episodes of a micro-batch in TRL's form."""
        if (paths := paths_of(part)) is None:
            prompts, completions = (part[f"{name}_mask"].sum(dim=1).cpu() for name in ("prompt", "completion"))
            return cls(prompts, completions, torch.ones_like(prompts))
        count, episodes, lengths = len(part["prompt_ids"]), paths.episodes.cpu(), paths.mask.sum(dim=1).cpu()
        longest = torch.zeros(count, dtype=torch.long).scatter_reduce(0, episodes, lengths, "amax")
        return cls(torch.zeros_like(longest), longest, torch.bincount(episodes, minlength=count))

    def at(self, episodes: torch.Tensor) -> _Sizes:
        """Select episodes (R,)."""
        return _Sizes(self.prompts[episodes], self.completions[episodes], self.rows[episodes])

    @property
    def tokens(self) -> int:
        """Rows times columns of a pass of all of them."""
        return int(self.rows.sum()) * int(self.prompts.max() + self.completions.max())


def split_paths(ids: torch.Tensor, mask: torch.Tensor, budget: int, *, packed: bool) -> list[torch.Tensor]:
    """Split the paths of one episode into forward passes of at most ``budget`` tokens.

    Args:
        ids: (Q, S) int64.
        mask: (Q, S), 1 on tokens.
        budget: Tokens of a pass. Only a pass of a single path may have more.
        packed: Count distinct tokens; else rows times columns.

    Returns:
        The rows of each pass; those that share a prefix are neighbours.
    """
    order, lengths, shared = shared_prefixes(ids, mask)
    if packed:
        places = split_packed(lengths, shared, budget)
    else:
        places = split_padded(torch.zeros_like(lengths), lengths, budget)
    return [order[chosen] for chosen in places]


def _part(batch: TrainBatch, one: Pass) -> TrainBatch:
    """Return the rows of a pass. A pass without rows gets one whose tokens are all masked: every process runs as many."""
    if not len(one.rows):
        return batch.rows(torch.tensor([0])).untrained()
    rows = batch.rows(one.rows)
    return rows if one.tokens is None else rows.only(one.tokens[None])


def _share_of_episode(batch: TrainBatch, one: Pass, loss_type: str) -> float:
    """Return the share of the episode's tokens in a pass, if the loss divides by their number."""
    if one.tokens is None or loss_type not in ("grpo", "sapo"):
        return 1.0
    counted = batch.counted[one.rows[0]]
    return float((counted & one.tokens).sum().double() / counted.sum().clamp(min=1))


class TokenBatches:
    """Decides the tokens of a forward pass once, and splits the rows of micro-batches into passes.

    Args:
        args: A ``MultiTurnConfig``.
        accelerator: The trainer's.
        packer: Runs the passes.
        model: The policy.
        auxiliary_loss: True if TRL adds the router's auxiliary loss.
        metrics: TRL's store of the metrics of training.
        loss_needs: Unit that the algorithm's own loss gets at once, ``"episodes"`` or ``"micro_batch"``; None for TRL's.
    """

    def __init__(
        self,
        args: Any,
        accelerator: Accelerator,
        packer: Packer,
        model: Any,
        *,
        auxiliary_loss: bool,
        metrics: dict[str, list[float]],
        loss_needs: str | None = None,
    ) -> None:
        self._args, self._accelerator = args, accelerator
        self._packer, self._model, self._metrics = packer, model, metrics
        self.budget: int | None = self._args.max_tokens_per_micro_batch
        """Tokens of a pass, equal on all processes; None until the first micro-batch decides it."""
        self.observers: Sequence[Remember] = ()
        """State that passes change besides gradients and metrics; it is put back before a micro-batch is repeated."""
        self._under_way: tuple[Batch, bool, bool] | None = None
        # Terms that are no sum over rows or tokens need the whole micro-batch at once.
        self._whole = (
            auxiliary_loss
            or loss_needs == "micro_batch"
            or self._args.use_adaptive_entropy
            or self._args.top_entropy_quantile < 1.0
            or self.steps_in_backward
        )
        # Others need an episode at once.
        self._divides = not (
            self._whole
            or loss_needs is not None
            or self._args.importance_sampling_level == "sequence"
            or self._args.loss_type == "vespo"
            or (self._args.teacher is not None and self._args.teacher_gradient == RETURN_TO_GO)
            or self._args.off_policy_mask_threshold is not None
        )

    @property
    def steps_in_backward(self) -> bool:
        """True if the optimizer moves weights in the backward pass, so that no gradient can be accumulated."""
        return str(self._args.optim).split(".")[-1].lower() in ("lomo", "adalomo")

    def restore(self, budget: int | None) -> None:
        """Take the budget of a checkpoint, unless the option says another."""
        if self._args.max_tokens_per_micro_batch is None:
            self.budget = budget

    def of(self, batch: TrainBatch, whole: TrainBatch) -> list[TokenBatch]:
        """Split the rows of a micro-batch into passes, equally many on every process.

        Args:
            batch: The rows to read.
            whole: The micro-batch that they are from, whose averages the loss takes.
        """
        everything = [Pass(torch.arange(len(batch.prompt_ids)))]
        chosen = everything if self._whole else self.split(batch.to_trl(), divide=self._divides)
        parts = [batch] if len(chosen) == 1 else [_part(batch, one) for one in chosen]
        tokens = torch.stack([part.counted.sum() for part in parts])
        if self._accelerator.num_processes > 1:
            tokens = self._accelerator.reduce(tokens, reduction="sum")
        multiple, loss_type = self._args.pad_to_multiple_of, self._args.loss_type
        return [
            TokenBatch(
                part.trimmed(multiple),
                share=part.share_of(whole, loss_type) * _share_of_episode(batch, one, loss_type)
                if len(one.rows)
                else 0.0,
                entropy_share=self._entropy_share(part) if len(one.rows) else 0.0,
                tokens=float(count),
                part_of=None if one.tokens is None else int(one.rows[0]),
            )
            for part, one, count in zip(parts, chosen, tokens.tolist(), strict=True)
        ]

    def _entropy_share(self, part: TrainBatch) -> float:
        """Return the factor from TRL's bonus, a mean over the tokens of some rows, to their part of that of the update.

        TRL's ``loss_type="dapo"`` divides by the same number: a micro-batch is one of ``steps_per_generation`` of one
        process.
        """
        if self._args.use_adaptive_entropy or self._args.top_entropy_quantile < 1.0:
            return 1.0  # TRL's controller and quantile are of a micro-batch
        micro_batches = self._accelerator.num_processes * self._args.steps_per_generation
        return float(part.counted.sum().clamp(min=1).double() * micro_batches / part.num_items_in_batch.clamp(min=1))

    def split(self, part: Batch, *, divide: bool = True) -> list[Pass]:
        """Split rows into passes, equally many on every process, of which some may be empty.

        Args:
            part: See :func:`~agile_trainers.train_batch.read_inputs`.
            divide: Divide an episode of several paths that alone exceeds the budget.
        """
        accelerator = self._accelerator
        if self.budget is None:
            self.budget = self._fitting()
        sizes = _Sizes.of(part)
        passes, tokens = self._padded(torch.arange(len(sizes.rows)), sizes)
        packed, fewer = self._packed(part, sizes)
        if packed and fewer <= _PACKED_GAIN * tokens:
            passes = packed
        chosen = [one for rows in passes for one in self._divided(part, rows.to(part["prompt_ids"].device), divide)]
        if accelerator.num_processes > 1:
            number = torch.tensor([len(chosen)], device=accelerator.device)
            chosen = in_number(chosen, int(accelerator.gather(number).max()))
        return chosen

    def _divided(self, part: Batch, rows: torch.Tensor, divide: bool) -> list[Pass]:
        """Divide a pass of one episode whose paths exceed the budget together."""
        if not divide or len(rows) != 1 or "path_ids" not in part:
            return [Pass(rows)]
        assert self.budget is not None
        own = {name: part[name][rows] for name in READ if name in part}
        found = Paths.of(own["path_ids"], own["path_lengths"], own["places"])
        groups = split_paths(
            found.ids, found.mask, self.budget, packed=self._packer.packs and self._packer.pays(part, rows)
        )
        if len(groups) == 1:
            return [Pass(rows)]
        row = torch.where(found.cells[0] >= 0, found.cells[0] // found.ids.size(1), -1)
        return [Pass(rows, torch.isin(row, group.to(row.device))) for group in groups]

    def each(self, part: Batch) -> Iterator[Pass]:
        """Split rows as :meth:`split` does, and note which of them are under way."""
        for one in self.split(part):
            under_way = {name: value[one.rows] for name, value in part.items()}
            if one.tokens is not None:
                under_way["places"] = torch.where(one.tokens, under_way["places"], -1)
            self._under_way = under_way, False, True
            yield one

    def _padded(self, episodes: torch.Tensor, sizes: _Sizes) -> tuple[list[torch.Tensor], int]:
        """Split some episodes into padded passes; return these, and the sum of their tokens."""
        ordered = episodes[(sizes.prompts + sizes.completions)[episodes].argsort(stable=True)]
        own = sizes.at(ordered)
        multiple = self._args.pad_to_multiple_of or 1
        chosen = split_padded(own.prompts, own.completions, self._fast, multiple, own.rows)
        tokens = sum(own.at(places).tokens for places in chosen)
        # The largest first: where it fits, the others do.
        return [ordered[places] for places in chosen[::-1]], tokens

    def _packed(self, part: Batch, sizes: _Sizes) -> tuple[list[torch.Tensor], int]:
        """Split episodes into packed passes, and padded ones where packing does not pay; return these, and their tokens."""
        packer, budget = self._packer, self.budget
        sharing = packer.sharing(part)
        if sharing is None:
            return [], 0
        assert budget is not None
        order, lengths, shared = sharing[0].cpu(), sharing[1], sharing[2]
        passes, tokens = list[torch.Tensor](), 0
        for places in split_packed(lengths, shared, budget, packer.multiple, self._fast):
            rows = order[places]
            if len(rows) == 1 or packer.pays(part, rows):
                passes.append(rows)
                # The first row of a pass shares nothing with the pass before.
                tokens += int(lengths[places].sum() - shared[places[1:]].sum())
            else:
                padded, more = self._padded(rows, sizes)
                passes, tokens = passes + padded, tokens + more
        return passes, tokens

    @property
    def _fast(self) -> int:
        """Tokens of a pass from which on it gets slower."""
        assert self.budget is not None
        slows = self._accelerator.device.type == "cpu" and self._args.max_tokens_per_micro_batch is None
        return min(CPU_TOKENS, self.budget) if slows else self.budget

    def _fitting(self) -> int:
        """Return the tokens of a pass that fit, the smallest number of all processes."""
        accelerator = self._accelerator
        if accelerator.device.type != "cuda":
            return _CPU_LIMIT
        policy = accelerator.unwrap_model(self._model)
        per_token = backward_bytes_per_token(
            policy.config.get_text_config(), checkpointing=self._args.gradient_checkpointing
        )
        if not (self._args.bf16 or self._args.fp16):
            per_token = per_token * policy.dtype.itemsize // 2
        fits = fitting_tokens(self._free(), self._to_come(policy), per_token)
        fitting = torch.tensor([fits], device=accelerator.device)
        return int(accelerator.gather(fitting).min())

    def room(self) -> int:
        """Return the bytes of this process's GPU that are free, less those that gradients and optimizer will take."""
        return self._free() - self._to_come(self._accelerator.unwrap_model(self._model))

    def _free(self) -> int:
        device = self._accelerator.device
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused

    def _to_come(self, policy: torch.nn.Module) -> int:
        """Return the bytes of gradients and optimizer that this process has not allocated before the first update."""
        state, optimizer = self._accelerator.state, str(getattr(self._args.optim, "value", self._args.optim))
        trained = [(_local_size(p), p.element_size()) for p in policy.parameters() if p.requires_grad]
        if self._accelerator.distributed_type != DistributedType.DEEPSPEED:
            return bytes_to_come(trained, optimizer)
        # DeepSpeed has made the optimizer's state by now. From stage 2 on, a process keeps its share of the gradients.
        shares = self._accelerator.num_processes if state.deepspeed_plugin.zero_stage >= 2 else 1
        return bytes_to_come(trained, None, shares)

    def loss(
        self, model: Any, batch: TrainBatch, whole: TrainBatch, loss_of: LossOf, *, complete: bool, together: bool
    ) -> torch.Tensor:
        """Run the passes of a micro-batch, and the backward pass of each but the last.

        If memory runs out, the whole micro-batch is run again with smaller passes, from the same gradients and random state.

        Args:
            model: The wrapped model.
            batch: The rows to read.
            whole: The micro-batch that they are from.
            loss_of: Computes the loss of a pass.
            complete: Run the backward pass of the last pass too, where it could be repeated.
            together: Run no backward pass: the whole gradient is that of the loss, for a caller that changes it.

        Returns:
            The loss of the micro-batch. What its gradient lacks is in the parameters.
        """
        # Outside of this method, a backward pass that runs out of memory could not be repeated.
        repeats = self._repeats and torch.is_grad_enabled() and not self.steps_in_backward
        complete = complete and repeats and not together
        return self.fitting(lambda: self._run(model, batch, whole, loss_of, complete, together))

    def _run(
        self, model: Any, batch: TrainBatch, whole: TrainBatch, loss_of: LossOf, complete: bool, together: bool
    ) -> torch.Tensor:
        passes, metrics = self.of(batch, whole), self._metrics
        before = {name: len(values) for name, values in metrics.items()}
        total: torch.Tensor | float = 0.0
        for number, part in enumerate(passes, 1):
            self._under_way = part.batch.to_trl(), self._whole, self._divides
            last = number == len(passes)
            if last and complete:
                loss = loss_of(part)
                with torch.autocast(self._accelerator.device.type, enabled=False):
                    self._accelerator.backward(loss)
                loss = loss.detach()
            else:
                loss = loss_of(part) if last or together else self._backward(model, part, loss_of)
            if not last:
                total = total + loss
        self._merge(passes, metrics, before)
        if not any(part.tokens for part in passes):
            # Their means over no token are 0, and the log is a mean over micro-batches.
            _forget(metrics, before, {*_OF_TOKENS, *passes[0].weights})
        loss = loss if len(passes) == 1 else loss + total
        # The trainer's own backward pass then ends at this number.
        return loss.requires_grad_() if complete else loss

    def fitting(self, run: Callable[[], _T]) -> _T:
        """Call a function, again from its start with smaller passes whenever memory runs out.

        Args:
            run: Runs forward passes, and maybe backward passes, of the rows that :meth:`split` or :meth:`each` returns.

        Raises:
            RuntimeError: If a pass of a single episode does not fit.
            torch.OutOfMemoryError: On several processes, or if the gradients of a whole model would have to be copied.
        """
        if not self._repeats:
            reason = "several processes" if self._accelerator.num_processes > 1 else "a model that is trained whole"
            smaller = "max_tokens_per_micro_batch" + (f" (it is {self.budget} now)" if self.budget else "")
            with _advising(f"Forward passes are not made smaller by themselves with {reason}. Lower {smaller}."):
                return run()

        def undo_of() -> Callable[[], None]:
            return undoing(self._model if torch.is_grad_enabled() else None, self._metrics, self.observers)

        return within_memory(run, self._halve, undo_of)

    def _backward(self, model: Any, part: TokenBatch, loss_of: LossOf) -> torch.Tensor:
        """Run a pass whose gradient is accumulated, as in an earlier micro-batch of the optimizer step."""
        accelerator = self._accelerator
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
    def _repeats(self) -> bool:
        """True if passes that run out of memory can be undone: on one process, with gradients small enough to copy.

        The ranks of several processes wait for each other inside a pass; one cannot go back alone.
        """
        single = self._accelerator.distributed_type == DistributedType.NO and self._args.n_gpu <= 1
        return single and (isinstance(self._model, PeftModel) or not torch.is_grad_enabled())

    def _halve(self) -> None:
        """Halve the budget until the pass that did not fit into memory is split.

        Raises:
            RuntimeError: If it cannot be split.
        """
        part, whole, divide = self._under_way or ({}, False, False)
        if not part or (len(part["prompt_ids"]) == 1 and not (divide and len(rows_read(part)[0]) > 1)):
            advice = ", or set gradient_checkpointing=True." if torch.is_grad_enabled() else "."
            raise RuntimeError(_TOO_LONG + advice)
        if whole:
            raise RuntimeError(
                "A micro-batch does not fit into memory, and a term of its loss needs all of its episodes at once: an "
                "adaptive entropy bonus, an entropy quantile, a router's auxiliary loss, a loss with "
                "loss_needs='micro_batch', or an optimizer that steps in the backward pass. Lower "
                "per_device_train_batch_size."
            )
        assert self.budget is not None
        while True:  # a pass of a budget below its tokens has one row
            self.budget //= 2
            if len(self.split(part, divide=divide)) > 1:
                break
        logger.warning(
            "A forward or backward pass did not fit into memory. From now on a pass has at most %d tokens; set "
            "max_tokens_per_micro_batch=%d to start with that.",
            self.budget, self.budget,
        )  # fmt: skip

    @staticmethod
    def _merge(passes: Sequence[TokenBatch], metrics: dict[str, list[float]], before: dict[str, int]) -> None:
        """Replace the metrics that each pass appended by those of the micro-batch: extremes, or means over tokens."""
        for name, values in metrics.items():
            new = values[before.get(name, 0) :]
            if len(new) == len(passes) > 1:
                summed = sum(value * part.share for value, part in zip(new, passes, strict=True))
                weights = [part.weights.get(name, part.tokens) for part in passes]
                # Names of a loss of one's own say nothing of extremes.
                extreme = None if name in passes[0].weights else name[-4:]
                if extreme in ("_min", "_max"):
                    new, weights = _of_episodes(passes, new, weights)
                values[before.get(name, 0) :] = [summed if name == "policy_loss" else _merged(extreme, new, weights)]


def within_memory(
    run: Callable[[], _T], halve: Callable[[], None], undo_of: Callable[[], Callable[[], None]] = lambda: lambda: None
) -> _T:
    """Call a function, and whenever memory runs out, undo what it did, halve its work and call it again.

    The random state of torch is the same each time, so that the result is that of a run with the smaller work.

    Args:
        run: The function.
        halve: Makes its work smaller, or raises if nothing is left to halve.
        undo_of: Called before each attempt; returns a function that undoes it.
    """
    while True:
        undo = undo_of()
        cuda = torch.cuda.is_initialized()
        states = torch.get_rng_state(), torch.cuda.get_rng_state_all() if cuda else []
        try:
            return run()
        except torch.OutOfMemoryError:
            pass  # its traceback holds the tensors of the attempt, so everything else is done outside
        undo()
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
        halve()
        torch.set_rng_state(states[0])
        if cuda:
            torch.cuda.set_rng_state_all(states[1])


def undoing(model: Any, metrics: dict[str, list[float]], observers: Sequence[Remember]) -> Callable[[], None]:
    """Remember gradients, metrics and the state of observers; return a function that puts them back.

    Args:
        model: Whose gradients are copied. None: no gradient changes.
        metrics: Lists that are appended to.
        observers: Each remembers what else changes.
    """
    trained = [] if model is None else [p for p in model.parameters() if p.requires_grad]
    gradients = [(p, None if p.grad is None else p.grad.clone()) for p in trained]
    lengths = {name: len(values) for name, values in metrics.items()}
    undone = [remember() for remember in observers]

    def undo() -> None:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for name, values in metrics.items():
            del values[lengths.get(name, 0) :]
        for put_back in undone:
            put_back()

    return undo


def remember_attributes(of: Any) -> Callable[[], None]:
    """Remember the attributes of an object of a library, which are assigned, or are dictionaries and lists that change."""
    state = {name: copy(value) if isinstance(value, (dict, list)) else value for name, value in vars(of).items()}
    return lambda: vars(of).update(state)


@contextmanager
def _advising(advice: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        error.add_note(advice)
        raise


def _of_episodes(
    passes: Sequence[TokenBatch], values: Sequence[float], weights: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Average values over the passes that hold parts of one episode: an extreme is one of means over episodes.

    It is exact on one process; of several, the values of a pass are extremes already.
    """
    groups: dict[int, list[int]] = {}
    for number, part in enumerate(passes):
        groups.setdefault(-1 - number if part.part_of is None else part.part_of, []).append(number)
    means = [_merged(None, [values[i] for i in group], [weights[i] for i in group]) for group in groups.values()]
    return means, [sum(weights[i] for i in group) for group in groups.values()]


def _merged(extreme: str | None, values: Sequence[float], weights: Sequence[float]) -> float:
    there = [(value, weight) for value, weight in zip(values, weights, strict=True) if value == value and weight]
    if not there:
        return values[-1]
    if extreme == "_min":
        return min(value for value, _ in there)
    if extreme == "_max":
        return max(value for value, _ in there)
    return sum(value * weight for value, weight in there) / sum(weight for _, weight in there)


_OF_TOKENS = (
    "entropy", "kl", "cispo_clip_ratio", "vespo/phi_seq_mean",
    *(f"clip_ratio/{name}" for name in ("low_mean", "high_mean", "region_mean", "low_min", "high_max")),
)  # fmt: skip
"""Metrics of TRL's loss over the tokens that are trained on."""


def _forget(metrics: dict[str, list[float]], before: dict[str, int], names: set[str]) -> None:
    """Remove what was appended to some metrics since they had the lengths ``before``."""
    for name in names & metrics.keys():
        del metrics[name][before.get(name, 0) :]
        if not metrics[name]:
            del metrics[name]


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


def backward_bytes_per_token(config: Any, *, checkpointing: bool) -> int:
    """Estimate the bytes that the backward pass keeps for each token, in 16 bits.

    A layer keeps about 34 bytes per hidden unit with attention that is linear in memory
    (https://huggingface.co/papers/2205.05198), here for a feed-forward part of four times the width, and one input with
    gradient checkpointing.
    """
    hidden, layers = config.hidden_size, config.num_hidden_layers
    layer = 34 * hidden * max(1.0, getattr(config, "intermediate_size", 4 * hidden) / (4 * hidden))
    return int(layers * 2 * hidden + 2 * layer if checkpointing else layers * layer)


def fitting_tokens(free: int, to_come: int, per_token: int) -> int:
    """Return the tokens of a pass that fit into memory, at least 1,024.

    Args:
        free: Bytes that are free now.
        to_come: Bytes of these that gradients and optimizer will take; see :func:`bytes_to_come`.
        per_token: Bytes that the backward pass keeps for each token.
    """
    return max(1024, int(_GPU_SHARE * (free - to_come) / per_token))


_STATES = {
    "ademamix": 3, "adafactor": 0, "adagrad": 1, "adalomo": 0, "lomo": 0, "adam": 2, "sgd": 1, "rmsprop": 1, "lion": 1,
}  # fmt: skip
"""Beginning of an optimizer's name to its values for each trained weight; 2 for others. SGD's is its momentum."""
_KEPT_WHOLE = 4096
"""Weights of a tensor below which bitsandbytes keeps its state in 32 bits."""


def optimizer_values(optimizer: str, itemsize: int) -> tuple[int, int]:
    """Return the values that an optimizer keeps for each trained weight, and the bytes of each.

    Args:
        optimizer: The option ``optim``.
        itemsize: Bytes of a trained weight.
    """
    name = optimizer.removeprefix("paged_").removeprefix("schedule_free_")
    values = next((count for begins, count in _STATES.items() if name.startswith(begins)), 2)
    return values, 1 if "8bit" in name else 4 if "32bit" in name else itemsize


def bytes_to_come(trained: Sequence[tuple[int, int]], optimizer: str | None, shares: int = 1) -> int:
    """Count the bytes of gradients and optimizer state of trained tensors, which the first update allocates.

    Args:
        trained: Weights of each tensor on this process, and bytes of each weight.
        optimizer: The option ``optim``; None if its state is allocated already. A paged one counts as nothing, since its
            state leaves the GPU when memory is short.
        shares: Processes that gradients and state are divided among.
    """
    total = sum(weights * itemsize for weights, itemsize in trained)
    if optimizer is not None and not optimizer.startswith("paged_"):
        for weights, itemsize in trained:
            values, each = optimizer_values(optimizer, itemsize)
            total += weights * values * (4 if each == 1 and weights < _KEPT_WHOLE else each)
    return total // shares


def _local_size(parameter: Any) -> int:
    """Return the number of a parameter's weights: on this process under FSDP2, of all under ZeRO-3."""
    if hasattr(parameter, "to_local"):
        return int(parameter.to_local().numel())
    return int(getattr(parameter, "ds_numel", parameter.numel()))
