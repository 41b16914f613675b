"""Access to parameters that DeepSpeed's ZeRO-3 or PyTorch's FSDP2 shards over the processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import DeepSpeedPlugin
from peft import PeftModel
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from agile_trainers.adapters.roles import belongs_to


def is_zero3(plugin: DeepSpeedPlugin | None) -> bool:
    """Return whether a run partitions its weights by ZeRO-3.

    Args:
        plugin: The ``deepspeed_plugin`` of the training arguments, or of the accelerator's state.
    """
    return plugin is not None and plugin.zero_stage == 3


def is_sharded(weight: torch.Tensor) -> bool:
    """Return whether this process has a part of a weight only."""
    return isinstance(weight, DTensor) or hasattr(weight, "ds_id")


@contextmanager
def whole(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Gather these parameters inside the block, for reading and writing (ZeRO-3).

    Every process must enter and leave the block; all keep the values that the first one wrote. Parameters that are not
    sharded are unaffected.
    """
    shared = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    if not shared:
        yield
        return
    import deepspeed  # imported only when in use: the import searches for an accelerator and logs the result

    with deepspeed.zero.GatheredParameters(shared, modifier_rank=0):
        yield


@torch.no_grad()
def assign_parameter(parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Give a parameter the values of a whole tensor of its shape. Every process must take part, with the same values."""
    if isinstance(parameter, DTensor):
        value = distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
    with whole([parameter]):
        parameter.copy_(value)


@contextmanager
def gathered_once(model: torch.nn.Module) -> Iterator[None]:
    """Keep the model gathered inside the block, so that processes may run different numbers of forward passes (FSDP2).

    Otherwise a process that has finished its episodes would block the others, which wait for its shard. A model that is not
    sharded is unaffected.
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [group for module in modules for group in module._get_fsdp_state()._fsdp_param_groups]
    before = [group.post_forward_mesh_info for group in groups]
    for module in modules:
        module.unshard()
        module.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for group, mesh in zip(groups, before):
            group.post_forward_mesh_info = mesh
        for module in modules:
            module.reshard()


@contextmanager
def gathering_adapters(model: Any, deepspeed_plugin: Any) -> Iterator[None]:
    """Make the frozen adapters require gradients inside the block, under ZeRO-3.

    When ``Trainer`` saves there, it collects the parameters that require gradients, and PEFT would then store the policy's
    weights under a frozen adapter's name.
    """
    if not is_zero3(deepspeed_plugin) or not isinstance(model, PeftModel):
        yield
        return
    frozen = [
        parameter
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and any(belongs_to(name, adapter) for adapter in model.peft_config)
    ]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
