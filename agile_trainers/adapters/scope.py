"""Restricts LoRA to a part of the model."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager

from peft import LoraConfig, PeftConfig


def within_scope(config: PeftConfig, scope: str) -> LoraConfig:
    """Return a copy of a LoRA configuration that adapts only modules inside one part of the model.

    Args:
        config: LoRA configuration; its ``target_modules`` select the modules inside the part.
        scope: Dotted path of a module, or the end of one: ``"language_model"`` also matches ``model.language_model``.

    Raises:
        ValueError: If ``config`` is not a LoRA configuration, or already excludes modules.
    """
    if not isinstance(config, LoraConfig):
        raise ValueError(f"lora_target_scope={scope!r} needs a LoraConfig as peft_config, got {type(config).__name__}.")
    if config.exclude_modules:
        raise ValueError(
            f"lora_target_scope={scope!r} and peft_config.exclude_modules={config.exclude_modules!r} both exclude modules; "
            "keep one of them."
        )
    config = copy.deepcopy(config)
    config.exclude_modules = rf"(?!(?:.*\.)?{re.escape(scope)}\.).*"  # PEFT matches the full name of a module
    return config


@contextmanager
def explaining_scope(scope: str | None) -> Iterator[None]:
    """Replace PEFT's errors inside the block by one that names ``lora_target_scope``, or ways to name modules."""
    try:
        yield
    except ValueError as error:
        if scope is None and "not found in the base model" in str(error):
            raise ValueError(
                f"{error} Set target_modules of peft_config to 'all-linear', or to names of model.named_modules() such as "
                "'q_proj'."
            ) from error
        if scope is None or "exclu" not in str(error):
            raise
        raise ValueError(
            f"lora_target_scope={scope!r} selects no module: none of peft_config.target_modules lies below a module "
            "of that name. Expected a dotted path such as 'model.layers' or 'language_model' (see "
            "model.named_modules())."
        ) from error
