"""Fuses the scaling and the addition of LoRA's forward pass into its second matrix product.

PEFT adds ``lora_B(lora_A(x)) * scaling`` to the base's output. The multiplication and the addition are as large as the
output, forward and backward. One ``addmm`` does both inside the second product.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from torch import nn
from torch.distributed.tensor import DTensor


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
        weight = self.lora_B[name].weight
        return None if isinstance(weight, DTensor) or hasattr(weight, "ds_id") else name

    def _computes_in(self, x: torch.Tensor, name: str) -> bool:
        return x.dtype == self.lora_B[name].weight.dtype or torch.is_autocast_enabled(x.device.type)


def fuse(model: nn.Module) -> None:
    """Run every LoRA layer of ``model`` as :class:`FusedLinear`. Call it again after another adapter adds layers."""
    for module in model.modules():
        if type(module) is Linear:
            module.__class__ = FusedLinear
