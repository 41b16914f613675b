"""A sampler on vLLM, in this process: requests enter and leave at every token, and each policy is a LoRA of its own.

Importing this module imports vLLM, which takes seconds; nothing else in the package does.
"""

from __future__ import annotations

import copy
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase
from trl.trainer.utils import ensure_master_addr_port
from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from agile_trainers.rollout.generators.base import FinishReason, GenerationOutput, GenerationRequest, SamplingSettings
from agile_trainers.rollout.generators.checks import check_request, check_room, check_token_ids
from agile_trainers.rollout.generators.transformers.decoding import NO_TOKEN, left_pad, stop_criteria

TEMPERATURES = 0.01, 2.0
"""vLLM raises lower ones to the first, and takes none above the second."""
_FINISHED: dict[str | None, FinishReason] = {"stop": "stop", "length": "length"}


class VllmEngine:
    """A vLLM engine that lives as long as the trainer, and the adapter that it serves. It sees ids alone, never a tokenizer.

    Args:
        model: Folder or Hub id of the base model.
        dtype: Of weights and activations.
        max_model_length: Tokens of a conversation. Default: the model's own limit.
        max_batch_size: Most requests decoded at the same time; the others wait.
        max_lora_rank: Make room for an adapter of up to this rank. Default: none is served.
        process: Rank, local rank and number of processes, each of which has an engine of its own.
        options: More fields of ``vllm.EngineArgs``.

    Raises:
        ValueError: What vLLM cannot serve.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: torch.dtype,
        max_model_length: int | None,
        max_batch_size: int,
        max_lora_rank: int | None = None,
        process: tuple[int, int, int] = (0, 0, 1),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        more: dict[str, Any] = {}
        if max_lora_rank is not None:
            more |= {"enable_lora": True, "max_lora_rank": max_lora_rank, "max_loras": 1}
        if current_platform.is_cpu():
            # Compiling takes longer than it saves on what a CPU can train. Conversations are short beside vLLM's blocks of
            # 128 there, of which only whole ones are cached. And a request with a seed of its own dies when its prompt is
            # read in pieces (RuntimeError "CPU Generator does not use offset", vLLM 0.31).
            more |= {"enforce_eager": True, "block_size": 32, "enable_chunked_prefill": False}
        with _launched_as(*process):
            arguments = EngineArgs(
                model=model,
                skip_tokenizer_init=True,
                dtype=str(dtype).removeprefix("torch."),
                max_model_len=max_model_length,
                max_num_seqs=max_batch_size,
                max_num_batched_tokens=max(4096, max_batch_size, max_model_length or 0),
                logprobs_mode="processed_logprobs",  # of the distribution that is sampled from
                enable_prefix_caching=True,
                generation_config="vllm",  # the model's own sampling defaults are not the trainer's
                distributed_executor_backend="external_launcher",  # in this process, beside the trainer's process group
                disable_log_stats=True,
                **(more | dict(options or {})),
            )
            self.engine = LLMEngine.from_engine_args(arguments)
        self.max_model_length: int = self.engine.model_config.max_model_len
        self.vocab_size: int = self.engine.model_config.get_vocab_size()
        self.adapter: LoRARequest | None = None
        self._versions = self._requests = 0

    def load_adapter(self, weights: Mapping[str, torch.Tensor], config: LoraConfig) -> int:
        """Serve this adapter from now on, in place of the last one.

        It gets a name of its own, so that nothing that was cached under an earlier one is taken for its own.

        Args:
            weights: Under PEFT's names, as ``get_peft_model_state_dict`` gives them.
            config: Of the adapter.

        Returns:
            The bytes that were handed over.

        Raises:
            ValueError: What vLLM cannot serve.
        """
        self._versions += 1
        with tempfile.TemporaryDirectory(prefix="vllm-policy-") as folder:
            moved = write_adapter(Path(folder), weights, config)
            adapter = LoRARequest(f"policy-{self._versions}", self._versions, folder)
            self.engine.add_lora(adapter)
        if self.adapter is not None:
            self.engine.remove_lora(self.adapter.lora_int_id)
        self.adapter = adapter
        return moved

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Serve another base model, in place of the last one.

        Args:
            weights: All of them, under the names of the model's own checkpoint.

        Returns:
            The bytes that were handed over.
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

    def submit(self, token_ids: list[int], params: SamplingParams) -> str:
        """Queue a request and return its key."""
        self._requests += 1
        key = str(self._requests)
        prompt: Any = {"type": "token", "prompt_token_ids": token_ids}
        self.engine.add_request(key, prompt, params, lora_request=self.adapter)
        return key

    def sleep(self, level: int) -> None:
        """Free the GPU's memory: at level 1 the weights wait in the CPU's, at level 2 they are dropped."""
        self.engine.sleep(level)

    def wake(self, part: str) -> None:
        """Take memory again, for the ``"weights"`` or the ``"kv_cache"``."""
        self.engine.wake_up([part])


@dataclass(eq=False)
class _Answer:
    request: GenerationRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: FinishReason | None = None


class VllmGenerator:
    """Samples with a :class:`VllmEngine`. A turn reads only what the prefix cache does not hold.

    Every request has a seed of its own, drawn from its ``uniforms``; the tokens come from vLLM's own stream under that seed,
    which cannot be made to invert ours. An episode therefore differs from the one that the transformers generator plays; it
    still does not depend on its neighbours, up to rounding in the model. Greedy answers are the same.

    Args:
        engine: Nothing else may use it meanwhile.
        eos_token_ids: Tokens that end an answer; they belong to it.
        settings: How to sample.
        tokenizer: Needed for ``settings.stop_strings`` only.

    Raises:
        ValueError: A setting means another thing to vLLM, an id is outside the vocabulary, or stop strings come without a
            tokenizer.
    """

    def __init__(
        self,
        engine: VllmEngine,
        *,
        eos_token_ids: Sequence[int],
        settings: SamplingSettings,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        check_settings(settings)
        check_token_ids("eos_token_ids", eos_token_ids, engine.vocab_size)
        self._engine = engine
        self._settings = settings
        self._params = _sampling_params(settings, eos_token_ids)
        self._stop = stop_criteria(settings, tokenizer)
        self._known: dict[int, list[int]] = {}
        self._under_way: dict[str, _Answer] = {}
        self._keys: dict[int, str] = {}

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request.

        Raises:
            ValueError: The episode has a request under way, the prompt is empty, ``max_new_tokens`` is below 1, the
                ids do not start with those already read and sampled, or the answer might not fit into the engine's
                ``max_model_length``.
        """
        episode, ids = request.episode, list(request.token_ids)
        check_request(request, self._known.get(episode, []), episode in self._keys)
        check_room(request, self._engine.max_model_length)
        params = copy.copy(self._params)  # vLLM makes a deep one
        params.max_tokens = request.max_new_tokens
        if self._settings.do_sample:
            params.seed = seed_of(request)
        key = self._engine.submit(ids, params)
        self._known[episode], self._keys[episode], self._under_way[key] = ids, key, _Answer(request)

    def step(self) -> list[GenerationOutput]:
        """Make one token of every request that is being decoded; return the answers it finished. Empty when idle.

        Raises:
            RuntimeError: vLLM gave a request up.
            ValueError: A log-probability is not a number.
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
        """Forget an episode, and its request if one is under way."""
        self._known.pop(episode, None)
        key = self._keys.pop(episode, None)
        if key is not None:
            del self._under_way[key]
            self._engine.engine.abort_request([key])

    def close(self) -> None:
        """Withdraw every request: the next rollout finds the engine idle, also after an exception."""
        for episode in list(self._keys):
            self.release(episode)

    def _extend(self, output: RequestOutput) -> _Answer:
        """Append what vLLM has made of an answer."""
        answer, completion = self._under_way[output.request_id], output.outputs[0]
        episode, ids = answer.request.episode, list(completion.token_ids)
        if output.finished and completion.finish_reason not in _FINISHED:
            raise RuntimeError(f"vLLM gave up the answer of episode {episode}: {completion.finish_reason}.")
        logprobs = [token[i].logprob for token, i in zip(completion.logprobs or [], ids, strict=True)]
        check_logprobs(episode, logprobs)
        answer.token_ids += ids
        answer.logprobs += logprobs
        answer.reason = _FINISHED[completion.finish_reason] if output.finished else None
        return answer

    def _stop_at_strings(self, answers: list[_Answer]) -> None:
        """End the answers that now end with a stop string, as transformers finds it."""
        if self._stop is None or not answers:
            return
        recent = left_pad([answer.token_ids for answer in answers], [NO_TOKEN] * len(answers))
        stopped = self._stop(recent[:, -self._stop.maximum_token_len :], None)
        for answer, stop in zip(answers, stopped.tolist()):
            if stop:
                answer.reason = "stop"

    def _finish(self, answer: _Answer, reason: FinishReason) -> GenerationOutput:
        episode = answer.request.episode
        key = self._keys.pop(episode)
        del self._under_way[key]
        if self._stop is not None:
            self._engine.engine.abort_request([key])  # vLLM knows nothing of stop strings
        self._known[episode] += answer.token_ids
        return GenerationOutput(episode, answer.token_ids, answer.logprobs, reason)


def check_settings(settings: SamplingSettings) -> None:
    """Refuse settings by which vLLM would sample from another distribution than their definition says.

    Raises:
        ValueError: For each of them, with what to set instead.
    """
    lowest, highest = TEMPERATURES
    if settings.do_sample and not lowest <= settings.temperature <= highest:
        raise ValueError(
            f"vLLM samples at a temperature between {lowest} and {highest}, got temperature={settings.temperature}. Choose "
            "one of these, sample greedily, or set use_vllm=False."
        )
    if settings.do_sample and settings.min_p and settings.top_p < 1.0:
        raise ValueError(
            f"vLLM applies min_p={settings.min_p} before top_p={settings.top_p}, transformers after it: together they mean "
            "different things. Use one of them."
        )


@contextmanager
def _launched_as(rank: int, local_rank: int, processes: int) -> Iterator[None]:
    """What vLLM reads of a launcher; gone afterwards, or the next `Accelerator` would believe in that launcher too."""
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


def write_adapter(folder: Path, weights: Mapping[str, torch.Tensor], config: LoraConfig) -> int:
    """Write an adapter as PEFT does, for vLLM to read. Returns the bytes of its weights."""
    config.save_pretrained(str(folder))
    tensors = {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    return sum(tensor.nbytes for tensor in tensors.values())


def check_logprobs(episode: int, logprobs: list[float]) -> None:
    """Raise ``ValueError`` unless all of them are numbers."""
    if not all(map(math.isfinite, logprobs)):
        raise ValueError(f"vLLM's log-probabilities for episode {episode} are not all numbers: {logprobs}.")


def seed_of(request: GenerationRequest) -> int:
    """The seed of an answer, drawn from its episode's noise."""
    return int(request.uniforms(1)[0] * 2**53)


def sampling_fields(settings: SamplingSettings, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    """vLLM's names for settings, stop strings aside."""
    filters: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    if settings.do_sample:
        filters = {
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k,
            "min_p": settings.min_p or 0.0,
        }
    return filters | {
        "repetition_penalty": settings.repetition_penalty,
        "min_tokens": settings.min_new_tokens,
        "stop_token_ids": sorted(eos_token_ids),
        "ignore_eos": True,  # what ends an answer is the trainer's to say
    }


def _sampling_params(settings: SamplingSettings, eos_token_ids: Sequence[int]) -> SamplingParams:
    return SamplingParams(
        **sampling_fields(settings, eos_token_ids),
        detokenize=False,
        logprobs=0,  # of the sampled token alone
        # Stop strings are looked for at every token; otherwise nothing is asked for before the end.
        output_kind=RequestOutputKind.DELTA if settings.stop_strings else RequestOutputKind.FINAL_ONLY,
    )
