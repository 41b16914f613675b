"""A critic on the policy's base model: a LoRA adapter and a value head on top of the decoder."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel
from trl.trainer.utils import FusedCausalLMOutput

from agile_trainers.adapters.fused import fuse
from agile_trainers.adapters.lora_settings import check_bias
from agile_trainers.adapters.roles import CRITIC, POLICY, AdapterRouter, belongs_to

VALUE_HEAD = "value_head"
"""Name of the value head on the base model and in ``modules_to_save`` of the critic's configuration."""


@dataclass
class TaughtOutput(FusedCausalLMOutput):
    """Output of a forward pass beside a teacher's: TRL's per-token fields, and the divergence from the teacher."""

    divergence: torch.Tensor | None = None
    """Divergence of the next-token distribution of each token, shaped as ``log_probs``; None without a teacher."""


@dataclass
class ActorCriticOutput(TaughtOutput):
    """Output of a forward pass with ``value_positions``: the values, and TRL's per-token fields if they were requested."""

    state_values: torch.Tensor | None = None
    """(B, N) float32, V at ``value_positions``."""


def add_value_head(base: PreTrainedModel) -> None:
    """Add a value head (hidden size to 1, initialized to zero) to a base model that has none.

    Call it before loading a saved critic: ``add_value_head(base)``, then
    ``PeftModel.from_pretrained(base, f"{output_dir}/critic")``.
    """
    if not hasattr(base, VALUE_HEAD):
        head = torch.nn.Linear(base.config.get_text_config().hidden_size, 1)
        torch.nn.init.zeros_(head.weight)
        torch.nn.init.zeros_(head.bias)
        # Frozen like the rest of the base: the adapter's copy is trained.
        base.value_head = head.to(base.get_output_embeddings().weight.device).requires_grad_(False)


def add_critic(
    model: PeftModel,
    *,
    config: LoraConfig | None = None,
    layers: int | None = None,
    seed: int = 0,
    autocast_adapter_dtype: bool = True,
) -> AdapterRouter:
    """Add the adapter ``critic`` with a value head to a policy, and make the base's ``forward`` return values.

    The critic is freshly initialized, and replaces one that the model has. Afterwards
    ``model(input_ids=..., attention_mask=..., value_positions=...)`` reads values with the critic's adapter, and with
    ``labels`` and ``fused_lm_head=True`` added it also returns TRL's log-probabilities of the policy, from one call.

    Args:
        model: The policy, a LoRA adapter named ``default``. Do this after TRL has put its fused head on the base.
        config: The critic's LoRA configuration. Default: the policy's.
        layers: Number of decoder layers, counted from the last, that the critic adapts. It reads the hidden states that
            enter the policy's, without a gradient into the layers below. Default: all; the policy's adapter is then not
            read.
        seed: Seed of the initial weights. The process's random state does not change.
        autocast_adapter_dtype: PEFT's option of that name.

    Returns:
        The router between policy and critic.

    Raises:
        ValueError: If the policy is not a LoRA adapter named ``default``, or trains biases of the base, which the critic
            would share; or if the last ``layers`` cannot be run apart, or ``config`` adapts others.
    """
    policy = model.peft_config.get(POLICY)
    if not isinstance(policy, LoraConfig):
        raise ValueError(
            f"The critic copies the policy's LoRA configuration, but the model's adapters are {dict(model.peft_config)}. "
            f"Pass a LoraConfig as `peft_config` (its adapter is named {POLICY!r})."
        )
    check_bias(policy, "policy and critic")
    base = model.get_base_model()
    weights = [p for name, p in model.named_parameters() if belongs_to(name, POLICY)]
    top = None if layers is None else TopLayers(base, layers)
    critic = copy.deepcopy(config or policy)
    if top is not None:
        top.check(base)
        critic.target_modules = top.targets(model, POLICY)
        critic.layers_to_transform = critic.exclude_modules = None
    _check_layers(config, layers, base.config.get_text_config().num_hidden_layers)
    critic.modules_to_save, critic.trainable_token_indices = [VALUE_HEAD], None
    critic.init_lora_weights = True  # any other initialization would change the base that the policy uses
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        add_value_head(base)
        if CRITIC in model.peft_config:
            model.delete_adapter(CRITIC)
        model.add_adapter(CRITIC, critic, autocast_adapter_dtype=autocast_adapter_dtype)
    for name, parameter in model.named_parameters():
        if belongs_to(name, CRITIC):
            parameter.data = parameter.data.to(weights[0].dtype)
    return _make_readable(model, top)


