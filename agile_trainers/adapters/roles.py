"""Names the adapters of a model and selects the one that runs.

PEFT's ``set_adapter`` also moves ``requires_grad`` from one adapter to the other, so it cannot serve a step that runs and
trains two of them. The router below changes only which adapter is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from transformers import PreTrainedModel

POLICY, REFERENCE, CRITIC, TEACHER = "default", "ref", "critic", "teacher"
"""Adapter names: PEFT's default, TRL's reference, this library's critic and teacher."""


def base_model(model: torch.nn.Module) -> PreTrainedModel:
    """Return the model below the adapters."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def belongs_to(name: str, adapter: str) -> bool:
    """Return whether a parameter belongs to an adapter, by its name. An embedding's name ends with the adapter's."""
    return f".{adapter}." in name or name.endswith(f".{adapter}")


class AdapterRouter:
    """Selects the adapter of a forward pass, and of its recomputation under gradient checkpointing.

    Checkpointing recomputes a layer during the backward pass, when another adapter may be active. The gradients would then
    silently be those of another function. The router records the adapter of every checkpoint, in reentrant and
    non-reentrant mode.

    Args:
        model: A model with all adapters that the router selects from. Its base's ``_set_gradient_checkpointing`` is
            replaced on the instance, so make the router before checkpointing is enabled.
    """

    def __init__(self, model: PeftModel):
        self._layers = _adapted(model)
        self._active: str | None = None
        wrap_checkpointing(model.get_base_model(), lambda: partial(self.route, self._active))

    @contextmanager
    def route(self, adapter: str | None) -> Iterator[None]:
        """Run ``adapter`` inside the ``with`` block. None and the active adapter change nothing."""
        if adapter is None or adapter == self._active:
            yield
            return
        active, self._active = self._active, adapter
        try:
            with _running(self._layers, adapter):
                yield
        finally:
            self._active = active


@contextmanager
def running(model: PeftModel, adapter: str | None) -> Iterator[None]:
    """Run ``adapter`` inside the ``with`` block, or the base alone if it is None; what is trainable does not change.

    Args:
        model: It has the adapter.
        adapter: Its name.
    """
    with _running(_adapted(model), adapter):
        yield


def check_adapter(model: Any, name: str | None, *, use_vllm: bool) -> None:
    """Check that a trainer can play with an adapter of its model; None stands for the base model of one.

    Raises:
        ValueError: If the model does not have it, or vLLM samples, which has the policy only.
    """
    adapters = list(model.peft_config) if isinstance(model, PeftModel) else []
    if not adapters or (name is not None and name not in adapters):
        raise ValueError(
            f"There is no adapter {name!r}: the model has {', '.join(map(repr, adapters)) or 'none'}. The reference is an "
            "adapter with reference_adapter=True, and use_adapter(None) plays the base model of an adapter."
        )
    if use_vllm:
        raise ValueError(
            "use_adapter() switches the trainer's own model, and vLLM samples with the policy. Save the model and play its "
            "folders with evaluate_policy(), or leave use_vllm unset."
        )


def _adapted(model: PeftModel) -> list[BaseTunerLayer | AuxiliaryTrainingWrapper]:
    return [m for m in model.modules() if isinstance(m, (BaseTunerLayer, AuxiliaryTrainingWrapper))]


@contextmanager
def _running(layers: list[BaseTunerLayer | AuxiliaryTrainingWrapper], adapter: str | None) -> Iterator[None]:
    before = [(layer, layer._active_adapter) for layer in layers]
    for layer in layers:
        layer._active_adapter = [adapter] if adapter is not None and _knows(layer, adapter) else []
    try:
        yield
    finally:
        for layer, names in before:
            layer._active_adapter = names


def _knows(layer: BaseTunerLayer | AuxiliaryTrainingWrapper, adapter: str) -> bool:
    """Return whether the adapter has weights for a layer; otherwise the base's module or token embedding runs."""
    if isinstance(layer, TrainableTokensLayer):
        return adapter in layer.token_indices
    return isinstance(layer, BaseTunerLayer) or adapter in layer._adapters


def wrap_checkpointing(
    base: PreTrainedModel, current: Callable[[], Callable[[], AbstractContextManager[None]]]
) -> None:
    """Recompute a model's checkpoints in the context of their forward pass, whenever gradient checkpointing is enabled.

    Args:
        base: The model below the adapters.
        current: Called in a forward pass; returns what makes its context again.
    """
    original = base._set_gradient_checkpointing

    def remembering(checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        context = current()

        def run(*inputs: Any, **options: Any) -> Any:
            with context():
                return function(*inputs, **options)

        return checkpoint(run, *args, **kwargs)

    def set_gradient_checkpointing(enable: bool = True, **options: Any) -> None:
        if "gradient_checkpointing_func" in options:
            options["gradient_checkpointing_func"] = partial(remembering, options["gradient_checkpointing_func"])
        original(enable=enable, **options)

    base._set_gradient_checkpointing = set_gradient_checkpointing


def is_teacher(adapter: str) -> bool:
    """Return whether an adapter is a teacher, by its name: ``teacher``, or ``teacher_0`` and so on of several."""
    return adapter.partition("_")[0] == TEACHER


@contextmanager
def without_teachers(model: Any) -> Iterator[None]:
    """Leave the teachers' adapters out of what is saved inside the ``with`` block: they have folders of their own."""
    configs = model.peft_config if isinstance(model, PeftModel) else {}
    left_out = {name: configs.pop(name) for name in list(configs) if is_teacher(name)}
    try:
        yield
    finally:
        configs.update(left_out)


def unfreeze(model: PeftModel, adapters: Iterable[str]) -> None:
    """Make these adapters trainable.

    PEFT leaves only the active adapter trainable whenever an adapter is switched or disabled, and a reference pass does so
    in the middle of a training step. Call this function right before the forward pass of the loss.
    """
    model.set_requires_grad(list(adapters), True)
