"""Serves the trainer's policy from a vLLM server that was started beside the trainer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from peft import LoraConfig
from trl.generation.vllm_generation import VLLMGeneration

from agile_trainers.rollout.generators.base import Generator, SamplingSettings
from agile_trainers.rollout.generators.vllm.server import ServerGenerator, VllmServer
from agile_trainers.sampling.served_policy import ServedPolicy
from agile_trainers.sampling.vllm_checks import base_model, base_source, check_server, lora_rank, quantization


class ServerPolicy(ServedPolicy):
    """A server that serves the policy to every process of the run.

    With LoRA the first process writes the adapter to a folder below ``output_dir``, which the server reads. A model that is
    trained whole is sent over NCCL, as TRL does.

    Raises:
        requests.exceptions.ConnectionError: If there is no server.
        ValueError: If the server would not serve this policy.
    """

    overlaps = True
    _keeps_adapter = False  # the server may be restarted in between

    def _connect(self, args: Any, rows: int, max_model_length: int | None) -> None:
        model, accelerator = self._model, self._accelerator
        url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        self.server = VllmServer(
            url,
            timeout=args.vllm_server_timeout,
            max_batch_size=rows,
            vocab_size=base_model(model).config.get_text_config().vocab_size,
            folder=Path(args.output_dir) / "vllm",
        )
        served = self.server.info["model_config"]["quantization"]
        quantization(model, [] if served is None else [served], f"The vLLM server at {url}")
        if self._config is not None:
            lora_rank(self._config)
        elif accelerator.device.type != "cuda":
            raise ValueError(
                "vllm_mode='server' takes a model that is trained whole over NCCL, which needs GPUs. Train a LoRA adapter "
                "(peft_config), or use vllm_mode='colocate'."
            )
        check_server(
            self.server.info,
            url,
            model=base_source(model),
            dtype=self.dtype,
            rank=None if self._config is None else self._config.r,
            max_model_length=max_model_length,
        )
        if self._config is None:
            self._whole = VLLMGeneration(
                model,
                accelerator,
                processing_class=None,
                mode="server",
                server_base_url=url,
                server_timeout=args.vllm_server_timeout,
                group_port=args.vllm_group_port,
            )

    @property
    def max_model_length(self) -> int:
        return self.server.max_model_length

    def _move_adapter(self, weights: dict[str, torch.Tensor], config: LoraConfig) -> int:
        self._accelerator.wait_for_everyone()  # until the episodes of all processes are over
        moved = self.server.load_adapter(weights, config) if self._accelerator.is_main_process else 0
        (self.server.adapter,) = broadcast_object_list([self.server.adapter])
        return moved

    def _add_adapter(self, weights: dict[str, torch.Tensor], config: LoraConfig) -> tuple[str, int]:
        added = self.server.add_adapter(weights, config) if self._accelerator.is_main_process else None
        (added,) = broadcast_object_list([added])
        assert added is not None
        return added

    def _drop_adapter(self, adapter: str) -> None:
        self._accelerator.wait_for_everyone()  # until the episodes of all processes are over
        if self._accelerator.is_main_process:
            self.server.drop_adapter(adapter)

    def _move_whole(self) -> int:
        self._whole.sync_weights()
        self._accelerator.wait_for_everyone()
        return sum(
            math.prod(shape) * getattr(torch, dtype).itemsize for _, dtype, shape in self._whole._weight_metadata
        )

    def _adapters(self) -> VllmServer:
        return self.server

    @property
    def max_adapters(self) -> None:
        """The server loads an adapter again that it had no more room for."""
        return None

    @contextmanager
    def generator(
        self,
        settings: SamplingSettings,
        eos_token_ids: list[int],
        tokenizer: Any,
        adapter_of: Callable[[int], str | None] = lambda episode: None,
    ) -> Iterator[Generator]:
        """Make a generator of this process."""
        made = ServerGenerator(
            self.server, eos_token_ids=eos_token_ids, settings=settings, tokenizer=tokenizer, adapter_of=adapter_of
        )
        with closing(made):
            yield made
