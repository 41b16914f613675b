"""A sampler on a vLLM engine in this process, with continuous batching and the policy as a LoRA adapter.

Importing this module imports vLLM, which takes seconds.
"""

from __future__ import annotations

import copy
import gc
import math
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig
from transformers import PreTrainedTokenizerBase
from trl.trainer.utils import ensure_master_addr_port
from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.distributed.parallel_state import (
    cleanup_dist_env_and_memory,
    destroy_model_parallel,
    model_parallel_is_initialized,
)
from vllm.logprobs import Logprob
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from agile_trainers.objectives.kept_sets import encode_sets, without
from agile_trainers.rollout.generators.base import (
    Conversations,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    SamplingSettings,
    check_room,
    check_token_ids,
    tokens_of_a_step,
)
from agile_trainers.rollout.generators.images import ImageReader, ImageRun
from agile_trainers.rollout.generators.transformers.decoding import NO_TOKEN, left_pad, stop_criteria
from agile_trainers.rollout.generators.vllm.adapter_host import AdapterHost, write_adapter
from agile_trainers.rollout.seeds import preserved_random_state

TEMPERATURES = 0.01, 2.0
"""Bounds of vLLM's temperature: it raises lower values to the first and rejects values above the second."""
FINISHED: dict[str | None, FinishReason] = {"stop": "stop", "length": "length"}
"""vLLM's reasons for the end of a whole answer, and ours. With any other it was broken off."""


class VllmEngine(AdapterHost[LoRARequest]):
    """A vLLM engine in this process. It serves one adapter to all requests that name none, and works on token ids.

    It is shut down by :meth:`close`, or when it is deleted, and its memory is freed.

    Args:
        model: Folder or Hub id of the base model.
        dtype: Data type of weights and activations.
        max_model_length: Maximum number of tokens of a conversation. Default: the model's limit.
        max_batch_size: Maximum number of requests decoded at the same time; the others wait.
        max_lora_rank: Maximum rank of an adapter. Default: no adapter is served.
        max_adapters: Maximum number of adapters at the same time; a further one replaces the oldest.
        process: Rank, local rank and number of processes, each of which has its own engine.
        **options: Further fields of ``vllm.EngineArgs``.

    Raises:
        ValueError: If vLLM cannot serve the model.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: torch.dtype,
        max_model_length: int | None,
        max_batch_size: int,
        max_lora_rank: int | None = None,
        max_adapters: int = 1,
        process: tuple[int, int, int] = (0, 0, 1),
        **options: Any,
    ) -> None:
        more: dict[str, Any] = {"skip_tokenizer_init": True}
        chunks = True
        if max_lora_rank is not None:
            more |= {"enable_lora": True, "max_lora_rank": max_lora_rank, "max_loras": max_adapters}
        if current_platform.is_cpu():
            # On CPU, compiling takes longer than it saves. Only full blocks are cached, and vLLM's blocks of 128 tokens are
            # long for a conversation. A request with its own seed fails when its prompt is prefilled in chunks
            # (RuntimeError "CPU Generator does not use offset", vLLM 0.31).
            more |= {"enforce_eager": True, "block_size": 32}
            chunks = False
        _collect()  # an engine whose trainer has been deleted may not have gone yet
        # vLLM seeds the generators of the whole process, the trainer's, with its own seed.
        with _launched_as(*process), _groups.used_by_engine(), preserved_random_state():
            arguments = EngineArgs(
                model=model,
                dtype=str(dtype).removeprefix("torch."),
                max_model_len=max_model_length,
                max_num_seqs=max_batch_size,
                max_num_batched_tokens=tokens_of_a_step(max_batch_size, max_model_length, chunks=chunks),
                enable_chunked_prefill=chunks,
                logprobs_mode="processed_logprobs",  # log-probabilities of the sampling distribution
                max_logprobs=-1,  # any number, by which kept sets are read
                enable_prefix_caching=True,
                generation_config="vllm",  # ignores the model's sampling defaults
                distributed_executor_backend="external_launcher",  # in this process, beside the trainer's process group
                disable_log_stats=True,
                **(more | options),
            )
            self.engine = LLMEngine.from_engine_args(arguments)
        core: Any = self.engine.engine_core
        core._finalizer.detach()  # it would destroy the process groups of the trainer and of other engines
        self._shut_down = weakref.finalize(self, _shut_down, core.engine_core)
        self.max_model_length: int = self.engine.model_config.max_model_len
        self.vocab_size: int = self.engine.model_config.get_vocab_size()
        self.max_adapters = max_adapters
        self._versions = self._requests = 0

    def add_adapter(self, weights: Mapping[str, torch.Tensor], config: LoraConfig) -> tuple[LoRARequest, int]:
        self._versions += 1
        with tempfile.TemporaryDirectory(prefix="vllm-policy-") as folder:
            moved = write_adapter(Path(folder), weights, config)
            adapter = LoRARequest(f"policy-{self._versions}", self._versions, folder)
            self.engine.add_lora(adapter)
        return adapter, moved

    def drop_adapter(self, adapter: LoRARequest) -> None:
        self.engine.remove_lora(adapter.lora_int_id)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Replace the weights of the base model.

        Args:
            weights: All weights, under the names of the model's own checkpoint.

        Returns:
            Number of bytes transferred.
        """
        moved = 0

        def counted() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal moved
            for name, weight in weights:
                moved += weight.nbytes
                yield name, weight

        self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": counted()})
        self.engine.reset_prefix_cache()
        return moved

    def submit(self, prompt: Any, params: SamplingParams, adapter: LoRARequest | None = None) -> str:
        """Queue what :func:`prompt_of` makes, for an adapter or for that of :meth:`load_adapter`, and return its key."""
        self._requests += 1
        key = str(self._requests)
        self.engine.add_request(key, prompt, params, lora_request=adapter or self.adapter)
        return key

    @property
    def is_open(self) -> bool:
        """True until :meth:`close`."""
        return self._shut_down.alive

    def close(self) -> None:
        """Shut the engine down and free its memory. Called again, it does nothing."""
        if self.is_open:
            self.adapter = None
            del self.engine
            self._shut_down()
            _collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


