"""Counts the memory that a planned training step keeps for its backward pass, by running it on tensors without data."""

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
from agile_trainers.cli.launch_configs import SINGLE, Launch
from agile_trainers.rollout.generators.images import SUPPORTED
from agile_trainers.rollout.generators.transformers.kv_cache import as_kept

_ATTENTION = "agile_counted"


@dataclass(frozen=True)
class Engine:
    """A vLLM engine, in this process or in a server."""

    server: bool = False
    share: int | None = None
    """Bytes of the process's GPU that an engine takes; None if the GPU is not known, or a server has others."""
    parallel: int = 1
    """Processes that share an engine."""
    sleeps: bool = False
    """True if the engine's memory is free outside of rollouts."""
    offloads: bool = False
    """True if the policy's weights are in the CPU's memory in rollouts."""
    slots: int = 0
    """Adapters of which a server that the run starts has copies on its GPUs."""


@dataclass(frozen=True)
class MemoryPlan:
    """Settings of a run that determine its memory."""

    dtype: torch.dtype
    """Data type of the base's weights that are not quantized."""
    rows: int
    """Episodes of a micro-batch."""
    episodes: int
    """Episodes that are decoded at the same time."""
    tokens: int
    """Tokens of the longest episode that the limits allow, prompt included."""
    decoded: int
    """``tokens`` without the observation that a critic reads after the last answer."""
    new_tokens: int
    """Tokens of one answer."""
    gradient_checkpointing: bool
    autocast: torch.dtype | None = None
    """Data type of mixed precision."""
    quantization: str | None = None
    """A key of ``QUANTIZED``."""
    dropout: bool = False
    optimizer: str = "adamw_torch_fused"
    peft_config: PeftConfig | None = None
    """Adapters that are trained instead of the model."""
    adapters: int = 1
    """2 for policy and critic."""
    copies: int = 1
    """2 with a frozen reference model beside the policy."""
    trust_remote_code: bool = False
    launch: Launch = SINGLE
    """Processes, and what they share."""
    engine: Engine | None = None
    """The vLLM engine of the rollouts; None for the transformers generator."""
    snapshots: int = 0
    """Adapters of earlier policies that are kept (``batches_ahead``)."""
    teachers: int = 0
    """Bytes of the frozen teachers' weights."""
    filters: bool = False
    """True if tokens are sampled with filters, whose head holds whole logits of a piece."""

    @property
    def computes(self) -> torch.dtype:
        """Data type of the base's weights in the computation, that of a quantized base's too."""
        return self.autocast if self.autocast and (self.quantization or self.launch.zero) else self.dtype


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


def trace(config: PretrainedConfig, plan: MemoryPlan) -> Step:
    """Run the forward pass of a training step, as TRL's ``GRPOTrainer`` does, on tensors without data.

    Args:
        config: The model's configuration. No weights are loaded or allocated.
        plan: The settings of the run.

    Raises:
        ValueError: If ``peft_config`` matches no module of the model.
    """
    with torch.device("meta"):
        reads_images = config.model_type in SUPPORTED
        model: Any = (AutoModelForImageTextToText if reads_images else AutoModelForCausalLM).from_config(
            config, dtype=plan.computes, trust_remote_code=plan.trust_remote_code, attn_implementation=_ATTENTION
        )
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        head = model.get_output_embeddings().weight
        linear = {
            id(m.weight): m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear) and m.weight is not head
        }
        base = sum(parameter.numel() for parameter in model.parameters())
        if plan.peft_config is not None:
            model = get_peft_model(model, plan.peft_config)
            fuse(model)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    step = Step(sum(linear.values()), base - sum(linear.values()), trained, tuple(head.shape), head.requires_grad)
    model.train(plan.dropout)
    mixed = nullcontext() if plan.autocast is None else torch.autocast("cpu", plan.autocast)
    with _WithoutData():
        _without_data(model)
        ids = torch.zeros(plan.rows, plan.tokens, dtype=torch.long)
        with mixed, _counting(model, step) as calls:
            model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, fused_lm_head=True)
        if step.layers:
            largest = max(range(len(step.layers)), key=step.layers.__getitem__)
            step.temporaries = _beside(calls[largest], plan.autocast, step) - step.layers[largest]
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
