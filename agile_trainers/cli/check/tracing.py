"""Counts the memory that a training step keeps for its backward pass, by running it on tensors without data."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from peft import PeftConfig, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from trl.trainer.utils import add_fused_lm_head

from agile_trainers.adapters.fused import fuse
from agile_trainers.rollout.generators.images import SUPPORTED
from agile_trainers.rollout.generators.transformers.kv_cache import as_kept

_ATTENTION = "agile_counted"


@dataclass(frozen=True)
class Shape:
    """Settings that determine the memory of a step."""

    rows: int
    """Episodes of a micro-batch."""
    tokens: int
    """Tokens of the longest episode, prompt included."""
    dtype: torch.dtype
    """Data type of the base model's weights, or of the computation for a quantized base."""
    autocast: torch.dtype | None = None
    """Data type of mixed precision."""
    dropout: bool = False
    peft_config: PeftConfig | None = None
    """Adapters that are trained instead of the model."""


@dataclass
class Step:
    """Memory of a step, in bytes unless stated otherwise."""

    linear: int
    """Number of weights of linear layers without the head, which quantization compresses."""
    others: int
    """Number of the base's other weights."""
    trained: int
    """Number of trained weights."""
    head: tuple[int, int]
    """Rows and columns of the output head."""
    head_is_trained: bool = False
    saved: int = 0
    """Memory kept for the backward pass without gradient checkpointing."""
    layers: list[int] = field(default_factory=list)
    """The part of ``saved`` of each layer that gradient checkpointing would recompute."""
    inputs: list[int] = field(default_factory=list)
    """The input of each of these layers, which checkpointing keeps."""
    saved_inputs: int = 0
    """The part of ``saved`` that is the input of one of these layers."""
    keys: int = 0
    """Keys and values of one token of one row, of all layers."""
    cached: int = 0
    """Number of keys and values of one token of one row, of all layers."""
    windowed: list[tuple[int, int]] = field(default_factory=list)
    """Bytes per token and window in tokens of each layer with a window; not in ``keys``."""
    temporaries: int = 0
    """Most that the backward pass of the largest layer takes beside what was kept for it."""

    def kept(self, gradient_checkpointing: bool) -> int:
        """Return the memory at the start of the backward pass."""
        if not gradient_checkpointing or not self.layers:
            return self.saved
        return self.saved - sum(self.layers) - self.saved_inputs + sum(self.inputs)

    def again(self, gradient_checkpointing: bool) -> int:
        """Return the memory of the largest layer that checkpointing computes again; 0 without."""
        return max(self.layers, default=0) if gradient_checkpointing else 0


def trace_step(config: PretrainedConfig, shape: Shape, *, trust_remote_code: bool = False) -> Step:
    """Run the forward pass of a training step, as TRL's ``GRPOTrainer`` does, on tensors without data.

    Args:
        config: The model's configuration. No weights are loaded or allocated.
        shape: The settings of the step.
        trust_remote_code: True to allow the model's own code.

    Raises:
        ValueError: If ``peft_config`` matches no module of the model.
    """
    with torch.device("meta"):
        reads_images = config.model_type in SUPPORTED
        model: Any = (AutoModelForImageTextToText if reads_images else AutoModelForCausalLM).from_config(
            config, dtype=shape.dtype, trust_remote_code=trust_remote_code, attn_implementation=_ATTENTION
        )
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        head = model.get_output_embeddings().weight
        linear = {
            id(m.weight): m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear) and m.weight is not head
        }
        base = sum(parameter.numel() for parameter in model.parameters())
        if shape.peft_config is not None:
            model = get_peft_model(model, shape.peft_config)
            fuse(model)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    step = Step(sum(linear.values()), base - sum(linear.values()), trained, tuple(head.shape), head.requires_grad)
    model.train(shape.dropout)
    mixed = nullcontext() if shape.autocast is None else torch.autocast("cpu", shape.autocast)
    with _WithoutData():
        _without_data(model)
        ids = torch.zeros(shape.rows, shape.tokens, dtype=torch.long)
        with mixed, _counting(model, step) as calls:
            model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, fused_lm_head=True)
        if step.layers:
            largest = max(range(len(step.layers)), key=step.layers.__getitem__)
            step.temporaries = _beside(calls[largest], shape.autocast, step) - step.layers[largest]
    return step