class _Groups:
    """The process groups that vLLM makes for all engines of this process; they go with the last one."""

    def __init__(self) -> None:
        self._engines = 0
        self._default_is_ours = self._others_are_ours = False

    @contextmanager
    def used_by_engine(self) -> Iterator[None]:
        """Count the engine that is made in this block, unless that fails, until :meth:`leave`."""
        if not self._engines:
            self._default_is_ours = not dist.is_initialized()  # the trainer's otherwise
            self._others_are_ours = not model_parallel_is_initialized()
        self._engines += 1
        try:
            yield
        except BaseException:
            self.leave()
            raise
        finally:
            # vLLM takes all objects of the process, the trainer too, from the garbage collector, and they would never go.
            gc.unfreeze()

    def leave(self) -> None:
        """Destroy the groups that vLLM has made if this was the last engine."""
        self._engines -= 1
        if self._engines or not self._others_are_ours:
            return
        if self._default_is_ours:
            cleanup_dist_env_and_memory()
        else:
            destroy_model_parallel()


_groups = _Groups()


def _shut_down(core: Any) -> None:
    """Free an engine as ``EngineCore.shutdown`` does, but keep the process groups of the trainer and of other engines."""
    core.structured_output_manager.clear_backend()
    core.model_executor.shutdown()
    core.scheduler.shutdown()
    _groups.leave()


def _collect() -> None:
    """Collect garbage twice: engines, whose finalizers still hold their memory, and then that memory."""
    gc.collect()
    gc.collect()


@dataclass(eq=False)
class _Answer:
    request: GenerationRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[bytes] = field(default_factory=list)
    reason: FinishReason | None = None
    read: int | None = None


