"""Defines the batch that the loss reads: the shape of each field, the grouping of rows and the trimming of padding.

TRL stores, shuffles and splits a ``dict`` of tensors. :meth:`TrainBatch.to_trl` and :meth:`TrainBatch.from_trl` are the only
places where the two forms meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from accelerate import Accelerator

from agile_trainers.types import NO_TURN, TurnBatch

Batch = dict[str, torch.Tensor]
"""A micro-batch as TRL stores it: tensors by name."""

_PROMPT, _TOKENS, _EPISODES, _SCALAR, _FLAT, _PATHS = "(B, P)", "(B, T)", "(B,)", "()", "(B, F)", "(B, M)"
_WORDS, _IMAGES, _HINTS = "(B, W)", "(B, V, ...)", "(B, H)"
_TURN_PREFIX, _TOKEN_PREFIX = "turns:", "tokens:"
DEMONSTRATED = "demonstrated"
"""Column (B, T) of a batch with demonstrations: the credit of each token of an expert, 0 elsewhere."""
READ = (
    "prompt_ids", "prompt_mask", "completion_ids", "completion_mask",
    "path_ids", "path_lengths", "places",
    "kept_words", "kept_sizes", "image_features", "image_places",
)  # fmt: skip
"""Fields that a forward pass takes; the second line where episodes have several paths, the third where a filter sampled, or
where there are images."""


def _shaped(shape: str, **options: Any) -> Any:
    return field(metadata={"shape": shape}, **options)


@dataclass(frozen=True)
class Pass:
    """The episodes of one forward pass, among those of a micro-batch."""

    rows: torch.Tensor
    """(R,) int64; none for a pass that only other processes need."""
    tokens: torch.Tensor | None = None
    """(T,) bool, the action tokens that are read of the only episode. None: all of all episodes."""


@dataclass
class TrainBatch:
    """A batch of episodes for the loss. A field has TRL's name where TRL has one."""

    prompt_ids: torch.Tensor = _shaped(_PROMPT)
    """(B, P) int64, left-padded."""
    prompt_mask: torch.Tensor = _shaped(_PROMPT)
    """(B, P) int64."""
    completion_ids: torch.Tensor = _shaped(_TOKENS)
    """(B, T) int64, right-padded; action and observation tokens."""
    completion_mask: torch.Tensor = _shaped(_TOKENS)
    """(B, T) int64: the attention mask."""
    tool_mask: torch.Tensor = _shaped(_TOKENS)
    """(B, T) int64, 1 on tokens that are trained on."""
    turn_ids: torch.Tensor = _shaped(_TOKENS)
    """(B, T) int64, -1 outside of actions."""
    sampling_per_token_logps: torch.Tensor = _shaped(_TOKENS)
    """(B, T) float32, log-probabilities under the sampler."""
    advantages: torch.Tensor = _shaped(_TOKENS)
    """(B, T) float32."""
    num_items_in_batch: torch.Tensor = _shaped(_SCALAR)
    """Tokens that are trained on in the generation batch, over all processes."""
    old_per_token_logps: torch.Tensor | None = _shaped(_TOKENS, default=None)
    """(B, T), under the policy that the update starts from. None: those of the forward pass itself."""
    ref_per_token_logps: torch.Tensor | None = _shaped(_TOKENS, default=None)
    """(B, T), under the reference. None: the loss has no KL term."""
    importance_sampling_ratio: torch.Tensor | None = _shaped(_TOKENS, default=None)
    """(B, T), weights that correct for the training-inference mismatch, or for drift."""
    episodes: torch.Tensor | None = _shaped(_EPISODES, default=None)
    """(B,) int64, index of each row among this process's episodes of the generation batch."""
    has_advantage: torch.Tensor | None = _shaped(_EPISODES, default=None)
    """(B,) bool, rows with an advantage, or with a penalty inside it. None: all."""
    recorded_reference: torch.Tensor | None = _shaped(_TOKENS, default=None)
    """(B, T), under the reference, for the episode records; None without a reference."""
    turns_in_step: torch.Tensor | None = _shaped(_SCALAR, default=None)
    """Turns that the optimizer step trains a critic on, over all processes."""
    path_ids: torch.Tensor | None = _shaped(_FLAT, default=None)
    """(B, F) int64, right-padded: the paths of each episode, one after another. None: each is its prompt and completion."""
    path_lengths: torch.Tensor | None = _shaped(_PATHS, default=None)
    """(B, M) int64, tokens of each path."""
    places: torch.Tensor | None = _shaped(_TOKENS, default=None)
    """(B, T) int64, column in ``path_ids`` of each action token, -1 elsewhere."""
    kept_words: torch.Tensor | None = _shaped(_WORDS, default=None)
    """(B, W) int32, the sets of tokens that were kept when each was sampled; see :class:`~agile_trainers.types.TurnBatch`.
    Log-probabilities, ratios, KL and entropy are of policies renormalised over them. None: over all tokens."""
    kept_sizes: torch.Tensor | None = _shaped(_TOKENS, default=None)
    """(B, T) int32, the number of words of each set."""
    image_features: torch.Tensor | None = _shaped(_IMAGES, default=None)
    """(B, V, W), what is read in the place of each image token; see :class:`~agile_trainers.types.TurnBatch`. None without
    images."""
    image_places: torch.Tensor | None = _shaped(_IMAGES, default=None)
    """(B, V, 5) int64, where it is; -1 after the last."""
    hint_ids: torch.Tensor | None = _shaped(_HINTS, default=None)
    """(B, H) int64, tokens that a teacher reads before each path of an episode, right-padded with -1. None: no hints."""
    teachers: torch.Tensor | None = _shaped(_EPISODES, default=None)
    """(B,) int64, index of each episode's teacher among several, -1 without one. None: all have the same."""
    turn_columns: Batch = field(default_factory=dict)
    """(B, K) each: further columns of a credit rule, one value per turn."""
    token_columns: Batch = field(default_factory=dict)
    """(B, T) each: further columns of a credit rule, one value per token."""

    def column(self, name: str) -> torch.Tensor:
        """Return a credit rule's own column, (B, K) or (B, T), by name."""
        return self.turn_columns[name] if name in self.turn_columns else self.token_columns[name]

    @property
    def counted(self) -> torch.Tensor:
        """(B, T) bool, the tokens that enter the loss."""
        return self.tool_mask * self.completion_mask > 0

    @property
    def scored(self) -> torch.Tensor:
        """(B, T) bool, the tokens whose log-probabilities are read: those of the policy, and those of an expert."""
        demonstrated = self.token_columns.get(DEMONSTRATED)
        return self.counted if demonstrated is None else self.counted | (demonstrated > 0)

    @property
    def left_padded(self) -> torch.Tensor:
        """(B,) bool, episodes whose prompt is padded where the model reads it."""
        return (self.prompt_mask[:, 0] == 0) & (self.path_ids is None)

    def to_trl(self) -> Batch:
        """Convert to TRL's dictionary; fields that are None are left out."""
        batch = {name: value for name in _SHAPES if (value := getattr(self, name)) is not None}
        batch |= {_TURN_PREFIX + name: value for name, value in self.turn_columns.items()}
        return batch | {_TOKEN_PREFIX + name: value for name, value in self.token_columns.items()}

    @classmethod
    def from_trl(cls, batch: Batch) -> TrainBatch:
        """Convert from the dictionary that :meth:`to_trl` made; tensors are shared."""
        turns = {n.removeprefix(_TURN_PREFIX): value for n, value in batch.items() if n.startswith(_TURN_PREFIX)}
        tokens = {n.removeprefix(_TOKEN_PREFIX): value for n, value in batch.items() if n.startswith(_TOKEN_PREFIX)}
        known = {name: batch[name] for name in _SHAPES if name in batch}
        length = known["completion_ids"].size(1)
        for name in batch.keys() - known.keys():
            if ":" not in name:  # a checkpoint written before columns had prefixes
                (tokens if batch[name].size(1) == length else turns)[name] = batch[name]
        return cls(**known, turn_columns=turns, token_columns=tokens)

    def trimmed(self, multiple: int | None = None) -> TrainBatch:
        """Drop the columns that are padding in every row. TRL pads to the longest row of the *generation* batch.

        Args:
            multiple: TRL's ``pad_to_multiple_of``; the trimmed width is a multiple of it.
        """
        cut = _trimmed({name: value for name in _SHAPES if (value := getattr(self, name)) is not None}, multiple)
        length = cut["completion_ids"].size(1)
        tokens = {name: value[:, :length] for name, value in self.token_columns.items()}
        return TrainBatch(**cut, turn_columns=dict(self.turn_columns), token_columns=tokens)

    def rows(self, chosen: torch.Tensor) -> TrainBatch:
        """Select rows.

        Args:
            chosen: (B,) bool or (R,) int64.
        """
        if chosen.dtype == torch.bool:  # indexing each column with it would wait for a GPU each time
            chosen = chosen.nonzero().squeeze(1)
        return TrainBatch.from_trl({n: value[chosen] if value.ndim else value for n, value in self.to_trl().items()})

    def with_advantage(self) -> TrainBatch:
        """Drop the rows that have no advantage, and those without a token that is trained on.

        If no row of the policy's own is left, the shortest one stays: other ranks would wait for a rank that skips its
        forward and backward pass, and metrics are over tokens of the policy's own.
        """
        kept = self.scored.any(dim=1)
        if self.has_advantage is not None:
            kept &= self.has_advantage
        own = self.counted.any(dim=1)
        if not (kept & own).any():
            lengths = lengths_of(self.to_trl())
            kept[lengths.masked_fill(~own, int(lengths.max()) + 1).argmin()] = True
        return self.rows(kept)

    def only(self, tokens: torch.Tensor) -> TrainBatch:
        """Copy the rows so that only some action tokens are read and trained on, whole turns of episodes of several paths.

        Args:
            tokens: (B, T) bool.
        """
        assert self.places is not None
        copy = TrainBatch.from_trl(self.to_trl())
        copy.places, copy.tool_mask = torch.where(tokens, self.places, -1), self.tool_mask * tokens
        for name, value in copy.turn_columns.items():
            if value.is_floating_point():
                turns = value.new_zeros(len(value), value.size(1) + 1)
                turns.scatter_(1, torch.where(tokens, self.turn_ids, NO_TURN) + 1, 1.0)
                copy.turn_columns[name] = value * turns[:, 1:]
        copy.token_columns |= {n: v * tokens for n, v in copy.token_columns.items() if v.is_floating_point()}
        return copy

    def untrained(self) -> TrainBatch:
        """Copy the rows without anything that is trained on: a forward pass that other ranks wait for."""
        copy = TrainBatch.from_trl(self.to_trl())
        copy.tool_mask, copy.advantages = torch.zeros_like(self.tool_mask), torch.zeros_like(self.advantages)
        # TRL's metrics take a single column for one value per episode, and would count it.
        copy.completion_mask = self.completion_mask.clone()
        copy.completion_mask[:, :2] = 1
        for columns in (copy.turn_columns, copy.token_columns):
            columns |= {name: torch.zeros_like(value) for name, value in columns.items() if value.is_floating_point()}
        return copy

    def share_of(self, whole: TrainBatch, loss_type: str) -> float:
        """Return the factor from TRL's loss of these rows to their part in the loss of a larger micro-batch.

        Args:
            whole: The micro-batch that the rows are from.
            loss_type: TRL's; some losses divide by the number of rows or tokens of the micro-batch.
        """
        if loss_type == "bnpo":
            return float(self.counted.sum().clamp(min=1).double() / whole.counted.sum().clamp(min=1))
        if loss_type in ("grpo", "sapo", "dr_grpo", "luspo"):
            return len(self.prompt_ids) / len(whole.prompt_ids)
        return 1.0  # divided by the tokens of the whole generation batch


