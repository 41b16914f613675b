"""Effects of an adapter's initialization (``init_lora_weights``) on the initial policy and on the base model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft import LoraConfig, PeftConfig, PeftModel

from agile_trainers.adapters.roles import POLICY, REFERENCE

IDLE = (True, "gaussian", "orthogonal", "eva")
"""Values of ``init_lora_weights`` with which the initial policy equals the base model."""
KEPT_BASE = (*IDLE, False)
"""Values of ``init_lora_weights`` that leave the base's weights unchanged."""
REPEATABLE = ("pissa", "olora")
"""Values that move a part of the base into the adapter deterministically, so that a saved adapter can be loaded."""
_UNREPEATABLE = {
    "pissa_niter": "its decomposition is random",
    "corda": "its decomposition needs the activations of that time",
    "lora_ga": "its decomposition needs the gradients of that time",
}


def changes_base(config: PeftConfig) -> bool:
    """Return whether creating the adapter changes the weights of the base."""
    return isinstance(config, LoraConfig) and config.init_lora_weights not in KEPT_BASE


def starts_elsewhere(config: PeftConfig) -> bool:
    """Return whether disabling the adapter gives another policy than the one that training starts from."""
    return isinstance(config, LoraConfig) and config.init_lora_weights not in IDLE


def check_repeatable(model: Any, peft_config: PeftConfig | None) -> None:
    """Reject a policy whose initialization changes the base irreproducibly, since only the adapter is saved.

    Args:
        model: The trainer's ``model``, with or without an adapter.
        peft_config: Configuration of the adapter that the trainer creates, if any.

    Raises:
        ValueError: If the initialization changes the base in a way that a later process cannot repeat.
    """
    config = model.peft_config.get(POLICY) if isinstance(model, PeftModel) else peft_config
    init = str(getattr(config, "init_lora_weights", True)).lower()
    for name, reason in _UNREPEATABLE.items():
        if init.startswith(name):
            raise ValueError(
                f"init_lora_weights={init!r} changes the base, and {reason}: a resumed run, or anyone who loads the saved "
                "adapter, would get another policy without an error. Use init_lora_weights='pissa' or 'olora', which load "
                "again, or save the changed base with `save_pretrained` and put a plain adapter on it."
            )


def plain(config: PeftConfig) -> PeftConfig:
    """Return a copy of an adapter's configuration whose initialization does not change the base."""
    config = copy.deepcopy(config)
    if changes_base(config):
        config.init_lora_weights = True
    return config


@contextmanager
def plain_copies(model: Any) -> Iterator[None]:
    """Keep the base unchanged while TRL copies ``model``'s policy as the reference; PiSSA would change it otherwise."""
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
