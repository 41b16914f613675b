"""The reference policy as a second adapter on the policy's base model."""

from __future__ import annotations

import torch
from peft import PeftModel

from agile_trainers.adapters.initialization import plain
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
def copy_adapter(model: PeftModel, source: str, target: str, *, partly: bool = False) -> None:
    """Copy the weights of one adapter to another with the same configuration.

    Args:
        model: It has both.
        source: Name of the adapter that is read.
        target: Name of the adapter that is written.
        partly: Leave out layers that only ``source`` adapts.

    Raises:
        ValueError: If a weight of ``source`` is missing in ``target`` or has another shape.
    """
    weights = dict(model.named_parameters())
    twins = {name: f".{target}".join(name.rsplit(f".{source}", 1)) for name in weights if belongs_to(name, source)}
    if partly:
        twins = {name: twin for name, twin in twins.items() if twin in weights}
    with whole(weights[name] for pair in twins.items() for name in pair if name in weights):
        for name, twin_name in twins.items():
            weight, twin = weights[name], weights.get(twin_name)
            if twin is None or twin.shape != weight.shape:
                raise ValueError(
                    f"Adapter {target!r} cannot take the weights of {source!r}: {name} is {tuple(weight.shape)} there "
                    f"and {'missing' if twin is None else tuple(twin.shape)} here. Both need the same configuration."
                )
            twin.copy_(weight)
