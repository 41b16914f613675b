"""Checks that accelerate started the processes and the engine that the launch configuration names."""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DeepSpeedPlugin
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig
from transformers.utils import logging

from agile_trainers.adapters.sharding import is_zero3

logger = logging.get_logger(__name__)

_ENGINES = {"ACCELERATE_USE_DEEPSPEED": "DEEPSPEED", "ACCELERATE_USE_FSDP": "FSDP"}
"""Environment variables that ``accelerate launch`` sets, with the ``distributed_type`` that each stands for."""
_SPLIT = {"cp_size": "context", "sp_size": "sequence", "tp_size": "tensor"}
"""Sizes of ``ParallelismConfig`` that, above 1, divide an episode among processes."""


def episode_split(config: Any) -> str:
    """Name the parallelism that divides an episode among processes, such as ``cp_size=2 (context parallelism)``, or "".

    Args:
        config: ``parallelism_config`` of the trainer's; None reads a launch configuration's from environment variables.
    """
    if config is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false") == "true":
        config = ParallelismConfig()
    sizes = {name: getattr(config, name, 1) for name in _SPLIT}
    return ", ".join(f"{name}={size} ({_SPLIT[name]} parallelism)" for name, size in sizes.items() if size > 1)


def uses_deepspeed(args: Any) -> bool:
    """Return True if ``args.deepspeed`` or the launch configuration names DeepSpeed."""
    return bool(args.deepspeed) or os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"


def fall_back_to_cpu(args: Any) -> None:
    """Train on the CPU where there is no GPU, and in float32 on the CPU unless the launch configuration says otherwise.

    Args:
        args: A configuration; ``use_cpu`` and ``bf16`` are set, unless a type of numbers is.
    """
    if args.bf16 is not None or args.fp16 or (torch.accelerator.is_available() and not args.use_cpu):
        return
    if not args.use_cpu:
        logger.warning(
            "There is no GPU: training runs on the CPU, in float32 unless the launch configuration says otherwise."
        )
    args.use_cpu, args.bf16 = True, os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16"


def fill_deepspeed(args: Any) -> None:
    """Fill the ``"auto"`` entries of ``args.deepspeed`` again, after a default that they depend on was decided.

    ``TrainingArguments`` fills them when it is made, which is before the trainer knows the learning rate.
    """
    if args.deepspeed:
        args.hf_deepspeed_config = HfTrainerDeepSpeedConfig(args.deepspeed)
        args.hf_deepspeed_config.trainer_config_process(args)
        args.deepspeed_plugin = DeepSpeedPlugin(hf_ds_config=args.hf_deepspeed_config)


def check_engine(accelerator: Accelerator, args: Any) -> None:
    """Reject a run whose processes or engine differ from the launch configuration.

    Args:
        accelerator: The trainer's.
        args: The trainer's; reads ``ds3_gather_for_generation`` and ``use_vllm``.

    Raises:
        ValueError: If processes do not communicate, the engine is not the launch configuration's, or processes would wait
            for each other in a rollout.
    """
    engine, started = accelerator.distributed_type.value, int(os.environ.get("WORLD_SIZE", "1"))
    if started != accelerator.num_processes:
        raise ValueError(
            f"{started} processes were started, but each would train by itself: there is no GPU, and accelerate was not "
            "told to do without. Set use_cpu=True in the trainer's configuration, or start one process."
        )
    for variable, expected in _ENGINES.items():
        if os.environ.get(variable, "false").lower() == "true" and engine != expected:
            raise ValueError(
                f"The launch configuration names {expected}, but accelerate would silently run {engine}: FSDP needs GPUs, "
                "DeepSpeed its package. Launch with another file of accelerate_configs/ (without GPUs one of cpu/), or see "
                "what `agile-trainers env` says."
            )
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    if fsdp is not None and fsdp.fsdp_version == 1:
        raise ValueError(
            "fsdp_version=1 gathers weights layer by layer from all processes, whose episodes differ in length: a rollout "
            "would hang. Use fsdp_version=2, as accelerate_configs/fsdp2.yaml does."
        )
    if is_zero3(accelerator.state.deepspeed_plugin) and not (args.ds3_gather_for_generation or args.use_vllm):
        raise ValueError(
            "ds3_gather_for_generation=False gathers weights layer by layer from all processes, whose episodes differ in "
            "length: a rollout would hang. Leave it True; the weights of the whole model must then fit on a GPU."
        )
