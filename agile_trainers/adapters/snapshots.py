"""Keeps the adapters of earlier policies, and lets a model compute with one of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from agile_trainers.adapters.roles import POLICY, belongs_to


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
        held: list[tuple[nn.Parameter, torch.Tensor]] = []
        weights = {} if version is None else self.weights[version]
        for name, parameter in self._model().named_parameters() if weights else ():
            if name in weights:
                held.append((parameter, parameter.data))
                parameter.data = weights[name].to(parameter)
        try:
            yield
        finally:
            for parameter, own in held:
                parameter.data = own
