"""Loads the adapter that a trainer continues, from a folder or the Hub."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from peft import PeftModel
from transformers.utils import logging

from agile_trainers.adapters import (
    REFERENCE,
    SavedAdapters,
    explaining_scope,
    find_adapters,
    load_policy,
    plain_copies,
)
from agile_trainers.adapters.loading import OnBase, load_tokenizer
from agile_trainers.adapters.sharding import is_zero3
from agile_trainers.adapters.untrusted import LOADERS, naming_folder

logger = logging.get_logger(__name__)


def has_adapter(arguments: Mapping[str, Any]) -> bool:
    """Return whether a trainer with these arguments trains an adapter."""
    return arguments["peft_config"] is not None or isinstance(arguments["model"], PeftModel)


def load_adapter(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], SavedAdapters | None]:
    """Load the adapter that ``model`` names, if any, as the trainable policy.

    Only weights are loaded. Optimizer, learning rate and sampling settings are the new configuration's.

    Args:
        arguments: Those of TRL's constructor, by name.

    Returns:
        The arguments with the loaded policy, and the saved adapters that it is from.

    Raises:
        ValueError: If the adapter cannot be continued as asked for, or an option needs one and there is none.
    """
    source, args, peft_config = arguments["model"], arguments["args"], arguments["peft_config"]
    quantization, init = arguments["quantization_config"], dict(args.model_init_kwargs or {})
    # TRL's own configuration, without an environment, has none of these options.
    merge, keep = (getattr(args, name, False) for name in ("merge_lora_configs", "keep_reference"))
    saved = find_adapters(source, init.pop("revision", None)) if isinstance(source, str) else None
    base = None
    if isinstance(source, OnBase):
        saved, base = source.adapters, source.base
    if merge and (saved is None or peft_config is None):
        raise ValueError(
            "merge_lora_configs=True merges `peft_config` with the adapter that `model` is a folder or Hub id of; got "
            f"model={source!r}, peft_config={peft_config!r}."
        )
    if keep and (saved is None or REFERENCE not in saved.folders):
        raise ValueError(
            f"keep_reference=True needs a `model` that is a folder or Hub id with a reference adapter in {REFERENCE}/, got "
            f"{source!r}. Leave it unset; the reference is then the loaded policy."
        )
    if saved is None:
        return dict(arguments), None
    if quantization is not None:
        init["quantization_config"] = quantization
    if args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        init["device_map"] = None  # as TRL does
    init.setdefault("trust_remote_code", args.trust_remote_code)
    zero3 = is_zero3(args.deepspeed_plugin) and quantization is None
    model = load_policy(
        saved,
        base=base,
        peft_config=peft_config,
        merge_lora_configs=merge,
        seed=args.seed,
        autocast_adapter_dtype=not zero3,
        **init,
    )
    logger.info("Continuing the adapter of %s on %s.", saved.source, saved.config.base_model_name_or_path)
    args = copy.copy(args)
    args.model_init_kwargs = None  # already used; TRL would warn that it ignores them
    tokenizer = arguments["processing_class"] or load_tokenizer(saved, args.trust_remote_code)
    loaded = {"model": model, "args": args, "processing_class": tokenizer}
    return {**arguments, **loaded, "quantization_config": None, "peft_config": None}, saved


@contextmanager
def loading_policy(arguments: Mapping[str, Any]) -> Iterator[None]:
    """Explain the errors of TRL's constructor inside the block, and let it copy adapters as they are."""
    model = arguments["model"]
    named = naming_folder(model if isinstance(model, str) else None, within=LOADERS)
    scope = explaining_scope(getattr(arguments["args"], "lora_target_scope", None))
    with scope, plain_copies(model), named:
        yield
