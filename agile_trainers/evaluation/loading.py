"""Loads a saved policy with its tokenizer: a folder, a Hub id or an adapter."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from peft import PeftModel
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import logging
from trl.trainer.utils import create_model_from_path

from agile_trainers.adapters import find_adapters, load_policy
from agile_trainers.adapters.folders import RECORD, read_record
from agile_trainers.adapters.fused import fuse
from agile_trainers.adapters.loading import load_tokenizer
from agile_trainers.adapters.model_folders import hub_file, naming_folder
from agile_trainers.checkpoints.disclosure import with_private
from agile_trainers.envs.context import is_ready_history
from agile_trainers.rollout.episode_options import EpisodeOptions
from agile_trainers.rollout.generators.base import SamplingSettings

logger = logging.get_logger(__name__)


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
        ValueError: If the adapter cannot be used, or a file of the folder is damaged.
    """
    init = {"device_map": None, **init}
    revision, trust = init.pop("revision", None), bool(init.get("trust_remote_code"))
    saved = find_adapters(model, revision)
    policy: Any
    if saved is None:
        with naming_folder(model):
            policy = create_model_from_path(model, revision=revision, **init)
        tokenizer = tokenizer or tokenizer_of(policy, revision=revision, trust_remote_code=trust)
    else:
        policy = load_policy(saved, **init)
        fuse(policy)
        tokenizer = tokenizer or load_tokenizer(saved, trust)
        tokenizer = tokenizer or tokenizer_of(policy, revision=saved.config.revision, trust_remote_code=trust)
    if init["device_map"] is None and getattr(policy.config, "quantization_config", None) is None:
        policy = policy.to(PartialState().device if device is None else torch.device(device))
    return policy, tokenizer


def recorded_settings(model: str) -> dict[str, Any]:
    """Read the limits of episodes and the sampling settings that a policy was trained with, from its record.

    Args:
        model: Folder or Hub id.

    Returns:
        Those of the fields of :class:`EpisodeOptions` and :class:`SamplingSettings` that the record has; empty without a
        record of a run on episodes.
    """
    file = str(Path(model) / RECORD) if Path(model).is_dir() else hub_file(model, RECORD, None)
    if file is None or not Path(file).is_file():
        return {}
    folder = Path(file).parent
    options, unknown = with_private(read_record(folder).get("options", {}), folder)
    names = {one.name for kind in (EpisodeOptions, SamplingSettings) for one in fields(kind)} - {"do_sample"}
    found = {name: value for name, value in options.items() if name in names}
    if withheld := sorted(names & set(unknown)):
        logger.warning(
            "%s was trained with a %s of its own, whose value is withheld in its record and not known here. The default is "
            "played with unless the option is given.",
            model, ", ".join(withheld),
        )  # fmt: skip
    if not is_ready_history(history := found.get("history")):
        del found["history"]
        logger.warning(
            "%s was trained with history=%r, a function of its own. A record does not make it run: contexts are not "
            "rewritten unless the option is given.",
            model, history,
        )  # fmt: skip
    if "stop_strings" in found:
        found["stop_strings"] = tuple(found["stop_strings"] or ())
    return found


def tokenizer_of(model: Any, **init: Any) -> Any:
    """The tokenizer in the folder or Hub repository that a model was loaded from.

    Raises:
        ValueError: If the model does not say where that is, or it cannot be loaded.
    """
    name = model.config._name_or_path
    if not name:
        raise ValueError("tokenizer=None: the model was made in memory and names no folder to load one from. Pass it.")
    with naming_folder(name):
        return AutoTokenizer.from_pretrained(name, **init)