class VllmGenerator:
    """Samples with a :class:`VllmEngine`. A turn reads only the ids that the prefix cache does not hold.

    Every request has its own seed, drawn from its ``uniforms``, and the tokens come from vLLM's random stream under that
    seed. Sampled episodes therefore differ from those of the transformers generator. They still do not depend on the other
    requests of the batch, up to rounding in the model. Greedy answers are the same.

    Args:
        engine: The engine. Nothing else may use it at the same time.
        eos_token_ids: Tokens that end an answer; they belong to it.
        settings: Sampling options.
        tokenizer: Needed for ``settings.stop_strings`` only.
        adapter_of: Returns the adapter that an episode is sampled with. Default: the engine's own for all.
        reader: Encodes the images of requests. The engine has its
            :func:`~agile_trainers.rollout.generators.images.vllm_options`.

    Raises:
        ValueError: If a setting has another meaning in vLLM, an id is outside the vocabulary, or stop strings are given
            without a tokenizer.
    """

    def __init__(
        self,
        engine: VllmEngine,
        *,
        eos_token_ids: Sequence[int],
        settings: SamplingSettings,
        tokenizer: PreTrainedTokenizerBase | None = None,
        adapter_of: Callable[[int], LoRARequest | None] = lambda episode: None,
        reader: ImageReader | None = None,
    ) -> None:
        check_settings(settings)
        check_token_ids("eos_token_ids", eos_token_ids, engine.vocab_size)
        self._engine, self._adapter_of, self._reader = engine, adapter_of, reader
        self._settings = settings
        self._params = _sampling_params(settings, eos_token_ids, engine.vocab_size)
        self._params.logit_bias = logit_bias(reader)
        self._eos = eos_token_ids
        self._stop = stop_criteria(settings, tokenizer)
        self._conversations = Conversations[str]()  # of each pending request vLLM's key
        self._under_way: dict[str, _Answer] = {}

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request.

        Raises:
            ValueError: If the episode has a pending request of the same ``call``, the prompt is empty, ``max_new_tokens`` is
                below 1, the ids do not start with those of the last request and its answer although ``extends`` is true, or
                the answer might exceed the engine's ``max_model_length``.
        """
        self._conversations.check(request)
        check_room(request, self._engine.max_model_length)
        params = copy.copy(self._params)  # vLLM makes a deep copy
        for name, value in length_fields(self._settings, request).items():
            setattr(params, name, value)
        if self._settings.do_sample:
            params.seed = seed_of(request)
        prompt = prompt_of(request, self._reader)
        key = self._engine.submit(prompt, params, self._adapter_of(request.episode))
        self._under_way[key] = _Answer(request)
        self._conversations.submitted(request, key)

    def step(self) -> list[GenerationOutput]:
        """Sample one token of every running request and return the finished answers. Empty when idle.

        Raises:
            RuntimeError: If vLLM aborted a request.
            ValueError: If a log-probability is not a number.
        """
        if not self._under_way:
            return []
        grown = [self._extend(output) for output in self._engine.engine.step()]
        self._stop_at_strings([answer for answer in grown if answer.reason != "stop"])
        return [self._finish(answer, answer.reason) for answer in grown if answer.reason is not None]

    @property
    def pending(self) -> int:
        """Number of requests submitted and not yet returned."""
        return len(self._under_way)

    def release(self, episode: int) -> None:
        """Forget an episode and its pending requests, if any."""
        keys = self._conversations.release(episode)
        for key in keys:
            del self._under_way[key]
        if keys:
            self._engine.engine.abort_request(keys)

    def close(self) -> None:
        """Abort every request, so that the engine is idle for the next rollout, also after an exception."""
        for episode, _ in list(self._conversations.pending):
            self.release(episode)

    def _extend(self, output: RequestOutput) -> _Answer:
        """Append vLLM's new tokens to an answer."""
        answer, completion = self._under_way[output.request_id], output.outputs[0]
        episode, ids = answer.request.episode, list(completion.token_ids)
        if output.finished and completion.finish_reason not in FINISHED:
            raise RuntimeError(f"vLLM aborted the answer of episode {episode}: {completion.finish_reason}.")
        logprobs = [token[i].logprob for token, i in zip(completion.logprobs or [], ids, strict=True)]
        check_logprobs(episode, logprobs)
        answer.token_ids += ids
        answer.logprobs += logprobs
        if self._settings.filters and self._settings.top_k:
            answer.kept += [self._kept(episode, token) for token in completion.logprobs or []]
        answer.reason = FINISHED[completion.finish_reason] if output.finished else None
        if output.num_cached_tokens is not None:
            answer.read = len(answer.request.token_ids) - output.num_cached_tokens
        return answer

    def _kept(self, episode: int, likeliest: Mapping[int, Logprob]) -> bytes:
        """Return the set of the tokens that are possible, from the log-probabilities of the likeliest."""
        vocab, kept = self._engine.vocab_size, [i for i, one in likeliest.items() if one.logprob > -math.inf]
        if len(kept) == len(likeliest) < vocab:
            raise ValueError(
                f"vLLM kept {len(kept)} tokens or more for episode {episode} with top_k={self._settings.top_k}: many have "
                "the same logit as the last of them. Raise top_k, or set use_vllm=False."
            )
        return encode_sets(torch.zeros(1, vocab, dtype=torch.bool).index_fill(1, torch.tensor(kept), True))[0]

    def _stop_at_strings(self, answers: list[_Answer]) -> None:
        """Finish the answers that end with a stop string, found by transformers' criterion."""
        if self._stop is None or not answers:
            return
        recent = left_pad([answer.token_ids for answer in answers], [NO_TOKEN] * len(answers))
        stopped = self._stop(recent[:, -self._stop.maximum_token_len :], None)
        for answer, stop in zip(answers, stopped.tolist()):
            if stop:
                answer.reason = "stop"

    def _finish(self, answer: _Answer, reason: FinishReason) -> GenerationOutput:
        request = answer.request
        key = self._conversations.answered(request, answer.token_ids)
        del self._under_way[key]
        if self._stop is not None:
            self._engine.engine.abort_request([key])  # vLLM does not get the stop strings
        kept = answer.kept or kept_sets(self._settings, self._eos, len(answer.token_ids))
        return GenerationOutput(
            request.episode, answer.token_ids, answer.logprobs, reason, request.call, answer.read, kept
        )


