"""Fuses the scaling and the addition of LoRA's forward pass into its second matrix product.

PEFT adds ``lora_B(lora_A(x)) * scaling`` to the base's output. The multiplication and the addition are as large as the
output, forward and backward. One ``addmm`` does both inside the second product.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from torch import nn

from agile_trainers.adapters.sharding import is_sharded


class FusedLinear(Linear):
    """A LoRA linear layer that computes PEFT's function of the same parameters, up to rounding, with fewer operations.

    PEFT's own code runs in all other cases than one plain adapter on a plain layer: several adapters at once, DoRA and
    other variants, merged or disabled adapters, weights that DeepSpeed or FSDP2 partitions, mixed precision without
    autocast.
    """

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the layer's output, (..., out), for ``x`` of shape (..., in)."""
        name = self.plain_adapter
        if name is None or args or kwargs or not self._computes_in(x, name):
            return super().forward(x, *args, **kwargs)
        flat = x.reshape(-1, x.size(-1))
        low_rank = self.lora_A[name](self.lora_dropout[name](flat))
        weight = self.lora_B[name].weight
        output = torch.addmm(self.base_layer(flat), low_rank, weight.t(), alpha=self.scaling[name])
        return output.view(*x.shape[:-1], -1)

    @property
    def plain_adapter(self) -> str | None:
        """The active adapter; None if there are several, or it is disabled, merged or more than two matrix products."""
        active = self.active_adapters
        if self.disable_adapters or self.merged or len(active) != 1 or type(self.base_layer) is not nn.Linear:
            return None
        (name,) = active
        if name not in self.lora_A or name in self.lora_variant or self.lora_bias[name]:
            return None
        return None if is_sharded(self.lora_B[name].weight) else name

    def _computes_in(self, x: torch.Tensor, name: str) -> bool:
        return x.dtype == self.lora_B[name].weight.dtype or torch.is_autocast_enabled(x.device.type)


def fuse(model: nn.Module) -> None:
    """Run every LoRA layer of ``model`` as :class:`FusedLinear`. Call it again after another adapter adds layers."""
    for module in model.modules():
        if type(module) is Linear:
            module.__class__ = FusedLinear


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
        and not any(map(is_sharded, module.parameters()))
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
