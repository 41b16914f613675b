"""Copies of the policy's adapter on its base model: the reference, and earlier policies that the model can compute with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from peft import PeftModel
from torch import nn

from agile_trainers.adapters.lora_settings import plain
from agile_trainers.adapters.roles import POLICY, REFERENCE, belongs_to
from agile_trainers.adapters.sharding import whole


def add_reference(model: PeftModel) -> None:
    """Add the adapter ``ref``, a frozen copy of the policy, unless the model has one.

    Args:
        model: A model with an adapter ``default``, which stays active.
    """
    if REFERENCE not in model.peft_config:
        model.add_adapter(REFERENCE, plain(model.peft_config[POLICY]))
        copy_adapter(model, POLICY, REFERENCE)
    model.set_requires_grad(REFERENCE, False)


@torch.no_grad()
def copy_adapter(model: PeftModel, source: str, target: str, *, partly: bool = False, weight: float = 1.0) -> None:
    """Copy the weights of one adapter to another with the same configuration.

    Args:
        model: It has both.
        source: Name of the adapter that is read.
        target: Name of the adapter that is written.
        partly: Leave out layers that only ``source`` adapts.
        weight: Of what is copied; the rest is what was there.

    Raises:
        ValueError: If a weight of ``source`` is missing in ``target`` or has another shape.
    """
    weights = dict(model.named_parameters())
    twins = {name: f".{target}".join(name.rsplit(f".{source}", 1)) for name in weights if belongs_to(name, source)}
    if partly:
        twins = {name: twin for name, twin in twins.items() if twin in weights}
    with whole(weights[name] for pair in twins.items() for name in pair if name in weights):
        for name, twin_name in twins.items():
            read, twin = weights[name], weights.get(twin_name)
            if twin is None or twin.shape != read.shape:
                raise ValueError(
                    f"Adapter {target!r} cannot take the weights of {source!r}: {name} is {tuple(read.shape)} there "
                    f"and {'missing' if twin is None else tuple(twin.shape)} here. Both need the same configuration."
                )
            twin.copy_(read if weight == 1.0 else twin.lerp(read, weight))


class Snapshots:
    """Copies of the policy's adapter by version, on the model's device.

    Args:
        model: Returns the model, unwrapped; its parameters are whole on every process.
    """

    def __init__(self, model: Callable[[], nn.Module]) -> None:
        self._model = model
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        """Version to the weights by the parameter's name."""

    def take(self, version: int) -> None:
        """Keep the current policy as a version."""
        own = self._model().named_parameters()
        self.weights[version] = {name: weight.detach().clone() for name, weight in own if belongs_to(name, POLICY)}

    def keep(self, versions: Collection[int]) -> None:
        """Forget all other versions."""
        self.weights = {version: weights for version, weights in self.weights.items() if version in versions}

    def restore(self, weights: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        """Take the versions of a checkpoint."""
        # Copies: tensors of a file lie where its bytes do, and matrix products round by where their factors lie.
        self.weights = {
            version: {name: weight.clone() for name, weight in named.items()} for version, named in weights.items()
        }

    @contextmanager
    def holding(self, version: int | None) -> Iterator[None]:
        """Make the model compute with a version inside the block (None: as it is). Its own weights are bit-equal afterwards.

        Where a rollout holds other parameters of the policy's names, such as casts, these are replaced.
        """
        with nullcontext() if version is None else holding_weights(self._model(), self.weights[version]):
            yield


@contextmanager
def holding_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Make a model compute with other weights, given by its parameters' names, inside the block."""
    held = [(own, own.data, weights[name]) for name, own in model.named_parameters() if name in weights]
    try:
        for parameter, _, weight in held:
            parameter.data = weight.to(parameter)
        yield
    finally:
        for parameter, own, _ in held:
            parameter.data = own
