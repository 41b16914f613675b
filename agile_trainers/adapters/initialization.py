"""What an adapter's initialization does to the function it starts as, and to the base below it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft import LoraConfig, PeftConfig, PeftModel

from agile_trainers.adapters.roles import POLICY, REFERENCE

IDLE = (True, "gaussian", "orthogonal", "eva")
"""Values of ``init_lora_weights`` with which the adapter starts as the base: disabled, it is what it was at the start."""
KEPT_BASE = (*IDLE, False)
"""Those that change the adapter alone."""
REPEATABLE = ("pissa", "olora")
"""Those that take a part of the base into the adapter, the same part each time, so that a saved adapter can be loaded."""
_UNREPEATABLE = {
    "pissa_niter": "its decomposition is random",
    "corda": "its decomposition needs the activations of then",
    "lora_ga": "its decomposition needs the gradients of then",
}


def changes_base(config: PeftConfig) -> bool:
    """Whether making the adapter changes the weights of the base."""
    return isinstance(config, LoraConfig) and config.init_lora_weights not in KEPT_BASE


def starts_elsewhere(config: PeftConfig) -> bool:
    """Whether the base with the adapter disabled is another policy than the one that training starts from."""
    return isinstance(config, LoraConfig) and config.init_lora_weights not in IDLE


def check_repeatable(model: Any, peft_config: PeftConfig | None) -> None:
    """Refuse a policy that nobody could load again, since its base is saved nowhere.

    Args:
        model: What a trainer was given, maybe with an adapter.
        peft_config: Of the adapter that it is to make, if any.

    Raises:
        ValueError: If its initialization changes the base in a way that a later process cannot repeat.
    """
    config = model.peft_config.get(POLICY) if isinstance(model, PeftModel) else peft_config
    init = str(getattr(config, "init_lora_weights", True)).lower()
    for name, reason in _UNREPEATABLE.items():
        if init.startswith(name):
            raise ValueError(
                f"init_lora_weights={init!r} changes the base, and {reason}: a resumed run, or whoever loads the saved "
                "adapter, would get another policy without an error. Use init_lora_weights='pissa' or 'olora', which load "
                "again, or save the changed base with `save_pretrained` and put a plain adapter on it."
            )


def plain(config: PeftConfig) -> PeftConfig:
    """A copy of an adapter's configuration for another adapter beside it, which leaves the base as it is."""
    config = copy.deepcopy(config)
    if changes_base(config):
        config.init_lora_weights = True
    return config


@contextmanager
def plain_copies(model: Any) -> Iterator[None]:
    """Let a reference that TRL copies from ``model``'s policy leave the base as it is, which PiSSA's start would not."""
    config = model.peft_config.get(POLICY) if isinstance(model, PeftModel) else None
    if config is None or not changes_base(config):
        yield
        return
    init, config.init_lora_weights = config.init_lora_weights, True
    try:
        yield
        if REFERENCE in model.peft_config:  # TRL's copy shares the policy's configuration
            model.peft_config[REFERENCE] = copy.deepcopy(config)
    finally:
        config.init_lora_weights = init
