"""Loads a saved policy with its tokenizer: a folder, a Hub id or an adapter."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import PartialState
from peft import PeftModel
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedModel
from trl.trainer.utils import create_model_from_path

from agile_trainers.adapters import find_adapters, load_policy
from agile_trainers.adapters.fused import fuse
from agile_trainers.adapters.loading import load_tokenizer


def load_model(
    model: str, tokenizer: Any = None, *, device: torch.device | str | None = None, **init: Any
) -> tuple[PreTrainedModel | PeftModel, Any]:
    """Load a policy as a trainer loads it.

    Args:
        model: Folder or Hub id of a model or a LoRA adapter.
        tokenizer: Its tokenizer. Default: the one that is saved with the model, adapter or base.
        device: Where to load it to. Default: the process's GPU, if there is one.
        init: Further arguments of ``from_pretrained``.

    Returns:
        The model and its tokenizer.

    Raises:
        ValueError: If the adapter cannot be used, or the weights are damaged.
    """
    init = {"device_map": None, **init}
    revision, trust = init.pop("revision", None), bool(init.get("trust_remote_code"))
    saved = find_adapters(model, revision)
    policy: Any
    if saved is None:
        try:
            policy = create_model_from_path(model, revision=revision, **init)
        except SafetensorError as error:
            raise ValueError(
                f"The weights of {model} cannot be read: {error}. The file is damaged or incomplete; copy or download "
                "it again."
            ) from error
        tokenizer = tokenizer or tokenizer_of(policy, revision=revision, trust_remote_code=trust)
    else:
        policy = load_policy(saved, **init)
        fuse(policy)
        tokenizer = tokenizer or load_tokenizer(saved, trust)
        tokenizer = tokenizer or tokenizer_of(policy, revision=saved.config.revision, trust_remote_code=trust)
    if init["device_map"] is None and getattr(policy.config, "quantization_config", None) is None:
        policy = policy.to(PartialState().device if device is None else torch.device(device))
    return policy, tokenizer


def tokenizer_of(model: Any, **init: Any) -> Any:
    """The tokenizer in the folder or Hub repository that a model was loaded from.

    Raises:
        ValueError: If the model does not say where that is.
    """
    name = model.config._name_or_path
    if not name:
        raise ValueError("tokenizer=None: the model was made in memory and names no folder to load one from. Pass it.")
    return AutoTokenizer.from_pretrained(name, **init)
