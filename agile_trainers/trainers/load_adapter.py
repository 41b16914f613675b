"""Loads the adapter that a trainer continues, from a folder or the Hub."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from transformers.utils import logging

from agile_trainers.adapters import REFERENCE, SavedAdapters, find_adapters, load_policy
from agile_trainers.adapters.loading import OnBase, load_tokenizer
from agile_trainers.adapters.sharding import is_zero3

logger = logging.get_logger(__name__)


@dataclass
class TrainerInputs:
    """Arguments of TRL's constructor, and the saved adapters that they were loaded from."""

    model: Any
    args: Any
    processing_class: Any
    quantization_config: Any
    peft_config: Any
    saved: SavedAdapters | None = None


def load_adapter(inputs: TrainerInputs) -> TrainerInputs:
    """Load the adapter that ``model`` names, if any, as the trainable policy.

    Only weights are loaded. Optimizer, learning rate and sampling settings are the new configuration's.

    Raises:
        ValueError: If the adapter cannot be continued as asked for, or an option needs one and there is none.
    """
    args, init = inputs.args, dict(inputs.args.model_init_kwargs or {})
    # TRL's own configuration, without an environment, has none of these options.
    merge, keep = (getattr(args, name, False) for name in ("merge_lora_configs", "keep_reference"))
    saved = find_adapters(inputs.model, init.pop("revision", None)) if isinstance(inputs.model, str) else None
    base = None
    if isinstance(inputs.model, OnBase):
        saved, base = inputs.model.adapters, inputs.model.base
    if merge and (saved is None or inputs.peft_config is None):
        raise ValueError(
            "merge_lora_configs=True merges `peft_config` with the adapter that `model` is a folder or Hub id of; got "
            f"model={inputs.model!r}, peft_config={inputs.peft_config!r}."
        )
    if keep and (saved is None or REFERENCE not in saved.folders):
        raise ValueError(
            f"keep_reference=True needs a `model` that is a folder or Hub id with a reference adapter in {REFERENCE}/, got "
            f"{inputs.model!r}. Leave it unset; the reference is then the loaded policy."
        )
    if saved is None:
        return inputs
    if inputs.quantization_config is not None:
        init["quantization_config"] = inputs.quantization_config
    if args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        init["device_map"] = None  # as TRL does
    init.setdefault("trust_remote_code", args.trust_remote_code)
    zero3 = is_zero3(args.deepspeed_plugin) and inputs.quantization_config is None
    model = load_policy(
        saved,
        base=base,
        peft_config=inputs.peft_config,
        merge_lora_configs=merge,
        seed=args.seed,
        autocast_adapter_dtype=not zero3,
        **init,
    )
    logger.info("Continuing the adapter of %s on %s.", saved.source, saved.config.base_model_name_or_path)
    args = copy.copy(args)
    args.model_init_kwargs = None  # already used; TRL would warn that it ignores them
    return TrainerInputs(
        model, args, inputs.processing_class or load_tokenizer(saved, args.trust_remote_code), None, None, saved
    )