_SHAPES: dict[str, str] = {f.name: f.metadata["shape"] for f in fields(TrainBatch) if f.metadata}


def _trimmed(part: Batch, multiple: int | None) -> Batch:
    """Drop the columns of fields that are padding in every row."""
    width, length = (_width(part[f"{name}_mask"], multiple) for name in ("prompt", "completion"))
    sizes = {_PROMPT: width, _TOKENS: length}
    if "path_ids" in part:
        lengths = part["path_lengths"]
        sizes |= {_FLAT: int(lengths.sum(dim=1).max()), _PATHS: int((lengths > 0).sum(dim=1).max())}
    if "kept_sizes" in part:
        sizes[_WORDS] = int(part["kept_sizes"].sum(dim=1).max())
    if "image_places" in part:
        sizes[_IMAGES] = int((part["image_places"][..., 0] >= 0).sum(dim=1).max())
    return {name: _cut(value, _SHAPES[name], sizes) for name, value in part.items()}


def _cut(value: torch.Tensor, shape: str, sizes: dict[str, int]) -> torch.Tensor:
    if shape == _PROMPT:
        return value[:, value.size(1) - sizes[shape] :]
    return value[:, : sizes[shape]] if shape in sizes else value


def _width(mask: torch.Tensor, multiple: int | None) -> int:
    return -(-int(mask.sum(dim=1).max()) // (multiple or 1)) * (multiple or 1)


def paths_of(part: Batch) -> Paths | None:
    """Return the paths of a micro-batch in TRL's form; None if each episode is its prompt and completion."""
    if "path_ids" not in part:
        return None
    return Paths.of(part["path_ids"], part["path_lengths"], part["places"])


def with_hints(part: Batch) -> Batch:
    """Return the fields that a forward pass takes of a micro-batch, each path preceded by the hint of its episode."""
    read = {name: part[name] for name in READ if name in part}
    if "hint_ids" not in part:
        return read
    hints, there = part["hint_ids"].clamp(min=0), part["hint_ids"] >= 0
    ids = torch.cat([hints, read["prompt_ids"]], dim=1)
    mask = torch.cat([there.to(read["prompt_mask"]), read["prompt_mask"]], dim=1)
    order = mask.argsort(dim=1, stable=True)  # padding to the left
    read |= {"prompt_ids": ids.gather(1, order), "prompt_mask": mask.gather(1, order)}
    if "path_ids" not in read:
        return read
    lengths, size, places = read["path_lengths"], there.sum(dim=1, keepdim=True), read["places"]
    longer = torch.where(lengths > 0, lengths + size, 0)
    ends, starts = lengths.cumsum(dim=1), longer.cumsum(dim=1) - longer
    columns = torch.arange(read["path_ids"].size(1), device=hints.device).expand_as(read["path_ids"]).contiguous()
    path = torch.searchsorted(ends, columns, right=True).clamp(max=lengths.size(1) - 1)
    moved, kept = columns + size * (path + 1), columns < ends[:, -1:]
    flat = hints.new_zeros(len(hints), int(longer.sum(dim=1).max()))
    row, column = kept.nonzero(as_tuple=True)
    flat[row, moved[row, column]] = read["path_ids"][row, column]
    for one in range(lengths.size(1)):
        row, column = (there & (lengths[:, one : one + 1] > 0)).nonzero(as_tuple=True)
        flat[row, starts[row, one] + column] = hints[row, column]
    moved = moved.gather(1, places.clamp(min=0))
    return read | {"path_ids": flat, "path_lengths": longer, "places": torch.where(places >= 0, moved, -1)}


def lengths_of(part: Batch) -> torch.Tensor:
    """Return the number of tokens (B,) of each episode: prompt and completion, or all paths."""
    if "path_lengths" in part:
        return part["path_lengths"].sum(dim=1)
    return part["prompt_mask"].sum(dim=1) + part["completion_mask"].sum(dim=1)


def read_of(batch: TurnBatch) -> Batch:
    """Return the fields that a forward pass takes."""
    return {name: value for name in READ if (value := getattr(batch, name)) is not None}


def length_sorted_batches(
    batch: TurnBatch,
    size: int,
    multiple: int | None,
    rows: torch.Tensor | None = None,
    split: Callable[[Batch], Iterable[Pass]] | None = None,
) -> Iterator[tuple[torch.Tensor, Batch]]:
    """Yield micro-batches of rows of similar length, for forward passes without gradient.

    Args:
        batch: The episodes.
        size: Rows of a micro-batch.
        multiple: See :meth:`TrainBatch.trimmed`.
        rows: (R,) int64, the rows to read. Default: all.
        split: Splits the rows of a micro-batch into forward passes. An empty pass reads a row again. Default: one pass.

    Yields:
        The rows of a micro-batch, and the fields that a model reads, without columns that are padding in all rows.
    """
    fields_read = read_of(batch)
    lengths = lengths_of(fields_read)
    ordered = lengths.argsort() if rows is None else rows[lengths[rows].argsort()]
    for together in ordered.split(size) if len(ordered) else ():
        whole = {name: value[together] for name, value in fields_read.items()}
        for one in [Pass(torch.arange(len(together)))] if split is None else split(whole):
            places = one.rows if len(one.rows) else torch.zeros(1, dtype=torch.long)
            places = places.to(together.device)
            part = {name: value[places] for name, value in whole.items()}
            if one.tokens is not None:
                part["places"] = torch.where(one.tokens, part["places"], -1)
            yield together[places], _trimmed(part, multiple)


def gather_rows(accelerator: Accelerator, *columns: torch.Tensor) -> list[torch.Tensor]:
    """Gather the rows of all processes, (B,) or (B, ...) each, padded with 0 to one number of columns."""
    return [accelerator.gather(accelerator.pad_across_processes(column, dim=1)) for column in columns]


def own_rows(accelerator: Accelerator, count: int) -> slice:
    """Return the rows of this process among those of all, of which each has ``count``."""
    return slice(accelerator.process_index * count, (accelerator.process_index + 1) * count)


def read_inputs(part: Batch) -> Batch:
    """Make the ``input_ids`` and ``attention_mask`` of TRL's method from a micro-batch: prompt and completion as one row."""
    return {
        "input_ids": torch.cat([part["prompt_ids"], part["completion_ids"]], dim=1),
        "attention_mask": torch.cat([part["prompt_mask"], part["completion_mask"]], dim=1),
    }


def exchange_rows(
    micro_batches: list[Batch], args: Any, order_of: Callable[[Batch], torch.Tensor] | None = None
) -> list[Batch]:
    """Exchange rows between the micro-batches of one accumulation window so that each holds rows that belong together.

    The window's gradient is a sum over its rows, so only the padding changes, and what is shared. What compares the tokens
    of a micro-batch would compare those of one length, with which rewards may go: it keeps TRL's random rows.

    Args:
        micro_batches: In the order of the updates, in TRL's form.
        args: A ``MultiTurnConfig``; nothing is exchanged where a window ends inside a generation batch, nor with
            ``loss_type="bnpo"``, ``top_entropy_quantile`` and ``use_adaptive_entropy``.
        order_of: Returns the order of the rows of a window. Default: by length.
    """
    steps, accumulation = args.steps_per_generation, args.gradient_accumulation_steps
    compared = args.loss_type == "bnpo" or args.top_entropy_quantile < 1.0 or args.use_adaptive_entropy
    if compared or (steps % accumulation and accumulation % steps):
        return micro_batches
    window, ordered = min(steps, accumulation), list[Batch]()
    for start in range(0, len(micro_batches), window):
        group = micro_batches[start : start + window]
        # 0-d entries are the same in every micro-batch.
        joined = {
            name: torch.cat([batch[name] for batch in group]) if value.ndim else value
            for name, value in group[0].items()
        }
        order = (order_of or order_by_length)(joined)
        ordered += [
            {name: value[rows] if value.ndim else value for name, value in joined.items()}
            for rows in order.split(len(group[0]["prompt_ids"]))
        ]
    return ordered


def rows_read(part: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the rows that a model reads for a micro-batch.

    Returns:
        Their tokens and attention mask, (Q, S) int64 each, and the episode (Q,) of each; None if each is an episode.
    """
    paths = paths_of(part)
    if paths is None:
        inputs = read_inputs(part)
        return inputs["input_ids"], inputs["attention_mask"], None
    return paths.ids, paths.mask, paths.episodes


def order_by_length(part: Batch) -> torch.Tensor:
    """Return the order (B,) of rows by their number of tokens."""
    return lengths_of(part).argsort(stable=True)


# ---------------------------------------------------------------------------------------------- rows that a model reads


@dataclass(frozen=True)
class Paths:
    """The Q paths of B episodes, as rows of S columns.

    A *cell* is an index into the flattened rows, ``row * S + column``.
    """

    ids: torch.Tensor
    """(Q, S) int64, right-padded."""
    mask: torch.Tensor
    """(Q, S) int64, 1 on tokens."""
    episodes: torch.Tensor
    """(Q,) int64, the episode of each row, ascending."""
    cells: torch.Tensor
    """(B, T) int64, cell of each action token; -1 elsewhere."""
    flat: torch.Tensor
    """(B, F) int64, cell of each token of ``path_ids``; 0 where there is none, or its path is left out."""
    there: torch.Tensor
    """(B, F) bool, True on tokens of ``path_ids`` that are in the rows."""

    @classmethod
    def of(cls, path_ids: torch.Tensor, path_lengths: torch.Tensor, places: torch.Tensor) -> Paths:
        """Lay out the paths that hold action tokens.

        Args:
            path_ids: (B, F) int64, the paths of each episode, one after another.
            path_lengths: (B, M) int64.
            places: (B, T) int64, column in ``path_ids`` of each action token, -1 elsewhere. Paths without any are left out;
                an episode without any keeps its first.
        """
        ends = path_lengths.cumsum(dim=1)
        columns = torch.arange(path_ids.size(1), device=path_ids.device).expand_as(path_ids).contiguous()
        path = torch.searchsorted(ends, columns, right=True).clamp(max=path_lengths.size(1) - 1)
        there = columns < ends[:, -1:]
        column = columns - (ends - path_lengths).gather(1, path)
        sampled = (places >= 0).long()
        used = torch.zeros_like(path_lengths).scatter_add(1, path.gather(1, places.clamp(min=0)), sampled)
        used[:, 0] += used.sum(dim=1) == 0
        episodes, chosen = used.nonzero(as_tuple=True)
        row = torch.full_like(path_lengths, -1)
        row[episodes, chosen] = torch.arange(len(episodes), device=row.device)
        lengths = path_lengths[episodes, chosen]
        width = int(lengths.max())
        row = row.gather(1, path)
        kept = there & (row >= 0)
        flat = torch.where(kept, row * width + column, 0)
        ids = path_ids.new_zeros(len(episodes) * width)
        ids[flat[kept]] = path_ids[kept]
        mask = (torch.arange(width, device=row.device) < lengths[:, None]).long()
        cells = torch.where(places >= 0, flat.gather(1, places.clamp(min=0)), -1)
        return cls(ids.view(-1, width), mask, episodes, cells, flat, kept)

    def at(self, columns: torch.Tensor) -> torch.Tensor:
        """Return the cells (B, U) of columns (B, U) of ``path_ids``; any cell for a column that is not in the rows."""
        return self.flat.gather(1, self._inside(columns))

    def has(self, columns: torch.Tensor) -> torch.Tensor:
        """Return (B, U) bool, True for columns (B, U) of ``path_ids`` that are in the rows."""
        return self.there.gather(1, self._inside(columns))

    def _inside(self, columns: torch.Tensor) -> torch.Tensor:
        return columns.clamp(0, self.flat.size(1) - 1)