def keep_critic(model: PeftModel, layers: int | None = None) -> AdapterRouter:
    """Use the critic that a model has, that of an earlier trainer for example, as :func:`add_critic` does a new one.

    Args:
        model: The policy, with its critic.
        layers: See :func:`add_critic`.

    Returns:
        The router between policy and critic.

    Raises:
        ValueError: If the critic has no value head, or adapts other layers.
    """
    base, config = model.get_base_model(), model.peft_config[CRITIC]
    if VALUE_HEAD not in (config.modules_to_save or ()):
        raise ValueError(f"The model's adapter {CRITIC!r} has no {VALUE_HEAD}. Set critic_start='new' to replace it.")
    _check_layers(config, layers, base.config.get_text_config().num_hidden_layers)
    return _make_readable(model, None if layers is None else TopLayers(base, layers))


def _make_readable(model: PeftModel, top: TopLayers | None) -> AdapterRouter:
    fuse(model)
    router = AdapterRouter(model)
    _return_values(model.get_base_model(), router, top)
    return router


def _check_layers(saved: LoraConfig | None, layers: int | None, total: int) -> None:
    """Raise if a saved critic reads other layers' hidden states than this one."""
    if saved is None:
        return
    names = saved.target_modules if isinstance(saved.target_modules, (set, list, tuple)) else ()
    adapted = len({found[1] for name in names if (found := re.search(r"\.(\d+)\.", name))})
    if (adapted or total) != (layers or total):
        theirs = f"critic_layers={adapted}" if 0 < adapted < total else "all layers"
        raise ValueError(
            f"The saved critic was trained with {theirs}, and critic_layers is {layers}. "
            f"{f'Set {theirs}' if 0 < adapted < total else 'Leave critic_layers unset'}, or set critic_start='new'."
        )