def check_settings(settings: SamplingSettings) -> None:
    """Reject settings with which vLLM samples from another distribution than transformers.

    Raises:
        ValueError: For each such setting; the message names an alternative.
    """
    lowest, highest = TEMPERATURES
    if settings.do_sample and not lowest <= settings.temperature <= highest:
        raise ValueError(
            f"vLLM samples at a temperature between {lowest} and {highest}, got temperature={settings.temperature}. Choose "
            "one in this range, sample greedily, or set use_vllm=False."
        )
    if settings.do_sample and settings.min_p and settings.top_p < 1.0:
        raise ValueError(
            f"vLLM applies min_p={settings.min_p} before top_p={settings.top_p}, transformers after it: the combination "
            "gives different distributions. Use one of them."
        )


def kept_sets(settings: SamplingSettings, eos_token_ids: Iterable[int], count: int) -> list[bytes] | None:
    """Return the kept sets of an answer of ``count`` tokens, where only ``min_new_tokens`` removes any.

    Otherwise they are None: vLLM returns no sets. In this process they are read from the log-probabilities of the likeliest
    tokens, whose number ``top_k`` bounds; where there is no bound, training refuses the options.
    """
    if len(settings.filters) != 1 or not settings.min_new_tokens:
        return None
    held = min(settings.min_new_tokens, count)
    return [without(sorted(eos_token_ids))] * held + [b""] * (count - held)


@contextmanager
def _launched_as(rank: int, local_rank: int, processes: int) -> Iterator[None]:
    """Set the launcher variables that vLLM reads, and remove them afterwards, since `Accelerator` reads them too."""
    names = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": processes}
    before = {name: os.environ.get(name) for name in (*names, "MASTER_ADDR", "MASTER_PORT")}
    os.environ.update({name: str(value) for name, value in names.items()})
    ensure_master_addr_port()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def check_logprobs(episode: int, logprobs: list[float]) -> None:
    """Raise ``ValueError`` unless all log-probabilities are numbers."""
    if not all(map(math.isfinite, logprobs)):
        raise ValueError(f"vLLM's log-probabilities for episode {episode} are not all numbers: {logprobs}.")