class _WithoutData(FakeTensorMode):
    """Asks once whether there is a GPU. PyTorch asks at each operation, a sixth of the time where there is none."""

    @cached_property
    def avoid_device_init(self) -> bool:
        return super().avoid_device_init


_Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
"""A layer with its arguments."""


def _beside(call: _Call, autocast: torch.dtype | None, step: Step) -> int:
    """Return the most memory that a layer's forward and backward pass take together, without its input and its gradients."""
    layer, (hidden, *rest), named = call
    for weight in layer.parameters():
        weight.grad = torch.empty_like(weight) if weight.requires_grad else None
    hidden, counted = hidden.detach().requires_grad_(), Step(0, 0, 0, step.head)
    _counted.append(counted)  # keys and values of this pass
    try:
        with _Live() as live:
            with nullcontext() if autocast is None else torch.autocast("cpu", autocast):
                output = layer(hidden, *rest, **named)
            output = output[0] if isinstance(output, tuple) else output
            output.backward(torch.empty_like(output))
    finally:
        _counted.pop()
    return live.most


class _Live(TorchDispatchMode):
    """Counts the bytes of the tensors that are made and not yet freed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._there = set[int]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in before and storage._cdata not in self._there:
                    self._there.add(storage._cdata)
                    weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
                    self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        return made

    def _free(self, key: int, size: int) -> None:
        self._there.discard(key)
        self.now -= size


def _without_data(model: nn.Module) -> None:
    """Replace parameters and buffers by CPU tensors without data, to which the autocast rules of a device apply."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        parameters = module.named_parameters(recurse=False, remove_duplicate=False)
        for name, tensor in [*parameters, *module.named_buffers(recurse=False, remove_duplicate=False)]:
            if id(tensor) not in made:
                empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                trained = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if trained else empty
            setattr(module, name, made[id(tensor)])


@contextmanager
def _counting(model: nn.Module, step: Step) -> Iterator[list[_Call]]:
    """Count what the forward pass in the block keeps; yield the layers with their arguments, as they are called."""
    own = {tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers()]}
    seen: dict[int, Any] = {}
    layer_input: list[torch.Tensor] = []
    calls: list[_Call] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own and storage._cdata not in seen:
            seen[storage._cdata] = storage  # kept, so that its address is not reused
            step.saved += storage.nbytes()
            if layer_input and storage._cdata == layer_input[0].untyped_storage()._cdata:
                step.saved_inputs += storage.nbytes()
            elif layer_input:
                step.layers[-1] += storage.nbytes()
        return tensor

    def enter(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        calls.append((module, arguments, named))
        layer_input[:] = [arguments[0]]
        step.layers.append(0)
        step.inputs.append(arguments[0].untyped_storage().nbytes())

    def leave(*_: Any) -> None:
        layer_input.clear()

    hooks = []
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            hooks += [layer.register_forward_pre_hook(enter, with_kwargs=True), layer.register_forward_hook(leave)]
    _counted.append(step)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield calls
    finally:
        _counted.pop()
        for hook in hooks:
            hook.remove()


_counted: list[Step] = []


def _attend(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Run SDPA and record the size of keys and values."""
    rows, _, tokens, _ = key.shape
    window = kwargs.get("sliding_window")
    kept = [states if window else as_kept(states) for states in (key, value)]
    size = sum(states.nbytes for states in kept) // (rows * tokens)
    _counted[-1].cached += (key.numel() + value.numel()) // (rows * tokens)
    if window:
        _counted[-1].windowed.append((size, int(window)))
    else:
        _counted[-1].keys += size
    return sdpa_attention_forward(module, query, key, value, *args, **kwargs)


AttentionInterface.register(_ATTENTION, _attend)
AttentionMaskInterface.register(_ATTENTION, sdpa_mask)
