"""Serves the trainer's policy from a vLLM engine in the trainer's process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from trl.generation.vllm_generation import VLLMGeneration
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
from vllm.platforms import current_platform
from vllm.version import __version__ as VERSION

from agile_trainers.adapters.roles import base_model
from agile_trainers.rollout.generators.base import Generator
from agile_trainers.rollout.generators.images import vllm_options
from agile_trainers.rollout.generators.vllm.engine import VllmEngine, VllmGenerator
from agile_trainers.rollout.generators.vllm.tensor_parallel import TogetherGenerator
from agile_trainers.sampling.served_policy import ServedPolicy
from agile_trainers.sampling.vllm_checks import (
    base_source,
    check_batch_invariant,
    longest_served,
    lora_rank,
    quantization,
)


def make_engine(model: torch.nn.Module, **options: Any) -> VllmEngine:
    """Start an engine in this process on the base of a policy, which it loads from where the policy was loaded from.

    Args:
        model: The policy. Its weights are not read.
        **options: Of :class:`~agile_trainers.rollout.generators.vllm.engine.VllmEngine`, beside the model.

    Raises:
        ValueError: If vLLM cannot serve the base.
    """
    revision = getattr(base_model(model).config, "_commit_hash", None)
    own: dict[str, Any] = {"quantization": served_quantization(model), "revision": revision}
    return VllmEngine(base_source(model), **own | options)


def served_quantization(model: torch.nn.Module) -> str | None:
    """Return the name of the quantization of a policy's base; None without any.

    Raises:
        ValueError: If the installed vLLM cannot serve it.
    """
    engine = f"vLLM {VERSION} on {'CPU' if current_platform.is_cpu() else 'this GPU'}"
    served = [name for name in QUANTIZATION_METHODS if name in (current_platform.supported_quantization or [name])]
    return quantization(model, served, engine)


@dataclass
class _Shared:
    """The engine of several trainers, once the first of them has made it."""

    max_adapters: int = 1
    engine: VllmEngine | None = None
    started: dict[str, Any] | None = None
    """The settings that the engine was started with."""


_shared: ContextVar[_Shared | None] = ContextVar("shared vLLM engine", default=None)


@contextmanager
def lend_engine(max_adapters: int, lender: VllmPolicy | None = None) -> Iterator[None]:
    """Let the trainers that are made in this block use one engine in turn, if they would start equal ones.

    Args:
        max_adapters: Adapters that are served at the same time.
        lender: The policy whose engine they use. Default: that of the first of them, which is shut down in the end.
    """
    shared = _Shared(max_adapters) if lender is None else _Shared(max_adapters, lender.engine, lender.started)
    token = _shared.set(shared)
    try:
        yield
    finally:
        _shared.reset(token)
        if lender is not None:
            lender.release()  # what the engine serves is another's
        elif shared.engine is not None:
            shared.engine.close()


class VllmPolicy(ServedPolicy):
    """An engine in this process that serves the policy.

    The engine loads the base of an adapter from the same place as the trainer, once. With ``vllm_tensor_parallel_size``
    that many processes share an engine and step together.

    Raises:
        ValueError: If vLLM cannot serve this policy.
    """

    _generator_class = VllmGenerator
    engine: VllmEngine
    _owns_engine = False
    """False while the engine is another's, or not made yet."""

    def _connect(self, args: Any, rows: int, max_model_length: int | None) -> None:
        accelerator, parallel = self._accelerator, args.vllm_tensor_parallel_size
        self._group = _group(accelerator, parallel)
        check_batch_invariant(os.environ, on_cpu=current_platform.is_cpu())
        if args.max_model_length is None and max_model_length is not None and accelerator.device.type == "cuda":
            memory = int(torch.cuda.mem_get_info(accelerator.device)[1] * args.vllm_gpu_memory_utilization)
            stored = served_quantization(self._model) is not None
            fits = longest_served(self._model, self.dtype, max_model_length, memory, parallel, stored=stored)
            max_model_length = int(accelerator.gather(torch.tensor([fits], device=accelerator.device)).min())
        lent = _shared.get()
        shared = lent or _Shared()
        self.started: dict[str, Any] = {
            "base": base_source(self._model),
            "dtype": self.dtype,
            "max_model_length": max_model_length,
            "max_batch_size": rows * parallel,
            "max_lora_rank": None if self._config is None else lora_rank(self._config),
            # With batches ahead, those of the open batches, and the current one for evaluations beside its predecessor.
            "max_adapters": max(shared.max_adapters, args.batches_ahead + 3 if args.batches_ahead else 1),
            "process": (accelerator.process_index, accelerator.local_process_index, accelerator.num_processes),
            "trust_remote_code": args.trust_remote_code,
            "gpu_memory_utilization": args.vllm_gpu_memory_utilization,
            "model_impl": args.vllm_model_impl,
            "enable_sleep_mode": self._sleeps,
            "tensor_parallel_size": parallel,
        }
        if self._reader is not None:
            self.started |= vllm_options(base_model(self._model).config.model_type)
        if shared.engine is not None and shared.started == self.started:
            self.engine = shared.engine
            self._wake("weights", "kv_cache")
            return
        self.engine = make_engine(self._model, **{name: it for name, it in self.started.items() if name != "base"})
        self._owns_engine = lent is None or shared.engine is not None
        if shared.engine is None:
            shared.engine, shared.started = self.engine, self.started

    def close(self) -> None:
        """Shut the engine down; one that several trainers use is left without this policy's adapter."""
        if self._owns_engine:
            self.engine.close()
        elif hasattr(self, "engine") and self.engine.is_open:
            while self.served:
                self.engine.drop_adapter(self.served.popitem()[1])
            self.release()

    def _move_whole(self) -> int:
        return self.engine.load_weights(_WholeModel(self._model, self._accelerator).weights())

    def _wake(self, *parts: str) -> None:
        for part in parts if self._sleeps else ():
            self.engine.engine.wake_up([part])

    @contextmanager
    def _sampling(self, made: VllmGenerator) -> Iterator[Generator]:
        """Let a generator step together with the other processes of the group, if any.

        Every step of vLLM draws from torch's generators, also where requests have seeds of their own; the trainer's draws
        after the rollout are those that they would have been without it.
        """
        devices = [torch.cuda.current_device()] if self._accelerator.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            if self._group is None:
                yield made
            else:
                with TogetherGenerator(made, self._group) as together:
                    yield together

    def _sleep(self) -> None:
        if self._sleeps:
            # Level 1 moves the weights to the CPU, and level 2 discards them: a whole model is moved before each rollout.
            self.engine.engine.sleep(level=2 if self._config is None else 1)


class _WholeModel(VLLMGeneration):
    """Iterates over the weights of a model that is trained whole, under TRL's names; gathers sharded ones one by one."""

    def __init__(self, model: torch.nn.Module, accelerator: Any):
        super().__init__(model, accelerator, processing_class=None)

    def _init_vllm(self) -> None:
        """Make no engine, since there is one."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all current weights. Every process has to iterate."""
        return self._iter_named_params()


def _group(accelerator: Any, size: int) -> dist.ProcessGroup | None:
    """Make the group of neighbouring processes that share an engine, as TRL does; None where each has its own."""
    if size == 1:
        return None
    processes = accelerator.num_processes
    if processes % size:
        raise ValueError(
            f"vllm_tensor_parallel_size={size} must divide the number of processes, which is {processes}. Start a multiple "
            f"of {size} processes, or lower it."
        )
    ranks = [list(range(first, first + size)) for first in range(0, processes, size)]
    mine: Any = dist.new_subgroups_by_enumeration(ranks, backend="gloo")[0]  # every process is in one
    return mine