def seed_of(request: GenerationRequest) -> int:
    """Draw the seed of an answer from its episode's random stream."""
    return int(request.uniforms(1)[0] * 2**53)


def prompt_of(request: GenerationRequest, reader: ImageReader | None) -> Any:
    """Return a request's conversation for vLLM, which expands nothing in it: the ids are those that the trainer reads."""
    ids = list(request.token_ids)
    runs = [] if reader is None else reader.runs(ids, request.pictures)
    if not runs:
        return {"type": "token", "prompt_token_ids": ids}
    from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

    return {
        "type": "multimodal",
        "prompt_token_ids": ids,
        "mm_kwargs": MultiModalKwargsItems({"image": list(map(_item, runs))}),
        "mm_hashes": {"image": [run.key for run in runs]},
        "mm_placeholders": {"image": [PlaceholderRange(run.start, len(run.features)) for run in runs]},
    }


def features_of(request: GenerationRequest, reader: ImageReader) -> dict[str, Any] | None:
    """Return a request's images as a server takes them beside its ids, in JSON; None without any."""
    from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import encode_mm_kwargs_item

    runs = reader.runs(request.token_ids, request.pictures)
    if not runs:
        return None
    items = [encode_mm_kwargs_item(_item(replace(run, features=run.features.cpu()))) for run in runs]
    return {
        "mm_hashes": {"image": [run.key for run in runs]},
        "mm_placeholders": {"image": [{"offset": run.start, "length": len(run.features)} for run in runs]},
        "kwargs_data": {"image": items},
    }


def _item(run: ImageRun) -> Any:
    """Return features as vLLM takes them. Text does not need its classes, of which its versions differ."""
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFieldElem,
        MultiModalFlatField,
        MultiModalKwargsItem,
    )

    if run.grid is None:
        return MultiModalKwargsItem({"image_embeds": MultiModalFieldElem(run.features, MultiModalBatchedField())})
    flat = MultiModalFlatField(slices=[slice(0, len(run.features))])
    grid = MultiModalFieldElem(run.grid, MultiModalBatchedField(keep_on_cpu=True))
    return MultiModalKwargsItem({"image_embeds": MultiModalFieldElem(run.features, flat), "image_grid_thw": grid})


def logit_bias(reader: ImageReader | None) -> dict[int, float] | None:
    """Return vLLM's bias of tokens that are never sampled; -100 is the lowest that it takes."""
    return None if reader is None else dict.fromkeys(reader.suppressed, -100.0)


def sampling_fields(settings: SamplingSettings, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    """Convert settings to vLLM's names, except stop strings and those of :func:`length_fields`."""
    filters: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    if settings.do_sample:
        filters = {name: getattr(settings, name) or idle for name, idle in filters.items()}
    return filters | {
        "repetition_penalty": settings.repetition_penalty,
        # A server may have other defaults, from the model's generation config.
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": sorted(eos_token_ids),
        "ignore_eos": True,  # the trainer sets the ids that end an answer
    }


def length_fields(settings: SamplingSettings, request: GenerationRequest) -> dict[str, int]:
    """Return vLLM's limits of an answer. A nearly full context has room for fewer than ``min_new_tokens``."""
    most = request.max_new_tokens
    return {"max_tokens": most, "min_tokens": min(settings.min_new_tokens, most)}


def _sampling_params(settings: SamplingSettings, eos_token_ids: Sequence[int], vocab: int) -> SamplingParams:
    # Besides the sampled token's, those of all that `top_k` keeps, and of as many as may have the logit of the last.
    read = settings.top_k + settings.top_k // 2 + 16 if settings.filters and settings.top_k else 0
    return SamplingParams(
        **sampling_fields(settings, eos_token_ids),
        detokenize=False,
        logprobs=read if read < vocab else -1,
        # Stop strings are checked at every token; otherwise only the final output is needed.
        output_kind=RequestOutputKind.DELTA if settings.stop_strings else RequestOutputKind.FINAL_ONLY,
    )
