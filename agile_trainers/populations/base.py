"""The base model of a population: loaded once, and lent to each member's trainer without being changed."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from trl.trainer.utils import create_model_from_path

from agile_trainers.adapters import find_adapters
from agile_trainers.adapters.loading import OnBase, SavedAdapters, load_base
from agile_trainers.adapters.model_folders import naming_folder


class SharedBase:
    """The frozen base of all members, and the adapter that they start from, if any.

    A trainer changes its model's modules: it adds adapters, a value head, hooks and methods. So each trainer gets modules of
    its own, whose parameters share the memory of the base (:meth:`lend`), and nothing has to be undone.

    Args:
        model: Folder or Hub id of a model or of a saved adapter.
        args: The configuration of the members; its ``model_init_kwargs`` say how to load.
        quantization_config: As for a trainer.
    """

    def __init__(self, model: str, args: Any, quantization_config: Any = None) -> None:
        init = {"trust_remote_code": args.trust_remote_code, "device_map": None, **(args.model_init_kwargs or {})}
        if quantization_config is not None:
            init["quantization_config"] = quantization_config
        self.adapters: SavedAdapters | None = find_adapters(model, init.get("revision"))
        if self.adapters is None:
            with naming_folder(model):
                base = create_model_from_path(model, **init)
        else:
            base = load_base(self.adapters, **init)
        if getattr(base.config, "quantization_config", None) is None:
            base = base.to(args.device)
        self._base: PreTrainedModel = base

    def lend(self, adapters: SavedAdapters | None = None) -> PreTrainedModel | OnBase:
        """Return what a trainer takes as ``model``: new modules on the memory of the base.

        Args:
            adapters: A saved policy to put on it. Default: the adapter that all members start from, if any.
        """
        memo: dict[int, Any] = {id(one): _sharing(one) for one in self._base.parameters()}
        base = copy.deepcopy(self._base, memo)
        adapters = adapters or self.adapters
        return base if adapters is None else OnBase(adapters, base)

    def digest(self) -> str:
        """Return a hash (SHA-256) of all parameters and buffers, names included."""
        digest = hashlib.sha256()
        for name, tensor in self._base.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor):
                digest.update(name.encode())
                digest.update(tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def _sharing(parameter: nn.Parameter) -> nn.Parameter:
    """Make another parameter on the same memory. One of a quantization library's own class is shared itself."""
    if type(parameter) is not nn.Parameter:
        return parameter
    return nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
