"""States why the rows of a model cannot be packed, and up to which length they can."""

from __future__ import annotations

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from agile_trainers.rollout.generators.architecture import same_up_to, takes_position_ids

_FULL = {"full_attention", "attention"}
_WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Types of layers that equal full attention on rows that fit the option of the configuration."""


def why_padded(model: torch.nn.Module, base: PreTrainedModel) -> str | None:
    """Return why the rows of a model must stay padded; None if they can be packed.

    Args:
        model: The policy or the reference, with adapters.
        base: The model below the adapters.
    """
    config, name = base.config.get_text_config(), type(base).__name__
    others = set(getattr(config, "layer_types", None) or ()) - _FULL - _WINDOWS.keys()
    checks = {
        f"{name} has layers of type {', '.join(sorted(others))}": bool(others),
        f"{name} is recurrent": base._is_stateful or hasattr(config, "ssm_cfg"),
        f"{name} counts positions itself": not takes_position_ids(base),
        f"{name} has attention sinks": any(n.rpartition(".")[2] == "sinks" for n, _ in base.named_parameters()),
        f"{name} caps attention scores": getattr(config, "attn_logit_softcapping", None) is not None,
        f"{name} attends to later tokens": not getattr(config, "is_causal", True) or base.config.is_encoder_decoder,
        f"{name} reads images or sound": config is not base.config,
        f"{name} does not take an attention function": not base._supports_attention_backend,
        "the adapter adds virtual tokens": _prompts(model),
        f"the device is {base.device.type}": base.device.type not in ("cpu", "cuda", "meta"),
    }
    return next((reason for reason, holds in checks.items() if holds), None)


def adds_virtual_tokens(model: torch.nn.Module) -> bool:
    """Return whether an adapter adds tokens in front of the input, so that columns of tokens and hidden states differ."""
    return isinstance(model, PeftModel) and any(c.is_prompt_learning for c in model.peft_config.values())


def _prompts(model: torch.nn.Module) -> bool:
    adapters = model.peft_config.values() if isinstance(model, PeftModel) else ()
    return any(c.is_prompt_learning or getattr(c, "is_adaption_prompt", False) for c in adapters)


def longest_packed(base: PreTrainedModel) -> int | None:
    """Return the tokens of the longest row on which the model attends fully; None: any.

    Longer rows stay padded: those beyond a window, and those with which a rotary embedding changes for all rows of the pass.
    """
    config = base.config.get_text_config()
    types = set(getattr(config, "layer_types", None) or _WINDOWS)
    windows = [getattr(config, option, None) for kind, option in _WINDOWS.items() if kind in types]
    if hasattr(config, "use_sliding_window") and not config.use_sliding_window:
        windows = []
    return min((n for n in (*windows, same_up_to(config)) if n is not None), default=None)
