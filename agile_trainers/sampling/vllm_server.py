"""Serves the trainer's policy from vLLM servers beside the trainer, which it may have started itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from accelerate.utils import broadcast_object_list
from peft import LoraConfig
from trl.generation.vllm_generation import VLLMGeneration

from agile_trainers.adapters.roles import base_model
from agile_trainers.rollout.generators.vllm.server import ServerGenerator, VllmServer
from agile_trainers.rollout.generators.vllm.servers import VllmServers
from agile_trainers.sampling.served_policy import ServedPolicy
from agile_trainers.sampling.started_server import StartedServer, start_server
from agile_trainers.sampling.vllm_checks import (
    base_source,
    check_server,
    check_slots,
    lora_rank,
    quantization,
    server_urls,
)

_Result = TypeVar("_Result")


class ServerPolicy(ServedPolicy):
    """Servers that serve the policy to every process of the run: those that were started beside it, or one of its own.

    With LoRA the first process writes the adapter to a folder below ``output_dir``, which all servers read. A model that is
    trained whole is sent to one server over NCCL, as TRL does.

    Raises:
        requests.exceptions.ConnectionError: If a server does not answer.
        RuntimeError: If the trainer's own server does not start.
        ValueError: If the server would not serve this policy.
    """

    overlaps = True
    engine: VllmServers
    _generator_class = ServerGenerator
    _keeps_adapter = False  # the server may be restarted in between
    _started: StartedServer | None = None

    def _connect(self, args: Any, rows: int, max_model_length: int | None) -> None:
        if self._config is not None:
            lora_rank(self._config)
        elif self._accelerator.device.type != "cuda":
            raise ValueError(
                "vllm_mode='server' takes a model that is trained whole over NCCL, which needs GPUs. Train a LoRA adapter "
                "(peft_config), or use vllm_mode='colocate'."
            )
        model, more = self._model, dict[str, str]()
        if args.vllm_server_start:
            url, log, self._started = start_server(
                args, model, self._accelerator, dtype=self.dtype, rows=rows, max_model_length=max_model_length
            )
            gone = f"The trainer started it, and its output is in {log}. Resume from the last checkpoint."
            urls, more = [url], {"when_gone": gone}
        else:
            urls = server_urls(args)
        if self._config is None and len(urls) > 1:
            raise ValueError(
                f"vllm_server_base_url names {len(urls)} servers, and a model that is trained whole is sent to one. Name "
                "one, or train a LoRA adapter (peft_config)."
            )
        servers = [
            VllmServer(
                url,
                timeout=args.vllm_server_timeout,
                max_batch_size=rows,
                vocab_size=base_model(model).config.get_text_config().vocab_size,
                **more,
            )
            for url in urls
        ]
        for server in servers:
            served = server.info["model_config"]["quantization"]
            quantization(model, [] if served is None else [served], f"The vLLM server at {server.url}")
            check_server(
                server.info,
                server.url,
                model=base_source(model),
                dtype=self.dtype,
                rank=None if self._config is None else self._config.r,
                max_model_length=max_model_length,
            )
            check_slots(server.info, server.url, args.batches_ahead)
            if self._reader is not None:
                server.check_images()
        self.engine = VllmServers(servers, Path(args.output_dir) / "vllm")
        self._on_main(self.engine.drop_left)
        if self._config is None:
            self._whole = VLLMGeneration(
                model,
                self._accelerator,
                processing_class=None,
                mode="server",
                server_base_url=urls[0],
                server_timeout=args.vllm_server_timeout,
                group_port=args.vllm_group_port,
            )

    def close(self) -> None:
        """End the server if the trainer has started it; take the policy's adapters from another. Their files are deleted."""
        if self._started is not None:
            self._started.close()
        if hasattr(self, "engine"):
            self.engine.close()

    def _move_adapter(self, weights: dict[str, torch.Tensor], config: LoraConfig) -> int:
        self._accelerator.wait_for_everyone()  # until the episodes of all processes are over
        moved, self.engine.adapter = self._on_main(
            lambda: (self.engine.load_adapter(weights, config), self.engine.adapter)
        )
        return moved if self._accelerator.is_main_process else 0

    def _add_adapter(self, weights: dict[str, torch.Tensor], config: LoraConfig) -> tuple[str, int]:
        return self._on_main(lambda: self.engine.add_adapter(weights, config))

    def _drop_adapter(self, adapter: str) -> None:
        self._accelerator.wait_for_everyone()  # until the episodes of all processes are over
        self._on_main(lambda: self.engine.drop_adapter(adapter))

    def _on_main(self, act: Callable[[], _Result]) -> _Result:
        """Let the first process change what the servers serve; all get its result, and use the servers that it uses."""
        told: list[Any] = [None, None]
        if self._accelerator.is_main_process:
            told = [act(), self.engine.used]
        result, self.engine.used = broadcast_object_list(told)
        return cast(_Result, result)

    def _move_whole(self) -> int:
        self._whole.sync_weights()
        self._accelerator.wait_for_everyone()
        return sum(
            math.prod(shape) * getattr(torch, dtype).itemsize for _, dtype, shape in self._whole._weight_metadata
        )
