"""Samples saved policies with a vLLM engine for evaluations."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from peft import LoraConfig
from trl.import_utils import is_vllm_available

from agile_trainers.adapters import POLICY, find_adapters
from agile_trainers.adapters.loading import read_weights
from agile_trainers.adapters.roles import base_model
from agile_trainers.evaluation.loading import load_model
from agile_trainers.rollout.episode_options import UNLIMITED
from agile_trainers.rollout.generators.base import Generator, SamplingSettings
from agile_trainers.sampling.vllm_checks import base_source, lora_rank

if TYPE_CHECKING:
    from agile_trainers.rollout.generators.vllm.engine import VllmEngine

_AT_ONCE = 256


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A saved policy that a :class:`VllmSampler` samples; ``evaluate_policy`` takes it as its model."""

    sampler: VllmSampler
    model: Any
    """The policy on the meta device: its configuration and the shapes of its weights."""
    tokenizer: Any
    base: tuple[Any, ...]
    """Folder or Hub id, commit and dtype of the base, and whether its code is trusted."""
    adapter: tuple[dict[str, torch.Tensor], LoraConfig] | None
    """Weights and configuration of its adapter; None for a model without one."""
    rank: int
    """Rank with which vLLM must be started for the adapter; 0 without one."""

    @contextmanager
    def generator(
        self,
        tokenizer: Any,
        eos_token_ids: list[int],
        settings: SamplingSettings,
        max_model_length: int,
        at_once: int | None = None,
    ) -> Iterator[Generator]:
        """Serve the policy and make a generator on the engine.

        Args:
            tokenizer: The policy's.
            eos_token_ids: Tokens that end an answer.
            settings: Sampling options.
            max_model_length: Tokens of a conversation.
            at_once: Answers that are decoded at the same time. Default: 256.

        Raises:
            ValueError: If vLLM cannot serve the policy or take the settings.
        """
        from agile_trainers.rollout.generators.vllm.engine import VllmGenerator, check_settings

        check_settings(settings)  # before an engine is started
        engine = self.sampler.serve(self, max_model_length, _AT_ONCE if at_once is None else at_once)
        with closing(
            VllmGenerator(engine, eos_token_ids=eos_token_ids, settings=settings, tokenizer=tokenizer)
        ) as made:
            yield made


class VllmSampler:
    """Samples saved policies with a vLLM engine in this process.

    The engine is started before the first episode. It loads the base model and serves the policies' adapters as LoRA, one at
    a time. It is kept for the policies on the same base; another base replaces it. Use it as a context manager, or call
    ``close``, which frees its memory. Nothing else in the process may use vLLM meanwhile.

    Args:
        gpu_memory_utilization: Share of the GPU's memory for the engine's weights and cache.
        model_impl: Implementation of the model: ``"vllm"``, ``"transformers"`` or ``"auto"``.

    Raises:
        ImportError: If vLLM is not installed.
        ValueError: If a value is out of range, or there are several processes.
    """

    def __init__(self, *, gpu_memory_utilization: float = 0.9, model_impl: str = "vllm") -> None:
        if not 0 < gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization={gpu_memory_utilization} is a share of the GPU's memory. Choose one in (0, 1]."
            )
        if (processes := PartialState().num_processes) > 1:
            raise ValueError(
                f"An evaluation with vLLM runs in one process, got {processes}. Start it without accelerate launch, or "
                "sample with transformers."
            )
        if not is_vllm_available():
            raise ImportError(
                "Sampling with vLLM needs vLLM, which is not installed: pip install 'agile-trainers[vllm]'."
            )
        self._options: dict[str, Any] = {"gpu_memory_utilization": gpu_memory_utilization, "model_impl": model_impl}
        self._loaded: list[ServedModel] = []
        self._engine: VllmEngine | None = None
        self._started: tuple[tuple[Any, ...], int, int, int] | None = None
        self._served: ServedModel | None = None

    def __enter__(self) -> VllmSampler:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def load(self, model: str, tokenizer: Any = None, **init: Any) -> ServedModel:
        """Read a saved policy without the weights of its base model. No engine is started yet.

        Args:
            model: Folder or Hub id of a model or of a LoRA adapter.
            tokenizer: Its tokenizer. Default: the one that is saved with the model, adapter or base.
            init: How to load the model: ``dtype`` (float32 by default), ``revision`` and ``trust_remote_code``.

        Raises:
            ValueError: If the policy cannot be used, or vLLM cannot serve it.
        """
        from agile_trainers.sampling.vllm_colocated import served_quantization

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
            policy, tokenizer = load_model(model, tokenizer, device_map="meta", **init)
        served_quantization(policy)
        base = base_model(policy)
        commit, trusted = getattr(base.config, "_commit_hash", None), bool(init.get("trust_remote_code"))
        saved = find_adapters(model, init.get("revision"))
        adapter = None if saved is None else (read_weights(saved.folders[POLICY]), saved.config)
        rank = 0 if saved is None else lora_rank(saved.config)
        made = ServedModel(self, policy, tokenizer, (base_source(policy), commit, base.dtype, trusted), adapter, rank)
        self._loaded.append(made)
        return made

    def serve(self, policy: ServedModel, max_model_length: int, at_once: int) -> VllmEngine:
        """Return the engine, which serves a policy from now on. It is started or replaced where needed.

        Args:
            policy: One that this sampler has loaded.
            max_model_length: Tokens of a conversation that it must take.
            at_once: Answers that are decoded at the same time.

        Raises:
            ValueError: If vLLM cannot serve the policy.
        """
        from agile_trainers.sampling.vllm_colocated import make_engine

        wanted = (policy.base, at_once, policy.rank, max_model_length)
        if self._engine is None or self._started is None or not _fits(self._started, wanted):
            self.close()
            rank = max(one.rank for one in self._loaded if one.base == policy.base)
            *_, dtype, trusted = policy.base
            self._engine = make_engine(
                policy.model,
                dtype=dtype,
                max_model_length=max_model_length if max_model_length < UNLIMITED else None,
                max_batch_size=at_once,
                max_lora_rank=rank or None,
                trust_remote_code=trusted,
                **self._options,
            )
            self._started = (policy.base, at_once, rank, max_model_length)
        if self._served is not policy:
            if policy.adapter is None:
                self._engine.remove_adapter()
            else:
                self._engine.load_adapter(*policy.adapter)
            self._served = policy
        return self._engine

    def close(self) -> None:
        """Shut the engine down and free its memory. A later evaluation starts another."""
        engine, self._engine, self._served = self._engine, None, None
        if engine is not None:
            engine.close()


def _fits(started: tuple[Any, ...], wanted: tuple[Any, ...]) -> bool:
    """Return True if an engine that was started for one policy also serves another."""
    return started[:2] == wanted[:2] and started[2] >= wanted[2] and started[3] >= wanted[3]
