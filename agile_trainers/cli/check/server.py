"""Plans the vLLM server that a run starts itself (``vllm_server_start``)."""

from __future__ import annotations

import os
from copy import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from transformers import PretrainedConfig
from trl import ModelConfig, get_peft_config

from agile_trainers.cli.check.memory_plan import weight_dtype
from agile_trainers.cli.launch_configs import Launch
from agile_trainers.config.multi_turn import MultiTurnConfig
from agile_trainers.sampling.started_server import NO_WHOLE_MODEL, gpus_of_server, server_command, share_of_gpu
from agile_trainers.sampling.vllm_checks import check_batch_invariant, compute_dtype, quantization, quantization_name


@dataclass(frozen=True)
class PlannedServer:
    """A server as the trainer would start it."""

    gpus: tuple[str, ...]
    """Names of its GPUs; empty on a CPU."""
    shares: bool
    """True if a process of the trainer uses its GPU too."""
    share: float | None
    """Share of each GPU that it is told to take; None for vLLM's own default."""
    command: tuple[str, ...]
    """Starts it, without its address."""


def planned_server(
    args: MultiTurnConfig, model: ModelConfig, config: PretrainedConfig, launch: Launch, gpus: int | None
) -> PlannedServer | None:
    """Plan the server of a run; None if it starts none.

    Args:
        args: The run's configuration.
        model: The options of the model.
        config: The model's configuration.
        launch: How the run is launched, on one machine.
        gpus: GPUs of the machine; None for a CPU.

    Raises:
        ValueError: If the trainer could not start it: a model that is trained whole, an adapter or a quantization that vLLM
            cannot serve, or too few GPUs.
    """
    if not (args.use_vllm and args.vllm_server_start):
        return None
    adapter: Any = get_peft_config(model)
    if adapter is None:
        raise ValueError(NO_WHOLE_MODEL)
    check_batch_invariant(os.environ, on_cpu=gpus is None)
    names, shares = (
        ([], False)
        if gpus is None
        else gpus_of_server(range(launch.processes), list(map(str, range(gpus))), args.vllm_tensor_parallel_size)
    )
    base = copy(config)
    if model.load_in_4bit or model.load_in_8bit:
        base.quantization_config = {"quant_method": "bitsandbytes", "load_in_8bit": model.load_in_8bit}
    policy: Any = SimpleNamespace(config=base, dtype=weight_dtype(config, model))
    quantization(policy, list(filter(None, [quantization_name(policy)])), "A vLLM server")
    room = args.max_model_length or getattr(config.get_text_config(), "max_position_embeddings", None)
    command = server_command(
        args,
        policy,
        adapter,
        compute_dtype(args, policy),
        seqs=launch.processes
        * (args.generation_chunk_size or args.per_device_train_batch_size * args.steps_per_generation),
        max_model_length=room,
        on_gpu=gpus is not None,
    )
    share = None if gpus is None else share_of_gpu(args, shares)
    command += [] if share is None else ["--gpu-memory-utilization", str(share)]
    return PlannedServer(tuple(names), shares, share, ("python", *command[1:]))
