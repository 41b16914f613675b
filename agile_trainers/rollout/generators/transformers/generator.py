"""A sampler on a transformers model that keeps the KV cache between the turns of an episode."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PretrainedConfig, PreTrainedTokenizerBase
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from agile_trainers.adapters.roles import base_model
from agile_trainers.objectives.kept_sets import as_bits, sets_of_bits
from agile_trainers.rollout.generators.architecture import (
    Reading,
    attends_plainly,
    attention_configs,
    cache_argument,
    check_padding,
    reading,
    takes_logits_to_keep,
    takes_position_ids,
)
from agile_trainers.rollout.generators.base import (
    Conversations,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    LogitsError,
    SamplingSettings,
    check_token_ids,
)
from agile_trainers.rollout.generators.images import reader_of
from agile_trainers.rollout.generators.transformers.decoding import (
    NO_TOKEN,
    CachedLineage,
    DecodingBatch,
    SampledAnswer,
    Sampler,
    decoding_batch,
    left_pad,
    placed,
    stop_criteria,
)
from agile_trainers.rollout.generators.transformers.kv_cache import GrowingLayer, KVBatch, pack
from agile_trainers.types import common_prefix, keyed

logger = logging.getLogger(__name__)

KEPT = 2
"""Lineages of an episode whose keys and values are kept beside those being decoded: a conversation, and one on the side."""


class TransformersGenerator:
    """Decodes with a causal language model, token by token, and keeps each episode's keys and values between turns.

    A turn reads only the ids appended since the last one. A request that does not extend what its episode read (a rewritten
    context, a question on the side) reads the ids after the longest prefix that it shares with a lineage of its episode. If
    the prefix is at least half of what is kept of that lineage, the lineage ends there and goes on as the request's;
    otherwise, and while the lineage is decoded, the prefix is copied. Of the lineages that are not decoded the ``KEPT`` last
    used ones of each episode are kept.

    Waiting requests join the batch when they are at least as many
    as its rows, so that prefill and repacking are shared. Finished rows leave the batch when fewer than half of it are
    active. Batching does not change an episode's tokens: they depend on its ids and uniforms alone, up to rounding in the
    model.

    A model with layers other than plain full attention (sliding window, recurrent, hybrid), or without position ids,
    cannot be repacked. It reads the whole conversation again each turn, with its own cache class, and takes new
    requests only when no row is decoding. A model without a cache, or whose cached decoding differs from its
    full forward pass, reads the whole conversation again for every token. See :func:`.architecture.reading`.

    The model must be in eval mode while ``step`` runs; training mode is an error. Gradients are not recorded.

    Args:
        model: A transformers causal language model, or a ``PeftModel`` around one (any adapter except prompt learning).
        eos_token_ids: Tokens that end an answer; they belong to it.
        pad_token_id: Any id of the vocabulary; it fills masked columns.
        settings: Sampling options.
        tokenizer: Needed for ``settings.stop_strings`` only.
        max_batch_size: Maximum number of lineages that are decoded or have a cache; requests for others wait. An episode
            whose environment steps keeps the cache of its last request, unless all others wait for the room. Its other
            lineages make room at once. Default: no limit.

    Raises:
        ValueError: For stop strings without a tokenizer, an id outside the vocabulary, ``max_batch_size`` below 1, a
            prompt-learning adapter, or a model whose recurrence includes padding.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        settings: SamplingSettings,
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        base = base_model(model)
        if max_batch_size is not None and max_batch_size < 1:
            raise ValueError(f"`max_batch_size` is {max_batch_size}, expected at least 1, or None for no limit.")
        if isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning:
            raise ValueError("Prompt-learning adapters are not supported: they put tokens before every forward pass.")
        check_token_ids("eos_token_ids", eos_token_ids, base.config.get_text_config().vocab_size)
        check_token_ids("pad_token_id", [pad_token_id], base.config.get_text_config().vocab_size)
        self.model = model
        self._device = base.device
        self._eos_token_ids = frozenset(eos_token_ids)
        self._pad_token_id = pad_token_id
        self._settings = settings
        self._sampler = Sampler(settings, sorted(self._eos_token_ids))
        self._stop = stop_criteria(settings, tokenizer)
        self._max_batch_size = max_batch_size
        check_padding(base)
        self._takes_positions = takes_position_ids(base)
        self._options = {"logits_to_keep": 1} if takes_logits_to_keep(base) else {}
        self._reading, self._reader = reading(base), reader_of(base)
        self._cache_argument = cache_argument(base) or ""  # a model without one reads the conversation for every token
        self._keeps_cache = self._reading is Reading.NEW
        plain = attends_plainly(base)
        self._decoded_by = [one for one in attention_configs(base) if plain and one._attn_implementation == "sdpa"]
        """Configurations of layers whose next token is read by the attention of this file."""
        if not self._keeps_cache:
            _log_rereading(base.config.model_type, self._reading)
        # MPS has no float64.
        self._sampling_device = torch.device("cpu") if self._device.type == "mps" else self._device
        self._conversations = Conversations[SampledAnswer]()
        self._lineages: dict[int, list[CachedLineage]] = {}  # of each episode, in the order of their last requests
        self._waiting: list[SampledAnswer] = []
        self._batch: DecodingBatch | None = None

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request.

        Raises:
            ValueError: If the episode has a pending request of the same ``call``, the prompt is empty, ``max_new_tokens`` is
                below 1, or the ids do not start with those of the last request and its answer, and ``extends`` is true.
        """
        self._conversations.check(request)
        lineage = self._lineage_for(request)
        answer = SampledAnswer(request, lineage, read=len(lineage.ids) - lineage.cached)
        self._conversations.submitted(request, answer)
        self._waiting.append(answer)

    @torch.no_grad()
    def step(self) -> list[GenerationOutput]:
        """Sample one token for every row of the batch and return the finished answers. Empty when idle.

        Raises:
            RuntimeError: If the model is in training mode.
            LogitsError: If the model's logits are not numbers.
        """
        self._repack_if_due()
        if self._batch is None:
            return []
        return self._extend(self._batch, self._forward(self._batch))

    @property
    def pending(self) -> int:
        """Number of requests submitted and not yet returned."""
        return len(self._conversations.pending)

    def release(self, episode: int) -> None:
        """Forget an episode and its pending requests, if any."""
        self._lineages.pop(episode, None)
        answers = self._conversations.release(episode)
        decoding = [answer for answer in answers if answer not in self._waiting]
        self._waiting = [answer for answer in self._waiting if answer not in answers]
        if decoding:
            self._drop(decoding)

    # ------------------------------------------------------------------------------------------------ what is kept

    def _lineage_for(self, request: GenerationRequest) -> CachedLineage:
        """Take, crop or copy the lineage that shares most with a request, or begin one."""
        lineages = self._lineages.setdefault(request.episode, [])
        ids, pictures = list(request.token_ids), request.pictures
        own = keyed(ids, pictures)
        # The last id is always read, for its logits.
        known = {kept: keyed(kept.ids, kept.pictures) for kept in lineages}
        shared = {kept: min(common_prefix(known[kept], own), kept.cached, len(ids) - 1) for kept in lineages}
        # Of those that share the same, one that can be taken, and the last used one.
        source = max(lineages, key=lambda kept: (shared[kept], not kept.busy, lineages.index(kept)), default=None)
        if source is None or not shared[source]:
            lineages.append(CachedLineage(request.episode, ids))
        elif not source.busy and (2 * shared[source] >= source.cached or not self._has_room()):
            lineages.remove(source)
            source.ids, source.cached, source.busy = ids, shared[source], True
            lineages.append(source)
        elif self._has_room():
            lineages.append(CachedLineage(request.episode, ids, source.kv, source.row, shared[source]))
        else:
            lineages.append(CachedLineage(request.episode, ids))
        lineages[-1].pictures = pictures
        return lineages[-1]

    def _has_room(self) -> bool:
        return self._max_batch_size is None or len(self._with_cache()) < self._max_batch_size

    def _with_cache(self) -> list[CachedLineage]:
        """Return the lineages that have a cache, each of which counts as a row, before it has one of its own too."""
        return [kept for lineages in self._lineages.values() for kept in lineages if kept.kv is not None]

    def _keep(self, lineage: CachedLineage) -> None:
        """Keep a lineage whose answer is finished, instead of its episode's least recently used one."""
        lineage.busy = False
        idle = [kept for kept in self._lineages[lineage.episode] if not kept.busy]
        self._forget(idle[: -KEPT if self._keeps_cache else None])

    def _forget(self, lineages: Iterable[CachedLineage]) -> None:
        """Free the keys and values of lineages; a request that extends one reads the whole conversation."""
        for lineage in lineages:
            self._lineages[lineage.episode].remove(lineage)
            if lineage.kv is not None:
                self._shrink(lineage.kv)

    # ------------------------------------------------------------------------------------------------- who decodes

    def _repack_if_due(self) -> None:
        """Add waiting requests and remove finished rows when repacking is worth its cost."""
        active = self._batch.active if self._batch else []
        joining = self._admissible(active)
        if active and (not self._keeps_cache or len(joining) < len(active)):
            joining = []
        mostly_idle = self._batch is not None and 2 * len(active) < len(self._batch.rows)
        if joining or (mostly_idle and self._keeps_cache):
            for answer in joining:
                self._waiting.remove(answer)
            self._repack([*active, *joining])

    def _admissible(self, active: list[SampledAnswer]) -> list[SampledAnswer]:
        """Return the waiting answers for which there is room: those whose episode has a cache, then new ones."""
        if self._max_batch_size is None or not self._waiting:
            return list(self._waiting)
        known = [answer for answer in self._waiting if answer.lineage.kv is not None]
        new = [answer for answer in self._waiting if answer.lineage.kv is None]
        cached = self._with_cache()
        idle = [lineage for lineage in cached if not lineage.busy]
        spare = [lineage for lineage in idle if lineage is not self._lineages[lineage.episode][-1]]
        # If nothing else goes on, episodes whose environment steps make room too, and are read again.
        stepping = [] if active or known else [lineage for lineage in idle if lineage not in spare]
        missing = len(cached) + min(len(new), self._max_batch_size) - self._max_batch_size
        gone = [*stepping, *reversed(spare)][-missing:] if missing > 0 else []
        self._forget(gone)
        return known + new[: self._max_batch_size - max(len(active), len(cached) - len(gone))]

    def _repack(self, answers: list[SampledAnswer]) -> None:
        """Make a batch of ``answers`` whose next forward pass reads each answer's unread ids."""
        _check_eval_mode(self.model)
        # `pack` needs the rows of one source together, and rows without cache last.
        order = list(dict.fromkeys(answer.lineage.kv for answer in answers))
        answers.sort(key=lambda answer: (answer.lineage.kv is None, order.index(answer.lineage.kv)))
        kv = self._gather([answer.lineage for answer in answers])
        self._batch = decoding_batch(answers, kv, self._pad_token_id, self._reader)
        if self._sampler.penalty:
            conversations = [answer.lineage.ids for answer in answers]
            history = left_pad(conversations, [ids[0] for ids in conversations])
            self._batch.history = history.to(self._sampling_device)
        if self._stop is not None:
            filler = [NO_TOKEN] * self._stop.maximum_token_len
            recent = [[*filler, *answer.token_ids][-len(filler) :] for answer in answers]
            self._batch.recent = torch.tensor(recent, device=self._sampling_device)

    def _gather(self, lineages: list[CachedLineage]) -> KVBatch:
        """Gather the keys and values of ``lineages`` in one new batch."""
        if not self._keeps_cache:
            return KVBatch(None, self._no_columns(len(lineages)))
        sources: dict[KVBatch, list[int]] = {}
        for lineage in lineages:
            if lineage.kv is not None:
                sources.setdefault(lineage.kv, []).append(lineage.row)
        if sources:
            unread = max(len(lineage.ids) - lineage.cached for lineage in lineages)
            kv = pack(list(sources.items()), [lineage.cached for lineage in lineages], room=unread)
        else:
            kv = KVBatch(Cache(layer_class_to_replicate=GrowingLayer), self._no_columns(len(lineages)))
        _move(lineages, kv)
        for source in sources:
            self._shrink(source)
        return kv

    def _no_columns(self, rows: int) -> torch.Tensor:
        return torch.zeros(rows, 0, dtype=torch.bool, device=self._device)

    def _shrink(self, kv: KVBatch) -> None:
        """Copy the remaining rows of a batch that most lineages have left, to free the memory of the others."""
        if self._batch is not None and any(answer.lineage.kv is kv for answer in self._batch.active):
            return  # it is repacked when most of its rows idle
        residents = [lineage for lineage in self._with_cache() if lineage.kv is kv]
        if residents and 2 * len(residents) <= len(kv.mask):
            rows, counts = [lineage.row for lineage in residents], [lineage.cached for lineage in residents]
            _move(residents, pack([(kv, rows)], counts))

    # --------------------------------------------------------------------------------------------------- one token

    def _forward(self, batch: DecodingBatch) -> torch.Tensor:
        """Compute the (R, V) logits of the next token, and add the input to the cache."""
        options: dict[str, Any] = {**self._options, **batch.types}
        if self._takes_positions:
            options["position_ids"] = batch.position_ids
        with nullcontext() if self._reader is None else self._reader.showing(batch.shown):
            return self._logits(batch, options)

    def _logits(self, batch: DecodingBatch, options: dict[str, Any]) -> torch.Tensor:
        if self._reading is Reading.TOKEN:
            outputs = self.model(input_ids=batch.input_ids, attention_mask=batch.input_mask, use_cache=False, **options)
            return outputs.logits[:, -1].to(self._sampling_device)
        batch.kv.mask = torch.cat([batch.kv.mask, batch.input_mask], dim=1)
        with _decoding(self._decoded_by if batch.input_ids.shape[1] == 1 else []):
            outputs = self.model(
                input_ids=batch.input_ids,
                attention_mask=batch.kv.mask,
                use_cache=True,
                **options,
                **{self._cache_argument: batch.kv.cache},
            )
        batch.kv.cache = outputs[self._cache_argument]
        return outputs.logits[:, -1].to(self._sampling_device)

    def _extend(self, batch: DecodingBatch, logits: torch.Tensor) -> list[GenerationOutput]:
        """Sample a token for every row, append it to the row's answer and return the finished answers."""
        tokens, logprobs, kept = self._sample(batch, logits)
        batch.record(tokens)
        stopped = torch.zeros_like(logprobs) if self._stop is None else self._stop(batch.recent, None)
        outputs, finished = [], []
        drawn, sets = self._read(torch.stack([tokens.double(), logprobs, stopped.double()], dim=1), kept)
        for row, (answer, (token, logprob, stop)) in enumerate(zip(batch.rows, drawn)):
            if answer is None:
                continue
            reason = self._append(answer, int(token), logprob, bool(stop))
            answer.kept += sets[row : row + 1]
            if reason:
                outputs.append(self._finish(answer, reason))
                finished.append(answer)
        if finished:
            self._drop(finished)
        batch.feed(tokens, after_all=self._reading is Reading.TOKEN)
        return outputs

    @staticmethod
    def _read(drawn: torch.Tensor, kept: torch.Tensor | None) -> tuple[list[list[float]], list[bytes]]:
        """Return what was drawn and the kept sets, by the only synchronization with the device per token."""
        if kept is None:
            return drawn.tolist(), []
        words = drawn.view(torch.int32)
        read = torch.cat([words, as_bits(kept)], dim=1).cpu().numpy()
        numbers, bits = read[:, : words.size(1)], read[:, words.size(1) :]
        return np.ascontiguousarray(numbers).view(np.float64).tolist(), sets_of_bits(bits, kept.size(1))

    def _sample(
        self, batch: DecodingBatch, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the token of each row, its log-probability, and what was kept, (R, V), with settings that remove any."""
        settings, device = self._settings, self._sampling_device
        uniforms = [row.request.uniforms(1)[0] if row and settings.do_sample else 0.0 for row in batch.rows]
        short = [row is not None and len(row.logprobs) < settings.min_new_tokens for row in batch.rows]
        hold_eos = placed(short, torch.bool, device) if any(short) else None
        noise = placed(uniforms, torch.float64, device)
        log_probs = self._sampler.distribution(logits, batch.history, hold_eos)
        kept = log_probs > -torch.inf if settings.filters else None
        return *self._sampler.draw(log_probs, noise), kept

    def _append(self, answer: SampledAnswer, token: int, logprob: float, stop: bool) -> FinishReason | None:
        """Append a token to an answer. Return the finish reason, or None if the answer goes on."""
        if math.isnan(logprob):
            raise LogitsError(f"The model's logits for episode {answer.request.episode} are not numbers (NaN).")
        lineage = answer.lineage
        lineage.cached = len(lineage.ids) if self._keeps_cache else 0
        lineage.ids.append(token)
        answer.logprobs.append(logprob)
        if stop or token in self._eos_token_ids:
            return "stop"
        return "length" if len(answer.logprobs) == answer.request.max_new_tokens else None

    def _finish(self, answer: SampledAnswer, reason: FinishReason) -> GenerationOutput:
        request, token_ids = answer.request, answer.token_ids
        self._conversations.answered(request, token_ids)
        self._keep(answer.lineage)
        kept = answer.kept if self._settings.filters else None
        return GenerationOutput(request.episode, token_ids, answer.logprobs, reason, request.call, answer.read, kept)

    def _drop(self, answers: list[SampledAnswer]) -> None:
        """Remove answers from the batch, and free the batch when it is empty."""
        assert self._batch is not None
        self._batch.drop(answers)
        if not self._batch.active:
            self._batch = None


def _move(lineages: list[CachedLineage], kv: KVBatch) -> None:
    for row, lineage in enumerate(lineages):
        lineage.kv, lineage.row = kv, row


def _check_eval_mode(model: torch.nn.Module) -> None:
    training = next((name for name, module in model.named_modules() if module.training), None)
    if training is not None:
        raise RuntimeError(
            f"The model is in training mode (module {training or 'model'!r}): dropout would change the distribution, "
            "and gradient checkpointing drops the cache. Call `model.eval()` before generating."
        )


@functools.cache
def _log_rereading(model_type: str, how: Reading) -> None:
    logger.warning(
        "%s cannot keep its cache between turns (layers other than plain full attention, or no position ids): it reads "
        "%s.%s",
        model_type,
        how.value,
        " This is slow for long answers; use_vllm=True is faster." if how is Reading.TOKEN else "",
    )


# ------------------------------------------------------------------------------------------------------------ attention


IMPLEMENTATION = "agile_decoding"
"""Name of the attention, and of its mask, in ``config._attn_implementation``."""


@contextmanager
def _decoding(configs: Sequence[PretrainedConfig]) -> Iterator[None]:
    """Let the attention of this file run in a forward pass inside the block, instead of torch's."""
    try:
        for config in configs:
            config._attn_implementation = IMPLEMENTATION
        yield
    finally:
        for config in configs:
            config._attn_implementation = "sdpa"


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from one token of each row, in the form of transformers' ``AttentionInterface``.

    Args:
        module: The layer.
        query: (R, heads, 1, D).
        key: (R, key heads, C, D), where the number of key heads divides that of heads.
        value: (R, key heads, C, E).
        attention_mask: (R, 1, 1, C), True for columns that are read. None: all.
        dropout: Must be 0 for the form of this file.
        scaling: Factor of the scores. Default: D ** -0.5.
        kwargs: Arguments of other kinds of attention. transformers' own attention runs where one of them, or a shape,
            asks for more than the form of this file.

    Returns:
        (R, 1, heads, E), and no weights.
    """
    masks_heads = attention_mask is not None and attention_mask.size(1) != 1
    if query.size(2) != 1 or dropout or masks_heads or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    folded = query.unflatten(1, (key.size(1), -1)).squeeze(3)
    output = scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    return output.flatten(1, 2).unsqueeze(1), None


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Make the mask of transformers' own attention, without asking the device whether it could be left out."""
    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


AttentionInterface.register(IMPLEMENTATION, attend)
AttentionMaskInterface.register(IMPLEMENTATION, _mask)
