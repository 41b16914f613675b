"""The batch of answers that are decoded together, the inputs of its next forward pass, and the choice of their tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from transformers import LogitsProcessorList, PreTrainedTokenizerBase, StopStringCriteria
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

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


class Sampler:
    """Samples the next token of each row, with ``GenerationMixin``'s processors in ``GenerationMixin``'s order.

    Args:
        settings: Sampling options.
        eos_token_ids: Tokens that a row may not sample before its ``min_new_tokens``-th token.
    """

    def __init__(self, settings: SamplingSettings, eos_token_ids: list[int]) -> None:
        self.greedy = not settings.do_sample
        self.eos_token_ids = eos_token_ids
        self._end: torch.Tensor | None = None
        self.penalty = LogitsProcessorList()
        if settings.repetition_penalty != 1.0:
            self.penalty.append(RepetitionPenaltyLogitsProcessor(float(settings.repetition_penalty)))
        self.warpers = LogitsProcessorList()
        if self.greedy:
            return
        if settings.temperature != 1.0:
            self.warpers.append(TemperatureLogitsWarper(float(settings.temperature)))
        if settings.top_k:
            self.warpers.append(TopKLogitsWarper(settings.top_k))
        if settings.top_p < 1.0:
            self.warpers.append(TopPLogitsWarper(settings.top_p))
        if settings.min_p is not None:
            self.warpers.append(MinPLogitsWarper(settings.min_p))

    def distribution(
        self, logits: torch.Tensor, history: torch.Tensor | None = None, hold_eos: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute the distribution that tokens are drawn from.

        Args:
            logits: (R, V), any float type.
            history: (R, L) ids for the repetition penalty, padded with ids of the same row. Needed with a penalty.
            hold_eos: (R,) bool, True for rows that are still too short to end. Default: none.

        Returns:
            (R, V) float64 log-probabilities, -inf for tokens that are removed: after every processor when sampling; after
            penalty and ``min_new_tokens``, at temperature 1, when greedy.
        """
        scores = self.penalty(history, logits.float())
        if hold_eos is not None:
            scores = scores.masked_fill(hold_eos[:, None] & self._ends(scores), -torch.inf)
        return self.warpers(history, scores).double().log_softmax(-1)

    def draw(self, log_probs: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose one token per row.

        Args:
            log_probs: (R, V) of :meth:`distribution`.
            uniforms: (R,) float64 in [0, 1); unused when greedy.

        Returns:
            (R,) int64 tokens and their (R,) float64 log-probabilities.
        """
        tokens = log_probs.argmax(-1) if self.greedy else draw_tokens(log_probs.exp(), uniforms)
        return tokens, log_probs.gather(-1, tokens[:, None])[:, 0]

    def _ends(self, scores: torch.Tensor) -> torch.Tensor:
        """Return (V,) bool, True at ends, made once: indexing with a list copies the list to the device."""
        if self._end is None:
            end = torch.zeros(scores.shape[-1], dtype=torch.bool)
            end[self.eos_token_ids] = True
            self._end = end.to(scores.device)
        return self._end


def draw_tokens(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Invert the cumulative distribution: the first token whose cumulative probability exceeds the uniform.

    A token of probability zero is never drawn, for any uniform and any rounding.

    Args:
        probs: (R, V) float64, rows summing to 1.
        uniforms: (R,) float64 in [0, 1).

    Returns:
        (R,) int64 tokens.
    """
    # Zero at impossible tokens, so that rounding in a parallel cumsum cannot raise one above its neighbours.
    cumulative = probs.cumsum(-1) * (probs > 0)
    # A uniform is at most 1 - 2**-53, which keeps the product below the total after rounding.
    target = uniforms[:, None] * cumulative.amax(-1, keepdim=True)
    return (cumulative > target).to(torch.uint8).argmax(-1)
