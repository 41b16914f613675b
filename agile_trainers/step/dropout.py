"""Switches off dropout, layer drop and router noise in a model."""

from __future__ import annotations

import re
from types import MethodType
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers.utils import logging

logger = logging.get_logger(__name__)

_NOISE = re.compile("drop|jitter|noise")
_READ_FROM_CONFIG = re.compile("^(?!classifier|summary).*(dropout|pdrop)")
"""Rates that forward passes read from the configuration itself (Falcon, GPT-Neo, GPT-J, Persimmon)."""
_SAMPLING_ROUTERS = ("PhimoeTopKRouter",)
"""Classes that route to sampled experts in training mode at any rate. Their rates act in eval mode too."""


def switch_off_noise(model: nn.Module) -> None:
    """Set the rates of dropout, layer drop and router jitter to 0, so that training mode computes the same as eval mode.

    TRL's ``disable_dropout_in_model`` reaches ``nn.Dropout`` only. Most transformers models keep the rates of attention,
    residual and router noise as floats, on their modules or on the configuration. Changes of the configuration are logged
    and are saved with the model. Call it again after an adapter is added.

    Args:
        model: Any model, adapters included.
    """
    for module in model.modules():
        if type(module).__name__ in _SAMPLING_ROUTERS:
            module.train = MethodType(_stay_in_eval, module)  # type: ignore[method-assign]
            module.eval()
        elif isinstance(module, _DropoutNd):
            module.p = 0.0
        else:
            _zero(module, _NOISE)
    config = getattr(model, "config", None)
    if config is not None:
        config = config.get_text_config()
        if changed := _zero(config, _READ_FROM_CONFIG):
            logger.info(
                "disable_dropout=True sets %s of the model's configuration to 0, also in what is saved.",
                ", ".join(changed),
            )


def is_noisy(model: nn.Module) -> bool:
    """Return whether a model in training mode has dropout, layer drop or router noise."""
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            rates = {"drop": module.p}
        else:
            rates = {name: value for name, value in vars(module).items() if _NOISE.search(name)}
        if any(isinstance(rate, float) and rate > 0 for rate in rates.values()):
            return True
    config = getattr(model, "config", None)
    rates = {} if config is None else vars(config.get_text_config())
    return any(isinstance(r, float) and r > 0 for n, r in rates.items() if _READ_FROM_CONFIG.search(n))


def _zero(holder: Any, names: re.Pattern[str]) -> list[str]:
    """Set the positive floats of ``holder`` with a matching name to 0, and return their names."""
    rates = [
        name for name, value in vars(holder).items() if isinstance(value, float) and value > 0 and names.search(name)
    ]
    for name in rates:
        setattr(holder, name, 0.0)
    return rates


def _stay_in_eval(module: nn.Module, mode: bool = True) -> nn.Module:
    return nn.Module.train(module, False)