def _return_values(base: PreTrainedModel, router: AdapterRouter, top: TopLayers | None) -> None:
    """Add the keyword ``value_positions`` to the base's ``forward``; calls without it are unchanged."""
    original = base.forward

    # Keeps the original signature, which `generate` and the rollout generator inspect.
    @functools.wraps(type(base).forward)
    def forward(self: PreTrainedModel, *args: Any, value_positions: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if value_positions is None:
            return original(*args, **kwargs)
        outputs: Any = {}
        hidden: torch.Tensor | None = None
        if kwargs.get("fused_lm_head") and top is not None:
            with top.recording() as calls:
                outputs = original(*args, **kwargs)
            with router.route(CRITIC):
                hidden = top.run(calls)
        elif kwargs.get("fused_lm_head"):
            outputs = original(*args, **kwargs)
        if hidden is None:
            read = {name: kwargs[name] for name in ("input_ids", "attention_mask", "position_ids") if name in kwargs}
            with router.route(CRITIC) if top is None else top.routed(router, CRITIC):
                hidden = self.base_model(**read, use_cache=False).last_hidden_state
        with router.route(CRITIC):
            values = read_values(hidden, value_positions, self.value_head)
        return ActorCriticOutput(**outputs, state_values=values)

    base.forward = MethodType(forward, base)


def read_values(hidden: torch.Tensor, positions: torch.Tensor, head: torch.nn.Linear) -> torch.Tensor:
    """Return the value head's outputs at the given positions of each sequence.

    Args:
        hidden: (B, S, H), the decoder's last hidden states.
        positions: (B, N) int64, in [0, S).
        head: H to 1.

    Returns:
        (B, N) float32, or float64 if the head is.
    """
    weight = head.weight
    picked = hidden.to(weight.device).gather(1, positions.to(weight.device)[..., None].expand(-1, -1, hidden.size(-1)))
    with torch.autocast(weight.device.type, enabled=False):
        values = head(picked.to(weight.dtype))[..., 0]
        return values.to(torch.promote_types(values.dtype, torch.float32))


Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a layer's forward pass."""
_NORMS = ("norm", "final_layernorm", "final_layer_norm", "norm_f", "ln_f")
_EQUAL = 1e-3
"""Largest relative difference between a decoder and its repetition, which rounding to 16 bits explains."""


class TopLayers:
    """The last layers of a decoder and its final normalization.

    Args:
        base: A causal language model.
        count: Number of layers.

    Raises:
        ValueError: If the decoder has fewer layers, or none are found.
    """

    def __init__(self, base: PreTrainedModel, count: int) -> None:
        total = base.config.get_text_config().num_hidden_layers
        if count > total:
            raise ValueError(
                f"critic_layers must be at most {total}, the layers of {type(base).__name__}, got {count}."
            )
        found = next(
            (
                (prefix, module, name)
                for prefix, module in base.named_modules()
                for name, child in module.named_children()
                if isinstance(child, torch.nn.ModuleList) and len(child) == total
            ),
            None,
        )
        norm = None if found is None else next((n for n in _NORMS if hasattr(found[1], n)), None)
        if found is None or norm is None:
            raise ValueError(
                f"critic_layers={count} needs a decoder with layers and a final norm; {type(base).__name__} has none."
            )
        prefix, self._decoder, name = found
        self.paths = tuple(f"{prefix}.{name}.{index}." for index in range(total - count, total))
        """Beginnings of the names of the layers' modules."""
        self._layers = list(getattr(self._decoder, name))[-count:]
        self._norm = norm

    def targets(self, model: PeftModel, adapter: str) -> list[str]:
        """Return the names of the modules of these layers that an adapter has weights for.

        Raises:
            ValueError: If there is none.
        """
        names = [
            name
            for name, module in model.get_base_model().named_modules()
            if isinstance(module, BaseTunerLayer)
            and name.startswith(self.paths)
            and any(adapter in getattr(module, part, ()) for part in module.adapter_layer_names)
        ]
        if not names:
            raise ValueError(
                f"critic_layers={len(self._layers)}: the policy's adapter has no weights in these layers, whose shape the "
                "critic's takes. Raise critic_layers, or adapt these layers in peft_config."
            )
        return names

    @contextmanager
    def recording(self) -> Iterator[list[Call]]:
        """Yield a list that a forward pass inside the ``with`` block fills with the arguments of each layer."""
        calls: list[Call] = []
        with ExitStack() as hooks:
            for layer in self._layers:
                hook = layer.register_forward_pre_hook(
                    lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
                )
                hooks.callback(hook.remove)
            yield calls

    def run(self, calls: list[Call]) -> torch.Tensor:
        """Repeat the layers and the norm; return the last hidden states (B, S, H), detached from the layers below."""
        hidden = calls[0][0][0].detach()
        if torch.is_grad_enabled() and getattr(self._layers[0], "gradient_checkpointing", False):
            hidden.requires_grad_()  # reentrant checkpoints have gradients only if an input has
        for layer, (args, kwargs) in zip(self._layers, calls, strict=True):
            output = layer(hidden, *args[1:], **kwargs)
            hidden = output[0] if isinstance(output, tuple) else output
        return getattr(self._decoder, self._norm)(hidden)

    @contextmanager
    def routed(self, router: AdapterRouter, adapter: str) -> Iterator[None]:
        """Run these layers with ``adapter``, and those below with the active one, inside the ``with`` block."""
        with ExitStack() as stack:

            def switch(*_: Any) -> None:
                stack.enter_context(router.route(adapter))

            hook = self._layers[0].register_forward_pre_hook(switch)
            stack.callback(hook.remove)
            yield

    @torch.no_grad()
    def check(self, base: PreTrainedModel) -> None:
        """Compare the decoder with its repetition on a few tokens.

        Raises:
            ValueError: If they differ.
        """
        if any(hasattr(p, "ds_id") for p in base.parameters()):
            return  # weights that ZeRO-3 has divided are whole in the wrapped model's forward pass only
        ids = torch.arange(4, device=base.get_input_embeddings().weight.device)[None]
        training = base.training
        base.eval()
        with self.recording() as calls:
            expected = base.base_model(input_ids=ids, use_cache=False).last_hidden_state
        found = self.run(calls)
        base.train(training)
        if found.shape != expected.shape or not (found - expected).norm() <= _EQUAL * expected.norm():
            raise ValueError(
                f"critic_layers={len(self._layers)} repeats the decoder's last layers, which gives other hidden states in "
                f"{type(base).__name__}. Leave critic_layers unset."
            )
