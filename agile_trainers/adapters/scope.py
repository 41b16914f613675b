"""LoRA on a part of the model only."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager

from peft import LoraConfig, PeftConfig


def within_scope(config: PeftConfig, scope: str) -> LoraConfig:
    """A copy of a LoRA configuration that leaves everything outside a part of the model alone.

    Args:
        config: Its ``target_modules`` say what is adapted inside the part.
        scope: Dotted path of a module, whole or its end: ``"language_model"`` stands for ``model.language_model`` too.

    Raises:
        ValueError: If ``config`` is no LoRA configuration, or excludes modules by itself.
    """
    if not isinstance(config, LoraConfig):
        raise ValueError(f"lora_target_scope={scope!r} needs a LoraConfig as peft_config, got {type(config).__name__}.")
    if config.exclude_modules:
        raise ValueError(
            f"lora_target_scope={scope!r} and peft_config.exclude_modules={config.exclude_modules!r} both say what to leave "
            "out; keep one of them."
        )
    config = copy.deepcopy(config)
    config.exclude_modules = rf"(?!(?:.*\.)?{re.escape(scope)}\.).*"  # PEFT matches the whole name of a module
    return config


@contextmanager
def explaining_scope(scope: str | None) -> Iterator[None]:
    """Say in the caller's words that a scope left PEFT nothing to adapt."""
    try:
        yield
    except ValueError as error:
        if scope is None or "exclu" not in str(error):
            raise
        raise ValueError(
            f"lora_target_scope={scope!r} leaves nothing to adapt: no module that peft_config.target_modules names lies "
            "below a module of that name. Expected a dotted path such as 'model.layers' or 'language_model' (see "
            "model.named_modules())."
        ) from error
