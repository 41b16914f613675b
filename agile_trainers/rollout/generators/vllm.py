"""A sampler on vLLM, in this process: requests enter and leave at every token, and each policy is a LoRA of its own.

Importing this module imports vLLM, which takes seconds; nothing else in the package does.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from transformers import AutoConfig, PreTrainedTokenizerBase
from trl.trainer.utils import ensure_master_addr_port
from vllm import LLM, RequestOutput, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind

from agile_trainers.rollout.generators.base import FinishReason, GenerationOutput, GenerationRequest, SamplingSettings
from agile_trainers.rollout.generators.checks import check_request, check_token_ids

LOWEST_TEMPERATURE = 0.01
"""vLLM raises lower ones to this."""
_FINISHED: dict[str | None, FinishReason] = {"stop": "stop", "length": "length"}


class VllmEngine:
    """A vLLM engine that lives as long as the trainer, and the adapter that it serves.

    Args:
        model: Folder or Hub id of the base model.
        tokenizer: The trainer's, which stop strings are looked for with. Requests and answers are ids.
        dtype: Of weights and activations.
        max_model_length: Tokens of a conversation. Default: the model's own limit.
        max_batch_size: Most requests decoded at the same time; the others wait.
        max_lora_rank: Make room for an adapter of up to this rank. Default: none is served.
        process: Rank, local rank and number of processes, each of which has an engine of its own.
        options: More arguments of ``vllm.LLM``.

    Raises:
        ValueError: What vLLM cannot serve.
    """

    def __init__(
        self,
        model: str,
        *,
        tokenizer: PreTrainedTokenizerBase,
        dtype: torch.dtype,
        max_model_length: int | None,
        max_batch_size: int,
        max_lora_rank: int | None = None,
        process: tuple[int, int, int] = (0, 0, 1),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        lora: dict[str, Any] = {}
        if max_lora_rank is not None:
            lora = {"enable_lora": True, "max_lora_rank": max_lora_rank, "max_loras": 1}
        options = dict(options or {})
        source = {name: options[name] for name in ("revision", "trust_remote_code") if name in options}
        with tempfile.TemporaryDirectory(prefix="vllm-tokenizer-") as folder, _launched_as(*process):
            tokenizer.save_pretrained(folder)
            AutoConfig.from_pretrained(model, **source).save_pretrained(folder)  # vLLM looks for one beside a tokenizer
            self.llm = LLM(
                model=model,
                tokenizer=folder,
                dtype=str(dtype).removeprefix("torch."),
                max_model_len=max_model_length,
                max_num_seqs=max_batch_size,
                max_num_batched_tokens=max(4096, max_batch_size),
                logprobs_mode="processed_logprobs",  # of the distribution that is sampled from
                enable_prefix_caching=True,
                generation_config="vllm",  # the model's own sampling defaults are not the trainer's
                distributed_executor_backend="external_launcher",  # in this process, beside the trainer's process group
                **lora,
                **options,
            )
        self.engine = self.llm.llm_engine
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
            config.save_pretrained(folder)
            tensors = {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
            save_file(tensors, Path(folder) / "adapter_model.safetensors")
            adapter = LoRARequest(f"policy-{self._versions}", self._versions, folder)
            self.engine.add_lora(adapter)
        if self.adapter is not None:
            self.engine.remove_lora(self.adapter.lora_int_id)
        self.adapter = adapter
        return sum(tensor.nbytes for tensor in tensors.values())

    def submit(self, token_ids: list[int], params: SamplingParams) -> str:
        """Queue a request and return its key."""
        self._requests += 1
        key = str(self._requests)
        prompt: Any = {"type": "token", "prompt_token_ids": token_ids}
        self.engine.add_request(key, prompt, params, lora_request=self.adapter)
        return key

    def sleep(self, level: int) -> None:
        """Free the GPU's memory: at level 1 the weights wait in the CPU's, at level 2 they are dropped."""
        self.llm.sleep(level=level)

    def wake(self, part: str) -> None:
        """Take memory again, for the ``"weights"`` or the ``"kv_cache"``."""
        self.llm.wake_up(tags=[part])


class VllmGenerator:
    """Samples with a :class:`VllmEngine`. A turn reads only what the prefix cache does not hold.

    Every request has a seed of its own, drawn from its ``uniforms``; the tokens come from vLLM's own stream under that seed,
    which cannot be made to invert ours. An episode therefore differs from the one that the transformers generator plays; it
    still does not depend on its neighbours, up to rounding in the model. Greedy answers are the same.

    Args:
        engine: Nothing else may use it meanwhile.
        eos_token_ids: Tokens that end an answer; they belong to it.
        settings: How to sample.

    Raises:
        ValueError: A setting means another thing to vLLM, or an id is outside the vocabulary.
    """

    def __init__(self, engine: VllmEngine, *, eos_token_ids: Sequence[int], settings: SamplingSettings) -> None:
        check_settings(settings)
        check_token_ids("eos_token_ids", eos_token_ids, engine.vocab_size)
        self._engine = engine
        self._settings = settings
        self._params = _sampling_params(settings, eos_token_ids)
        self._known: dict[int, list[int]] = {}
        self._under_way: dict[str, GenerationRequest] = {}
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
        if len(ids) + request.max_new_tokens > self._engine.max_model_length:
            raise ValueError(
                f"Episode {episode}: {len(ids)} tokens and {request.max_new_tokens} new ones are more than the engine's "
                f"max_model_length={self._engine.max_model_length}."
            )
        params = self._params.clone()
        params.max_tokens = request.max_new_tokens
        if self._settings.do_sample:
            params.seed = int(request.uniforms(1)[0] * 2**53)
        key = self._engine.submit(ids, params)
        self._known[episode], self._keys[episode], self._under_way[key] = ids, key, request

    def step(self) -> list[GenerationOutput]:
        """Make one token of every request that is being decoded; return the answers it finished. Empty when idle.

        Raises:
            RuntimeError: vLLM gave a request up.
            ValueError: A log-probability is not a number.
        """
        if not self._under_way:
            return []
        return [self._finish(output) for output in self._engine.engine.step() if output.finished]

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

    def _finish(self, output: RequestOutput) -> GenerationOutput:
        request, completion = self._under_way.pop(output.request_id), output.outputs[0]
        episode, ids = request.episode, list(completion.token_ids)
        del self._keys[episode]
        if completion.finish_reason not in _FINISHED:
            raise RuntimeError(f"vLLM gave up the answer of episode {episode}: {completion.finish_reason}.")
        logprobs = [token[i].logprob for token, i in zip(completion.logprobs or [], ids, strict=True)]
        if not all(map(math.isfinite, logprobs)):
            raise ValueError(f"vLLM's log-probabilities for episode {episode} are not all numbers: {logprobs}.")
        self._known[episode] += ids
        return GenerationOutput(episode, ids, logprobs, _FINISHED[completion.finish_reason])


def check_settings(settings: SamplingSettings) -> None:
    """Refuse settings by which vLLM would sample from another distribution than their definition says.

    Raises:
        ValueError: For each of them, with what to set instead.
    """
    if settings.do_sample and settings.temperature < LOWEST_TEMPERATURE:
        raise ValueError(
            f"vLLM takes temperature={settings.temperature} for {LOWEST_TEMPERATURE}. Set at least that, or sample greedily."
        )
    if settings.do_sample and settings.min_p and settings.top_p < 1.0:
        raise ValueError(
            f"vLLM applies min_p={settings.min_p} before top_p={settings.top_p}, transformers after it: together they mean "
            "different things. Use one of them."
        )
    if settings.stop_strings and settings.min_new_tokens:
        raise ValueError(
            f"vLLM looks for stop_strings only after min_new_tokens={settings.min_new_tokens} tokens. Set min_new_tokens=0, "
            "or leave stop_strings unset."
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


def _sampling_params(settings: SamplingSettings, eos_token_ids: Sequence[int]) -> SamplingParams:
    filters: dict[str, Any] = {"temperature": 0.0}
    if settings.do_sample:
        filters = {
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k,
            "min_p": settings.min_p or 0.0,
        }
    return SamplingParams(
        **filters,
        repetition_penalty=settings.repetition_penalty,
        min_tokens=settings.min_new_tokens,
        stop=list(settings.stop_strings),
        stop_token_ids=sorted(eos_token_ids),
        ignore_eos=True,  # what ends an answer is the trainer's to say
        include_stop_str_in_output=True,
        detokenize=bool(settings.stop_strings),
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        logprobs=0,  # of the sampled token alone
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
