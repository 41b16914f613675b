"""Weights in the form that a rollout computes with, made once for a rollout instead of once for every token.

Inside these blocks modules hold other tensors; the parameters themselves, which optimizer and processes share, are not
touched, and come back afterwards with their bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

_Copies = dict[tuple[nn.Module, str], torch.Tensor]
"""Module and name of a parameter to what takes its place."""


@contextmanager
def cast_once(model: nn.Module, dtype: torch.dtype, room: int | None = None) -> Iterator[int]:
    """Keep the weights of linear layers in the type that autocast computes in.

    Autocast casts a weight in fp32 at every forward pass: of a layer of Qwen2 with LoRA 24 tensors for each token. The
    values are the same. Weights that an embedding shares stay, as its output keeps their type; so do sharded and
    quantized ones.

    Args:
        model: The policy. Its forward passes in the block run under autocast to ``dtype``, without gradients.
        dtype: The type.
        room: Bytes that the copies may take; if they are larger, nothing is cast. Default: no limit.

    Yields:
        The bytes of the copies.
    """
    held = [
        (module, name)
        for module in _plain_linears(model)
        for name, value in module.named_parameters(recurse=False)
        if value.dtype == torch.float32
    ]
    size = sum(getattr(module, name).numel() for module, name in held) * dtype.itemsize
    if room is not None and size > room:
        held, size = [], 0
    with torch.no_grad():
        casts: _Copies = {(module, name): getattr(module, name).to(dtype) for module, name in held}
    with _holding(casts):
        yield size


def _plain_linears(model: nn.Module) -> list[nn.Linear]:
    """Return the linear layers whose weights are whole, floating-point and no embedding's."""
    embeddings = {module.weight.data_ptr() for module in model.modules() if isinstance(module, nn.Embedding)}
    return [
        module
        for module in model.modules()
        if type(module) is nn.Linear
        and not any(isinstance(value, DTensor) or hasattr(value, "ds_id") for value in module.parameters())
        and module.weight.is_floating_point()
        and module.weight.data_ptr() not in embeddings
    ]


@contextmanager
def _holding(copies: _Copies) -> Iterator[None]:
    """Replace parameters of modules by copies inside the block."""
    own = {key: getattr(*key) for key in copies}
    try:
        for (module, name), copy in copies.items():
            setattr(module, name, nn.Parameter(copy, requires_grad=False))
        yield
    finally:
        for (module, name), parameter in own.items():
            setattr(module, name, parameter)
