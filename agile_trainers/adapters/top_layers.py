"""Runs a decoder's last layers a second time with another adapter, from the hidden states that entered them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel

from agile_trainers.adapters.roles import AdapterRouter

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
                f"critic_layers={count} needs a decoder with layers and a final norm; {_kind(base)} has none."
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
                f"{_kind(base)}. Leave critic_layers unset."
            )


def _kind(base: PreTrainedModel) -> str:
    return type(base).__name__
