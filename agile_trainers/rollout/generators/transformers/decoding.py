"""The batch of answers that are decoded together, and the inputs of its next forward pass."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedTokenizerBase, StopStringCriteria

from agile_trainers.rollout.generators.base import GenerationRequest, SamplingSettings
from agile_trainers.rollout.generators.images import ImageReader, Shown
from agile_trainers.rollout.generators.transformers.kv_cache import KVBatch
from agile_trainers.types import Picture

NO_TOKEN = torch.iinfo(torch.int64).max
"""Padding for stop strings: ``StopStringCriteria`` never matches ids beyond the vocabulary."""


@dataclass(eq=False)
class CachedLineage:
    """Ids that an episode's model has read or will read, and where their keys and values are."""

    episode: int
    ids: list[int]
    """All ids so far, the last sampled one included."""
    kv: KVBatch | None = None
    row: int = 0
    """Row of ``kv`` that begins with the lineage's keys and values. A copy has its original's until it is decoded."""
    cached: int = 0
    """Number of ``ids``, the first ones, whose keys and values are kept."""
    pictures: Sequence[Picture] = ()
    """The images among ``ids``, in order."""
    busy: bool = True
    """True while a request is pending that extends it."""


@dataclass(eq=False)
class SampledAnswer:
    """One pending request and its sampled tokens."""

    request: GenerationRequest
    lineage: CachedLineage
    read: int
    """Number of the request's ids whose keys and values were not kept when it was submitted."""
    logprobs: list[float] = field(default_factory=list)
    kept: list[bytes] = field(default_factory=list)
    """The set of tokens that was kept for each, with settings that remove tokens."""

    @property
    def token_ids(self) -> list[int]:
        """The ids sampled for the request so far."""
        return self.lineage.ids[len(self.request.token_ids) :]


@dataclass
class DecodingBatch:
    """Rows that are decoded in one forward pass: ``R`` rows, each of which reads ``q`` new columns."""

    rows: list[SampledAnswer | None]
    """None: the row's answer is finished; the row idles until the next repacking."""
    alive: torch.Tensor
    """(R,) bool, True for rows that are not None."""
    kv: KVBatch
    input_ids: torch.Tensor
    """(R, q) int64, left-padded."""
    input_mask: torch.Tensor
    """(R, q) bool, False on padding and on idle rows."""
    position_ids: torch.Tensor
    """(R, q) int64; (3, R, q) where rotary positions have several axes."""
    shown: Shown | None = None
    """The images of the next input."""
    types: dict[str, torch.Tensor] = field(default_factory=dict)
    """Further inputs of the model, to read these."""
    history: torch.Tensor | None = None
    """(R, L) int64, every id of the row, padded with its first one, for the repetition penalty."""
    recent: torch.Tensor | None = None
    """(R, S) int64, the last ids of the row's answer, padded with ``NO_TOKEN``, for stop strings."""

    @property
    def active(self) -> list[SampledAnswer]:
        """The answers that are not finished."""
        return [row for row in self.rows if row is not None]

    def record(self, tokens: torch.Tensor) -> None:
        """Append the (R,) sampled ``tokens`` to the ids that penalty and stop strings read."""
        if self.history is not None:
            self.history = torch.cat([self.history, tokens[:, None]], dim=1)
        if self.recent is not None:
            self.recent = torch.cat([self.recent[:, 1:], tokens[:, None]], dim=1)

    def feed(self, tokens: torch.Tensor, after_all: bool = False) -> None:
        """Set the next input to the (R,) sampled ``tokens``, alone or ``after_all`` earlier input."""
        ids, mask = tokens[:, None].to(self.input_ids.device), self.alive[:, None]
        # An idle row stays at its last position, which is always valid.
        positions = self.position_ids[..., -1:] + mask
        if after_all:
            ids = torch.cat([self.input_ids, ids], dim=1)
            mask = torch.cat([self.input_mask, mask], dim=1)
            positions = torch.cat([self.position_ids, positions], dim=-1)
        else:
            self.shown, self.types = None, {}
        self.input_ids, self.input_mask, self.position_ids = ids, mask, positions

    def drop(self, finished: Collection[SampledAnswer]) -> None:
        """Mark the rows of ``finished`` as idle."""
        self.rows = [None if row in finished else row for row in self.rows]
        self.alive = placed([row is not None for row in self.rows], torch.bool, self.alive.device)


def decoding_batch(
    answers: Sequence[SampledAnswer], kv: KVBatch, pad_token_id: int, reader: ImageReader | None = None
) -> DecodingBatch:
    """Make a batch whose next input is the part of each answer's lineage that ``kv`` does not hold.

    Args:
        answers: The answers, in the order of the rows of ``kv``.
        kv: Keys and values read so far.
        pad_token_id: Padding of ``input_ids``.
        reader: Shows images.
    """
    device = kv.mask.device
    unread = [answer.lineage.ids[answer.lineage.cached :] for answer in answers]
    input_ids = left_pad(unread, [pad_token_id] * len(unread)).to(device)
    cached = torch.tensor([[answer.lineage.cached] for answer in answers], device=device)
    padding = torch.tensor([[input_ids.shape[1] - len(ids)] for ids in unread], device=device)
    offsets = torch.arange(input_ids.shape[1], device=device) - padding
    batch = DecodingBatch(
        rows=list(answers),
        alive=torch.ones(len(answers), dtype=torch.bool, device=device),
        kv=kv,
        input_ids=input_ids,
        input_mask=offsets >= 0,
        position_ids=(cached + offsets).clamp(min=0),
    )
    lineages = [answer.lineage for answer in answers]
    images = reader and reader.of_rows(
        [(one.ids, one.pictures, one.cached) for one in lineages], input_ids.shape[1], device
    )
    if images:
        batch.shown, batch.types = images
        batch.position_ids = batch.types.pop("position_ids", batch.position_ids)
    return batch


def placed(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Make a tensor on a device without waiting for what the device computes, which copies of pageable memory do."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def left_pad(sequences: Sequence[list[int]], fills: Sequence[int]) -> torch.Tensor:
    """Pad each sequence on the left with its own fill to (R, longest) int64."""
    width = max(map(len, sequences))
    return torch.tensor([[fill] * (width - len(ids)) + ids for ids, fill in zip(sequences, fills)])


_stop_criteria = WeakKeyDictionary[PreTrainedTokenizerBase, dict[tuple[int, tuple[str, ...]], StopStringCriteria]]()


def stop_criteria(settings: SamplingSettings, tokenizer: PreTrainedTokenizerBase | None) -> StopStringCriteria | None:
    """Make transformers' criterion for stop strings; None if there are none.

    Raises:
        ValueError: If there are stop strings but no tokenizer.
    """
    if not settings.stop_strings:
        return None
    if tokenizer is None:
        raise ValueError(f"`stop_strings` {list(settings.stop_strings)} need a tokenizer: pass `tokenizer=`.")
    # For 150,000 tokens a criterion takes .8 s to make. The cache of transformers does not find it again: a fast tokenizer's
    # `get_vocab` has another order at each call.
    made, asked = _stop_criteria.setdefault(tokenizer, {}), (len(tokenizer), settings.stop_strings)
    if asked not in made:
        made[asked] = StopStringCriteria(tokenizer, list(settings.stop_strings))
    return made[asked]
